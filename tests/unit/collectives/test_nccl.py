"""What NCCL is called with, by a library that stands for it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from flagos_backend.collectives import nccl

_STREAM, _COMMUNICATOR = 11, 12
_LINE = "7f00-7f01 r-xp 00000000 08:01 42   /site-packages/nvidia/nccl/lib/libnccl.so.2"


class Library:
    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._code = code

    def ncclAllReduce(self, *given: int) -> int:
        self.calls.append(given)
        return self._code

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"unhandled system error"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nccl, "_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=_STREAM))
    return made


GROUP = SimpleNamespace(_comm_ptr=lambda: _COMMUNICATOR)


@pytest.mark.parametrize(
    ("dtype", "number"),  # ncclDataType_t of nccl.h
    [
        (torch.int8, 0),
        (torch.uint8, 1),
        (torch.int32, 2),
        (torch.int64, 4),
        (torch.float16, 6),
        (torch.float32, 7),
        (torch.float64, 8),
        (torch.bfloat16, 9),
    ],
)
@pytest.mark.parametrize(
    ("operation", "code"),  # ncclRedOp_t
    [(ReduceOp.SUM, 0), (ReduceOp.PRODUCT, 1), (ReduceOp.MAX, 2), (ReduceOp.MIN, 3)],
)
def test_a_sum_into_another_array(
    library: Library, dtype: torch.dtype, number: int, operation: ReduceOp.RedOpType, code: int
) -> None:
    source, target = torch.zeros(3, 5, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
    reduce_into = nccl.out_of_place(GROUP)
    assert reduce_into is not None
    reduce_into(source, target, operation)
    assert library.calls == [(source.data_ptr(), target.data_ptr(), 15, number, code, _COMMUNICATOR, _STREAM)]


def test_what_nccl_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_library", lambda: Library(code=2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=_STREAM))
    reduce_into = nccl.out_of_place(GROUP)
    assert reduce_into is not None
    with pytest.raises(RuntimeError, match="ncclAllReduce: unhandled system error"):
        reduce_into(torch.zeros(1), torch.zeros(1), ReduceOp.SUM)


def test_groups_without_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another transport's, one that has not met yet, and a process without NCCL."""
    assert nccl.out_of_place(SimpleNamespace()) is None
    assert nccl.out_of_place(SimpleNamespace(_comm_ptr=lambda: 0)) is None
    monkeypatch.setattr(nccl, "_library", lambda: None)
    assert nccl.out_of_place(GROUP) is None


@pytest.mark.parametrize(
    ("mapped", "is_asked"),
    [
        ([], False),
        ([_LINE, _LINE], True),
        ([_LINE, _LINE.replace("/site-packages", "/usr")], False),
        (["7f00-7f01 r-xp 00000000 08:01 42   /usr/lib/libcuda.so.1"], False),
    ],
)
def test_a_process_with_one_file_of_nccl(monkeypatch: pytest.MonkeyPatch, mapped: list[str], is_asked: bool) -> None:
    """That of a name is asked for only where there is one."""
    asked: list[str] = []

    def load(name: str, mode: int) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(ncclAllReduce=SimpleNamespace(), ncclGetErrorString=SimpleNamespace())

    monkeypatch.setattr(nccl, "_mapped", lambda: mapped)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert (nccl._library.__wrapped__() is not None) == is_asked
    assert asked == (["libnccl.so.2"] if is_asked else [])
