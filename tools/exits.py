"""Ends processes in which the device is at work, in many ways, and counts those that did not end as they should.

    python -m tools.exits --count 1000 --seed 0 --workers 2 --out exits.txt    # JAX_PLATFORMS=flagos,cpu
    python -m tools.exits --kinds handlers interrupted                         # these, in turn

The platform is that of JAX_PLATFORMS: with `cpu` it is JAX's own. Each process is forked from one that has imported
everything and used no device. It runs one ending, and Python finalizes it as any other.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import os
import random
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

SECONDS = 120


@jax.jit
def _long(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ y), x)


def _slow_callback(x: np.ndarray) -> np.ndarray:
    time.sleep(0.05)
    return np.asarray(x) + 1


@jax.jit
def _calls_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(_slow_callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2


def _launches(device: Any = None) -> list[jax.Array]:
    x = jax.device_put(jnp.eye(64), device)
    return [_long(x + i) for i in range(4)]


def _calls_back_forever() -> None:
    while True:
        jax.block_until_ready(_calls_back(jnp.ones(4)))


def _traces_forever() -> None:
    while True:
        jax.eval_shape(_long, jax.ShapeDtypeStruct((8, 8), jnp.float32))


def _soon() -> None:
    time.sleep(random.random() * 0.2)


def _computes(scale: float = 1.0) -> None:
    """Compiles a program of its own and checks what it computes."""
    values = jnp.arange(8.0) * scale
    expected = (np.arange(8.0) * scale) ** 2 + 1
    np.testing.assert_allclose(jax.jit(lambda x: x * x + 1)(values), expected, rtol=1e-6)


def _in_thread(function: Callable[[], object], *, daemon: bool) -> None:
    begun = threading.Event()

    def run() -> None:
        begun.set()
        function()

    threading.Thread(target=run, daemon=daemon).start()
    begun.wait()


def _forever() -> None:
    while True:
        jax.block_until_ready(_long(jnp.eye(8)))


def _compiles_forever() -> None:
    for i in range(10**6):
        jax.jit(lambda x, i=i: jnp.sin(x) + i)(jnp.ones(4)).block_until_ready()


def launches() -> Any:
    return _launches()


def launches_on_devices() -> Any:
    return [_launches(device) for device in jax.devices()]


def callbacks() -> Any:
    return [_calls_back(jnp.ones(4)) for _ in range(3)]


def handlers() -> None:
    _computes()
    atexit.register(_computes, 2.0)


def handler_of_threading() -> None:
    _computes()
    threading._register_atexit(_computes, 3.0)  # type: ignore[attr-defined]


def first_torch_in_a_handler() -> None:
    _computes()
    atexit.register(callbacks)


def finalizer() -> None:
    _computes()
    kept.append(_Kept())
    weakref.finalize(kept[-1], _computes, 4.0)


def after_a_run_of_handlers() -> None:
    launched = _launches()
    atexit._run_exitfuncs()
    _computes(5.0)
    del launched
    atexit.register(_computes, 6.0)


def thread() -> None:
    def computes() -> None:
        for i in range(3):
            _computes(float(i))

    _in_thread(computes, daemon=False)


def _first_use(function: Callable[[], object]) -> Callable[[], object]:
    """``function``, in a thread that uses the device first. It is in no C++ code of JAX's before JAX looks for devices:
    until then nothing of a backend has been called, and CPython may unwind the thread, whatever the platform."""

    def run() -> None:
        jax.devices()
        function()

    return run


def daemon_that_launches() -> None:
    _in_thread(_first_use(_forever), daemon=True)
    _soon()


def daemon_that_launches_for_long() -> None:
    _computes()
    daemon_that_launches()


def daemon_that_compiles() -> None:
    _in_thread(_first_use(_compiles_forever), daemon=True)
    _soon()


def daemon_that_compiles_for_long() -> None:
    _computes()
    daemon_that_compiles()


def daemon_that_traces() -> None:
    _computes()
    _in_thread(_traces_forever, daemon=True)
    _soon()


def daemon_that_calls_back() -> None:
    _computes()
    _in_thread(_calls_back_forever, daemon=True)
    _soon()


def daemon_and_handlers() -> None:
    daemon_that_launches()
    handlers()


def many_daemons() -> None:
    daemon_that_launches_for_long()
    daemon_that_compiles()
    daemon_that_calls_back()


def exits_by_exception() -> None:
    kept.append(_launches())
    sys.exit(0)


def ends_at_once() -> None:
    kept.append(_launches())
    os._exit(0)


def killed() -> None:
    kept.append(_launches())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS)


def interrupted() -> None:
    _computes()
    atexit.register(_computes, 7.0)
    with contextlib.suppress(KeyboardInterrupt):
        kept.append(_launches())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS)


def torch_device() -> None:
    import torch

    from flagos_backend.torch import autoload

    autoload.enable()  # where PyTorch has another accelerator it does not load itself

    x = torch.ones(8, 8, device="flagos", requires_grad=True)
    (x * x).sum().backward()
    kept.append(x)

    def backward() -> None:
        x.grad = None
        (x * 3).sum().backward()
        assert x.grad is not None and bool((x.grad.cpu() == 3).all())

    atexit.register(backward)


def torch_daemon() -> None:
    import torch

    device = "flagos" if is_flagos() else "cpu"

    def forever() -> None:
        x = torch.ones(64, 64, device=device)
        while True:
            (x @ x).cpu()

    torch.ones(2, device=device).cpu()
    _in_thread(forever, daemon=True)
    _soon()


def torch_compiled() -> None:
    import torch

    compiled = torch.compile(lambda x: torch.sin(x) * 2, backend="flagos")
    x = torch.ones(4)

    def check() -> None:
        torch.testing.assert_close(compiled(x), torch.sin(x) * 2)

    check()
    atexit.register(check)


class _Kept:
    pass


#: What lives until Python takes its modules down.
kept: list[Any] = []

_OF_JAX = (
    *(launches, launches_on_devices, callbacks, handlers, handler_of_threading, first_torch_in_a_handler, finalizer),
    *(
        after_a_run_of_handlers,
        thread,
        daemon_that_launches,
        daemon_that_launches_for_long,
        daemon_that_compiles,
        daemon_that_compiles_for_long,
    ),
    *(daemon_that_traces, daemon_that_calls_back, daemon_and_handlers, many_daemons, exits_by_exception, ends_at_once),
    *(killed, interrupted),
)


#: Asked for by name only: CPython ends the thread inside PyTorch's own code, which ends the process, on any device.
OF_PYTORCH = frozenset({"torch_daemon"})


def is_flagos() -> bool:
    return os.environ.get("JAX_PLATFORMS", "").startswith("flagos")


def endings(*, flagos: bool) -> dict[str, Callable[[], object]]:
    """Those that the platform and what is installed have."""
    of_torch = (torch_device, torch_daemon, torch_compiled) if flagos else (torch_daemon,)
    has_torch = importlib.util.find_spec("torch") is not None
    return {function.__name__: function for function in _OF_JAX + (of_torch if has_torch else ())}


@dataclass(frozen=True)
class End:
    """Its status as os.waitstatus_to_exitcode has it, None for a process that had to be killed, and what it wrote."""

    kind: str
    code: int | None
    output: str
    seconds: float

    @property
    def is_as_expected(self) -> bool:
        return self.output == "" and self.code == (-signal.SIGTERM if self.kind == "killed" else 0)


@dataclass
class _Process:
    kind: str
    pid: int
    output: IO[bytes]
    begun: float = field(default_factory=time.monotonic)

    def end(self) -> End | None:
        """None while it runs and may."""
        seconds = time.monotonic() - self.begun
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended and seconds < SECONDS:
            return None
        if not ended:
            os.kill(self.pid, signal.SIGABRT)
            os.waitpid(self.pid, 0)
        self.output.seek(0)
        written = self.output.read().decode("utf-8", "replace")
        self.output.close()
        return End(self.kind, os.waitstatus_to_exitcode(status) if ended else None, written, seconds)


class _Child(BaseException):
    """In the forked process: what it is to run."""


def _begin(kind: str, seed: int) -> _Process:
    output = tempfile.TemporaryFile()  # noqa: SIM115 -- closed once the process has ended
    pid = os.fork()
    if pid == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable()  # one that hangs tells where: it is aborted
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background processes ignore
        random.seed(seed)
        # Raised to the module's end, from which Python is finalized.
        raise _Child(kind)
    return _Process(kind, pid, output)


def run(kinds: Sequence[str], *, workers: int) -> list[End]:
    """Ends a process of each of ``kinds``, ``workers`` at once, and writes about the bad ones as they come."""
    ends: list[End] = []
    running: list[_Process] = []
    waiting = list(enumerate(kinds))
    while waiting or running:
        while waiting and len(running) < workers:
            seed, kind = waiting.pop(0)
            running.append(_begin(kind, seed))
        time.sleep(0.01)
        for process in list(running):
            if (end := process.end()) is not None:
                running.remove(process)
                ends.append(end)
                if not end.is_as_expected:
                    print(f"{end.kind}: exit status {end.code}: {end.output}", flush=True)
    return ends


def table(ends: Sequence[End]) -> str:
    """Text: a row a kind."""
    lines = [f"{'kind':32}{'exits':>8}{'bad':>8}{'longest, s':>12}"]
    for kind in dict.fromkeys(end.kind for end in ends):
        of_kind = [end for end in ends if end.kind == kind]
        bad = sum(not end.is_as_expected for end in of_kind)
        lines.append(f"{kind:32}{len(of_kind):8}{bad:8}{max(end.seconds for end in of_kind):12.1f}")
    bad = sum(not end.is_as_expected for end in ends)
    return "\n".join([*lines, f"{len(ends)} exits, {bad} bad"])


def _import_what_children_use() -> None:
    if not is_flagos():
        return
    for module in ("bridge", "compile", "frontends.jax.lowering", "frontends.jax.registration"):
        importlib.import_module(f"flagos_backend.{module}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.exits", description="Ends processes, and counts the bad ends."
    )
    parser.add_argument("--count", type=int, help="this many, of all kinds as evenly as it goes; default: one of each")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--kinds", nargs="*", choices=list(endings(flagos=is_flagos())), help="these only")
    parser.add_argument("--workers", type=int, default=1, help="processes that run at once")
    parser.add_argument("--out", type=Path, help="a file for the table")
    return parser.parse_args()


def main() -> None:
    options = _options()
    kinds = options.kinds or [kind for kind in endings(flagos=is_flagos()) if kind not in OF_PYTORCH]
    count = len(kinds) if options.count is None else options.count
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    random.Random(options.seed).shuffle(chosen)
    _import_what_children_use()
    ends = sorted(run(chosen, workers=options.workers), key=lambda end: kinds.index(end.kind))
    told = table(ends)
    print(told)
    if options.out is not None:
        about = f"{os.environ.get('JAX_PLATFORMS', '')}, Python {sys.version.split()[0]}, jax {jax.__version__}"
        where = f"{os.cpu_count()} cores, {datetime.datetime.now(datetime.UTC).date()}"
        options.out.write_text(f"{about}, {where}: tools.exits {' '.join(sys.argv[1:])}\n\n{told}\n")
    sys.exit(any(not end.is_as_expected for end in ends))


if __name__ == "__main__":
    try:
        main()
    except _Child as child:
        kind = str(child)
    kept.append(endings(flagos=is_flagos())[kind]())
