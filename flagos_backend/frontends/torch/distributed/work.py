"""The works that collectives of the device answer with: the inner device's, whose results are the device's tensors.

One that has ended is a future. One in flight is a Python object, which PyTorch keeps for a process group of Python's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, _create_work_from_future  # type: ignore[attr-defined]

from flagos_backend.devices.process_groups import is_late, members_text, reason_of
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.runtime import runtime
from flagos_backend.frontends.torch.distributed.errors import CollectiveFailed, CollectiveOverdue

_DEVICE: Final = torch.device(DEVICE_TYPE, 0)


@dataclass(frozen=True)
class Facts:
    """What errors say of a collective."""

    name: str
    group: dist.ProcessGroup
    backend: str

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """What a backend reports while a collective runs becomes CollectiveFailed or CollectiveOverdue."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            processes = dist.get_process_group_ranks(self.group)
            reason = reason_of(error)
            facts = {
                "channel": self.name,
                "group": self.group.group_name,
                "backend": self.backend,
                "members": members_text("process", processes),
                "member": f"process {processes[self.group.rank()]}",
                "reason": reason,
            }
            if is_late(reason):
                raise CollectiveOverdue(**facts, seconds=f"{time.monotonic() - begin:.1f}") from error
            raise CollectiveFailed(**facts) from error


def answer(
    begun: dist.Work | None, results: Any, finish: Callable[[], None], facts: Facts, *, in_flight: bool
) -> dist.Work:
    """The work of a collective that has begun. ``in_flight``: whether the caller goes on before it has ended."""
    if not in_flight:
        with facts.named():
            if begun is not None:  # or it is in the order of the current stream already
                begun.wait()
        finish()
        return _ended(results)
    assert begun is not None
    if runtime().inner.type != "cpu":
        return _kept(_InOrder(begun, results, finish, facts))
    return _kept(_InFlight(begun, results, finish, facts))


def value_of(results: Any) -> list[Any]:
    """What a future holds: the results as gloo gives them, a list of tensors or, of several, of lists."""
    if isinstance(results, torch.Tensor):
        return [results]
    is_one_list = len(results) == 1 and not isinstance(results[0], torch.Tensor)
    return results[0] if is_one_list else results  # type: ignore[no-any-return]


def _future() -> torch.futures.Future[Any]:
    return torch.futures.Future(devices=[_DEVICE])


def _ended(results: Any) -> dist.Work:
    future = _future()
    future.set_result(results)
    return cast(dist.Work, _create_work_from_future(future))


class _InFlight(dist.Work):
    """Of host memory. ``finish`` runs in the backend's thread, before anybody who waits goes on."""

    def __init__(self, begun: dist.Work, results: Any, finish: Callable[[], None], facts: Facts) -> None:
        super().__init__()
        self.begun, self.facts = begun, facts
        inner, root = begun.get_future(), _future()

        def end(_: torch.futures.Future[Any]) -> Any:
            with facts.named():
                inner.value()
            finish()
            return results

        self.future = root.then(end)
        inner.add_done_callback(lambda _: root.set_result(None))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self.facts.named():
            self.begun.wait(timeout)
        self.future.wait()
        _forget()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class _InOrder(dist.Work):
    """Of an accelerator's memory: who waits has the current stream wait, and does not wait itself."""

    def __init__(self, begun: dist.Work, results: Any, finish: Callable[[], None], facts: Facts) -> None:
        super().__init__()
        self.begun, self.results, self.finish, self.facts = begun, results, finish, facts
        self.lock = threading.Lock()
        self.future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self.facts.named():
            self.begun.wait(timeout)
        with self.lock:
            if self.future is None:
                self.finish()
                self.future = _future()
                self.future.set_result(self.results)
        _forget()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        assert self.future is not None
        return self.future


class _Keeper(dist.ProcessGroup):
    """PyTorch keeps the Python part of a work that a group of Python's answers with, as long as C++ has it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # PyTorch's stubs know one constructor of two
        self.work = work

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.work


#: By what PyTorch keeps a work in, which passes on wait and get_future only.
_works: weakref.WeakKeyDictionary[dist.Work, dist.Work] = weakref.WeakKeyDictionary()
_last = threading.local()


def _kept(work: dist.Work) -> dist.Work:
    _answer_for_works()
    kept = dist.ProcessGroup.barrier(_Keeper(work), BarrierOptions())
    _works[kept] = work
    # Until the caller has it: its Python object would be made anew else, and not be known.
    _last.work = kept
    return kept


def _forget() -> None:
    _last.work = None


@functools.cache
def _answer_for_works() -> None:
    """Has the questions that PyTorch does not pass on answered by the works that it keeps."""
    answers: dict[str, Callable[[Any], Any]] = {
        "is_completed": _is_completed,
        "is_success": lambda work: _error(work) is None,
        "exception": _error,
        "result": lambda work: work.get_future().value(),
    }
    for name, ours in answers.items():
        setattr(dist.Work, name, _asking(getattr(dist.Work, name), ours))


def _asking(original: Any, ours: Callable[[Any], Any]) -> Any:
    @functools.wraps(original)
    def answer(self: dist.Work) -> Any:
        known = _works.get(self)
        return original(self) if known is None else ours(known)

    return answer


def _is_completed(work: Any) -> bool:
    return bool(work.begun.is_completed() and (work.future is None or work.future.done()))


def _error(work: Any) -> Exception | None:
    if not _is_completed(work):
        return None
    try:
        work.get_future().value()
    except Exception as error:
        return error
    return None
