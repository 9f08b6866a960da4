"""`flagos trace` on the host CPU: what is in the file, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flagos_backend.frontends.jax
from flagos_backend.cli import trace_file, trace_text
from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.main import main
from flagos_backend.cli.program_file import Form, program_of
from flagos_backend.cli.running import run_once
from flagos_backend.cli.session import open_context
from flagos_backend.cli.trace import recording
from plugin_abi.host import ElementType, Executable
from programs import hlo_bytes

flagos_backend.frontends.jax.initialize()

Event = dict[str, Any]
HOSTILE = 'a "b"\n<script>\\\x1b[2J'
# Two threads launch.
TRAINING = """
import sys, threading
import jax, numpy as np
device = jax.devices("flagos")[0]
step = jax.jit(lambda x: (x @ x.T).sum())
x = jax.device_put(np.ones((64, 32), np.float32), device)
threads = [threading.Thread(target=lambda: step(x).block_until_ready()) for _ in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
sys.exit(3)
"""


FORKED = """
import os, signal
import numpy as np
from contextlib import ExitStack
from plugin_abi.host import ElementType
from flagos_backend.cli.session import open_context

def send(context, count):
    array, memory = np.ones(count, np.float32), context.devices[0].default_memory
    for _ in range(5000):
        memory.from_host(array, array.shape, ElementType.F32).close()

stack = ExitStack()
context = stack.enter_context(open_context())
child = os.fork()
send(context, 2 if child else 4)
if child:
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "norm.hlo"
    arguments = np.ones((64, 32), np.float32), np.ones((32, 48), np.float32)
    path.write_bytes(hlo_bytes(lambda x, w: jnp.sort(jnp.tanh(x @ w) + 1j).real, *arguments))
    return path


def events_of(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert event["ph"] in "XMC" and isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] > 0 and isinstance(event["tid"], int)
    return events


def spans(events: list[Event], category: str) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["cat"].partition(",")[0] == category]


def assert_nested(events: list[Event]) -> None:
    """In a thread a span lies inside another, or beside it."""
    for thread in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        open_until: list[float] = []
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
        for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002  # times have three digits behind the point
            open_until.append(end)


