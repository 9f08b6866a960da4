"""What a terminal shows of a long compile, and where nothing is shown."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from flagos_backend.process import progress

ROOT = Path(__file__).resolve().parents[2]
# Each stage lasts until it has been drawn: what is shown does not depend on how fast this host is.
SCRIPT = """
import sys, time
from flagos_backend.process import progress

progress.DELAY, progress._INTERVAL = 0.02, 0.01
drawn = set()
update = progress._update
def noted(bar, work):
    state = work.stage, work.counted
    update(bar, work)
    drawn.add(state)
progress._update = noted

def wait():
    work = progress._current.get()
    while work is not None and (work.stage, work.counted) not in drawn:
        time.sleep(0.005)

with progress.shown():
    with progress.stage("passes"):
        wait()
        with progress.shown(), progress.stage("kernels"):
            for item in progress.counted(["a", "b", "c"], "kernels"):
                wait()
        wait()
print("end", flush=True)
"""


def on_a_terminal(size: tuple[int, int], **variables: str) -> str:
    """What a terminal of so many lines and columns gets; it has stdout and stderr."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LOCAL_RANK", "COLUMNS")}
    environment = plain | {"TERM": "xterm", "PYTHONPATH": str(ROOT)} | variables
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    out = b""
    try:
        while part := os.read(master, 65536):
            out += part
    except OSError:  # the last one that had the terminal closed it
        pass
    os.close(master)
    assert child.wait() == 0, out
    return out.decode()


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["plain", "no color"])
@pytest.mark.parametrize("size", [(24, 80), (0, 0)], ids=["24 x 80", "no size"])
def test_a_terminal_shows_stage_and_kernels(size: tuple[int, int], variables: dict[str, str]) -> None:
    out = on_a_terminal(size, **variables)
    frames = out.split("\r")
    assert any(re.fullmatch(r"flagos: passes \[\d\d:\d\d\] *", frame) for frame in frames), out
    assert any(re.search(r"flagos: kernels .* 1/3 kernels, 2 left", frame) for frame in frames), out
    assert "\x1b" not in out and "\n" not in out.partition("end")[0]
    # The line is gone when it is over.
    assert not frames[frames.index(next(f for f in frames if f.startswith("end"))) - 1].strip()
    assert max(len(frame) for frame in frames) <= 80


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"LOCAL_RANK": "1"}, {"TQDM_DISABLE": "1"}], ids=str)
def test_nothing_is_shown_where_it_would_disturb(variables: dict[str, str]) -> None:
    assert on_a_terminal((24, 80), **variables) == "end\r\n"


def test_pipes_get_nothing() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


def test_without_tqdm_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        closed = False

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert progress._can_show(Terminal())  # type: ignore[arg-type]
    monkeypatch.setattr(progress, "_has_tqdm", lambda: False)
    assert not progress._can_show(Terminal())  # type: ignore[arg-type]