def test_a_program_is_traced(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", str(program), "--rounds", "3", "-o", str(path)]) == 0
    assert "FLAGOS_TRACE" not in os.environ
    events = events_of(path)
    assert_nested(events)
    launches, steps = spans(events, "execute"), spans(events, "step")
    assert len(launches) == 3
    assert all(launch["args"]["program"] == launch["name"] and launch["args"]["flops"] > 0 for launch in launches)
    for step in steps:
        assert any(
            launch["tid"] == step["tid"]
            and launch["ts"] <= step["ts"] + 0.002
            and step["ts"] + step["dur"] <= launch["ts"] + launch["dur"] + 0.002
            for launch in launches
        )
    assert len(steps) % 3 == 0 and {"product", "call"} <= {step["args"]["kind"] for step in steps}
    assert any(step["args"].get("source", "").rpartition(":")[0].endswith(Path(__file__).name) for step in steps)
    sent = [event["args"]["bytes"] for event in spans(events, "transfer") if event["name"] == "buffer_from_host"]
    assert sum(sent) == 4 * (64 * 32 + 32 * 48)
    assert spans(events, "compile stage") and any(event["ph"] == "C" for event in events)
    out = capsys.readouterr().out
    assert "3 launches" in out and "call sort" in out and "roofline" in out


def test_a_session_and_a_file_tell_the_same(tmp_path: Path) -> None:
    """Each makes text of the records by itself. The steps of a run take more records than one."""
    x = np.ones((8, 8), np.float32)

    def chain(x: Any) -> Any:
        for _ in range(12):
            x = jnp.tanh(x @ x)
        return x

    with recording(tmp_path), ExitStack() as stack:
        context = stack.enter_context(open_context())
        given = program_of(hlo_bytes(chain, x), Form.HLO_PROTO, "chain")
        executable = stack.enter_context(Executable.compile(context, given))
        context.profiler_start()
        argument = stack.enter_context(context.devices[0].default_memory.from_host(x, x.shape, ElementType.F32))
        run_once(executable, [argument])
        session = json.loads(context.profiler_stop())["traceEvents"]
    kept = list(trace_file.events_of(tmp_path))
    steps = spans(session, "step")
    assert len(steps) == len(spans(kept, "step")) > 14

    def told(event: Event) -> tuple[Any, ...]:
        return event["cat"], event["name"], event["tid"], event["ts"], event["dur"], event["args"].get("step")

    of_session = {told(event) for event in session if event["ph"] == "X"}
    # The file has the compile, too.
    assert of_session == {told(e) for e in kept if e["ph"] == "X" and not e["cat"].startswith("compile")}


def test_a_command_is_traced_however_it_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", "-o", str(path), "--", sys.executable, "-c", TRAINING]) == 3
    events = events_of(path)
    assert_nested(events)
    assert len([launch for launch in spans(events, "execute") if launch["args"]["flops"] > 0]) >= 2
    assert "exit status 3" in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_records_is_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    path = tmp_path / "trace.json"
    assert main(["trace", str(folder), "-o", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1 and not path.exists()
    part(folder, "1-0", 1, span(1))
    assert main(["trace", str(folder), "-o", str(path)]) == 0
    assert [event["name"] for event in events_of(path)] == [HOSTILE]


def test_what_is_killed_and_what_is_forked_leaves_what_ran(tmp_path: Path) -> None:
    """The parent is killed, its child ends by itself; both write into one file."""
    environment = {**os.environ, "FLAGOS_TRACE": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", FORKED], env=environment, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".records"} and len(list(tmp_path.iterdir())) == 2
    transfers = spans(list(trace_file.events_of(tmp_path)), "transfer")
    by_process = [[e["args"]["bytes"] for e in transfers if e["pid"] == pid] for pid in {e["pid"] for e in transfers}]
    # More than a block of records each: none lies on another's place.
    assert sorted(by_process) == [[8] * 5000, [16] * 5000]


def test_without_the_variable_nothing_is_written(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FLAGOS_TRACE"}
    subprocess.run([sys.executable, "-c", TRAINING], cwd=tmp_path, env=environment, timeout=120, check=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "status"), [(["no-such-command-of-anybody"], 127), ([str(Path(__file__).parent)], 126)]
)
def test_what_cannot_run(command: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "-o", str(tmp_path / "trace.json"), "--", *command]) == status
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "FLAGOS_TRACE": str(tmp_path / "no")}
    command = [sys.executable, "-c", "from flagos_backend.cli.main import main; raise SystemExit(main(['devices']))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "FLAGOS_TRACE is" in done.stderr and "Traceback" not in done.stderr


def test_wrong_usage_is_one_line(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_program = tmp_path / "text"
    no_program.write_text("nothing")
    nowhere = str(tmp_path / "no" / "trace.json")
    for arguments, status in (
        (["trace"], 2),
        (["trace", str(program), "--", "true"], 2),
        (["trace", str(program), "--rounds", "0"], 1),
        (["trace", str(no_program), "-o", str(tmp_path / "trace.json")], 1),
        (["trace", "-o", nowhere, "--", "touch", str(tmp_path / "ran")], 1),
    ):
        assert main(arguments) == status
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [no_program]


def part(folder: Path, name: str, pid: int, *records: bytes, after: str = "") -> None:
    facts = {"name": HOSTILE, "steps": {"0": {"kind": "collective", "source": HOSTILE, "expected_seconds": 1e-6}}}
    about = {"ph": "M", "name": "flagos_program", "pid": pid, "args": {"program": 0, "facts": facts}}
    texts = {"ph": "M", "name": "flagos_text", "pid": pid, "args": {"number": 1, "text": HOSTILE}}
    meanings = {"ph": "M", "name": "flagos_records", "pid": pid, "args": {"categories": ["execute", "step"]}}
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (meanings, texts, about)) + after)
    header = trace_file.MAGIC.ljust(trace_file.HEADER_BYTES, b"\0")
    (folder / f"{name}.records").write_bytes(header + b"".join(records))


def span(pid: int, kind: int = trace_file.SPAN, category: int = 1, name: int = 1, program: int = 0) -> bytes:
    return trace_file.RECORD.pack(kind, pid, 1, category, name, 0, program, 0, 5000, 7000, -1, 0)


def test_parts_are_merged_and_names_survive(tmp_path: Path) -> None:
    part(tmp_path, "1-0", 1, span(1), span(1)[:30], after='{"ph":"M","cut off')
    part(tmp_path, "2-0", 2, span(2, kind=0), span(2))
    summary = trace_text.Summary()
    with (tmp_path / "trace.json").open("w") as stream:
        trace_file.write(stream, summary.all(trace_file.events_of(tmp_path)), {"command": HOSTILE})
    events = events_of(tmp_path / "trace.json")
    assert [event["pid"] for event in events] == [1, 2] and summary.processes == {1, 2}
    for event in events:
        assert event["name"] == event["args"]["program"] == event["args"]["source"] == HOSTILE
        assert event["cat"] == "step,collective" and event["args"]["roofline"] == pytest.approx(0.5)
    lines = trace_text.text_of(summary, 10, 30).split("\n")
    assert all(line.isprintable() and len(line) <= 30 for line in lines)


@pytest.mark.parametrize(
    ("record", "unknown"),
    [({"name": 2}, "2"), ({"program": 1}, "1"), ({"category": 2}, "tuple index"), ({"kind": 9}, "kind 9")],
)
def test_a_record_that_means_nothing_is_refused(record: dict[str, int], unknown: str, tmp_path: Path) -> None:
    part(tmp_path, "1-0", 1, span(1), span(1, **record))
    with pytest.raises(CommandFailed, match=rf"1-0\.records, event 1: nothing is known of .*{unknown}"):
        list(trace_file.events_of(tmp_path))


def test_steps_of_a_run_follow_each_other(tmp_path: Path) -> None:
    run = trace_file.RECORD.pack(trace_file.STEPS, 1, 1, 1, 0, 0, 0, 0, 1000, 10000, 9, 0)
    ends = [trace_file.STEP_ENDS.pack(trace_file.ENDS, 7, *range(2000, 9000, 1000))]
    ends += [trace_file.STEP_ENDS.pack(trace_file.ENDS, 2, 9000, 10000, 0, 0, 0, 0, 0)]
    # The last ends are of a run that was not written any more.
    part(tmp_path, "1-0", 1, run, *ends, span(1), ends[0])
    *steps, last = trace_file.events_of(tmp_path)
    assert [(e["args"]["step"], e["ts"], e["dur"]) for e in steps] == [(i, i + 1.0, 1.0) for i in range(9)]
    assert [e["name"] for e in steps[1:]] == [f"step {i}" for i in range(1, 9)] and last["name"] == HOSTILE


def test_a_broken_part_is_refused(tmp_path: Path) -> None:
    part(tmp_path, "1-0", 1, after="[1]\n")
    with pytest.raises(CommandFailed, match=r"1-0\.jsonl, line 4, is no trace event"):
        list(trace_file.events_of(tmp_path))
    part(tmp_path, "1-0", 1)
    (tmp_path / "1-0.records").write_bytes(b"another file")
    with pytest.raises(CommandFailed, match=r"1-0\.records has no records of this version"):
        list(trace_file.events_of(tmp_path))
    (tmp_path / "1-0.records").unlink()
    with pytest.raises(CommandFailed, match=r"1-0\.records cannot be read"):
        list(trace_file.events_of(tmp_path))
