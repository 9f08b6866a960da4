"""One member of a group of FlagCX's on host memory: makes the calls that JAX's and PyTorch's programs make, against
exact results. Started by flagcx.py; prints a line of JSON for each test."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

#: FlagCX's numbers (flagcx.h).
DTYPES: Final = {
    "int8": (torch.int8, 0),
    "uint8": (torch.uint8, 1),
    "int32": (torch.int32, 2),
    "int64": (torch.int64, 4),
    "float16": (torch.float16, 6),
    "float32": (torch.float32, 7),
    "float64": (torch.float64, 8),
    "bfloat16": (torch.bfloat16, 9),
}
OPERATIONS: Final = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_ID_BYTES: Final = 256


class Refused(Exception):
    """FlagCX returned an error; the argument is its number."""


class Group:
    """A communicator of ``size`` processes, of which this is ``rank``. ``folder``: where they find each other."""

    def __init__(self, library: str, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library = ctypes.CDLL(library)
        self._handle = ctypes.c_void_p()
        self._call("flagcxDeviceHandleInit", ctypes.byref(self._handle))
        self._communicator = ctypes.c_void_p()
        self._call("flagcxCommInitRank", ctypes.byref(self._communicator), size, self._identifier(folder), rank)
        # The device handle is a table of functions; streamCreate is the eleventh.
        functions = ctypes.cast(self._handle, ctypes.POINTER(ctypes.c_void_p))
        self._stream = ctypes.c_void_p()
        create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(functions[10])
        _check(create(ctypes.addressof(self._stream)))

    def _identifier(self, folder: Path) -> Any:
        identifier, file = ctypes.create_string_buffer(_ID_BYTES), folder / "identifier"
        if self.rank == 0:
            self._call("flagcxGetUniqueId", identifier)
            (folder / "unfinished").write_bytes(identifier.raw)
            (folder / "unfinished").rename(file)
        while not file.exists():
            time.sleep(0.01)
        identifier.raw = file.read_bytes()
        return identifier

    def _call(self, name: str, *arguments: Any) -> None:
        _check(getattr(self._library, name)(*arguments))

    def is_homogeneous(self) -> bool:
        answer = ctypes.c_int(-1)
        self._call("flagcxIsHomoComm", self._communicator, ctypes.byref(answer))
        return answer.value == 1

    def call(self, name: str, *arguments: Any) -> None:
        """A collective: tensors are their addresses, numbers are sizes, which C has as size_t; ``_int`` others."""
        self._call(name, *map(_as_c, arguments), self._communicator, self._stream)

    def together(self, calls: Callable[[], None]) -> None:
        self._call("flagcxGroupStart", self._communicator)
        calls()
        self._call("flagcxGroupEnd", self._communicator)


def _check(result: int) -> None:
    if result:
        raise Refused(result)


def _as_c(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_size_t(argument) if isinstance(argument, int) else argument


_int = ctypes.c_int


def values(name: str, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes to a test: every rank can make all of them. Small whole numbers, whose sums, products
    and quarters every dtype holds exactly; products of ones, minus ones and twos."""
    seed = zlib.crc32(f"{os.environ['FLAGOS_FLAGCX_SEED']} {name} {rank}".encode())
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 3) if dtype is torch.uint8 else (-4, 5)
    drawn = torch.randint(low, high, (count,), generator=generator)
    if " prod " in name:
        drawn = torch.tensor([1, 1, 2] if dtype is torch.uint8 else [1, -1, 2])[drawn % 3]
    return drawn.to(dtype)


def reduced(parts: list[torch.Tensor], operation: str) -> torch.Tensor:
    wide = torch.stack(parts).to(torch.float64)
    made = {
        "sum": lambda: wide.sum(0),
        "prod": lambda: wide.prod(0),
        "max": lambda: wide.amax(0),
        "min": lambda: wide.amin(0),
        "avg": lambda: wide.mean(0),
    }[operation]()
    return made.to(parts[0].dtype)


def _all_reduce(group: Group, name: str, count: int, dtype: torch.dtype, number: int, operation: str) -> None:
    parts = [values(name, rank, count, dtype) for rank in range(group.size)]
    out, own = torch.zeros_like(parts[0]), parts[group.rank].clone()
    code = OPERATIONS[operation]
    group.call("flagcxAllReduce", parts[group.rank], out, count, _int(number), _int(code))
    group.call("flagcxAllReduce", own, own, count, _int(number), _int(code))
    _same(out, reduced(parts, operation))
    _same(own, reduced(parts, operation))


def _reduce_scatter(group: Group, name: str, count: int, dtype: torch.dtype, number: int, operation: str) -> None:
    parts = [values(name, rank, count * group.size, dtype) for rank in range(group.size)]
    out = torch.zeros(count, dtype=dtype)
    group.call("flagcxReduceScatter", parts[group.rank], out, count, _int(number), _int(OPERATIONS[operation]))
    _same(out, reduced(parts, operation).reshape(group.size, count)[group.rank])


def _all_gather(group: Group, name: str, count: int, dtype: torch.dtype, number: int, _: str) -> None:
    parts = [values(name, rank, count, dtype) for rank in range(group.size)]
    out = torch.zeros(count * group.size, dtype=dtype)
    group.call("flagcxAllGather", parts[group.rank], out, count, _int(number))
    _same(out, torch.cat(parts))


def _all_to_all(group: Group, name: str, count: int, dtype: torch.dtype, number: int, _: str) -> None:
    parts = [values(name, rank, count * group.size, dtype) for rank in range(group.size)]
    out = torch.zeros_like(parts[0])
    group.call("flagcxAlltoAll", parts[group.rank], out, count, _int(number))
    _same(out, torch.cat([part.reshape(group.size, count)[group.rank] for part in parts]))


def _all_to_all_v(group: Group, name: str, count: int, dtype: torch.dtype, number: int, _: str) -> None:
    """Rank s sends (s + r + 1) * count / 8 numbers to rank r: other lengths each way, but never none."""

    def length(source: int, target: int) -> int:
        return max(1, (source * 2 + target + 1) * count // 8)

    def starts(lengths: list[int]) -> list[int]:
        return [sum(lengths[:index]) for index in range(len(lengths))]

    given = [[length(source, target) for target in range(group.size)] for source in range(group.size)]
    parts = [values(name, rank, sum(given[rank]), dtype) for rank in range(group.size)]
    taken = [given[source][group.rank] for source in range(group.size)]
    out = torch.zeros(sum(taken), dtype=dtype)
    sizes = ctypes.c_size_t * group.size
    own = given[group.rank]
    sent, received = (sizes(*own), sizes(*starts(own))), (sizes(*taken), sizes(*starts(taken)))
    group.call("flagcxAlltoAllv", parts[group.rank], *sent, out, *received, _int(number))
    _same(out, torch.cat([torch.split(parts[source], given[source])[group.rank] for source in range(group.size)]))


def _broadcast(group: Group, name: str, count: int, dtype: torch.dtype, number: int, _: str) -> None:
    made = []
    for root in range(group.size):
        parts = [values(f"{name} {root}", rank, count, dtype) for rank in range(group.size)]
        out = torch.zeros_like(parts[0])
        group.call("flagcxBroadcast", parts[group.rank], out, count, _int(number), _int(root))
        made.append((out, parts[root]))
    for out, expected in made:  # after all calls: a member that stopped earlier would leave the others waiting
        _same(out, expected)


def _permute(group: Group, name: str, count: int, dtype: torch.dtype, number: int, _: str) -> None:
    """Each rank to the next one, as ppermute and pipelines do."""
    parts = [values(name, rank, count, dtype) for rank in range(group.size)]
    out = torch.zeros_like(parts[0])
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def calls() -> None:
        group.call("flagcxSend", parts[group.rank], count, _int(number), _int(after))
        group.call("flagcxRecv", out, count, _int(number), _int(before))

    group.together(calls)
    _same(out, parts[before])


def _slow_peer(group: Group, name: str, count: int, dtype: torch.dtype, number: int, operation: str) -> None:
    """The last member comes later than the others."""
    if group.rank == group.size - 1:
        time.sleep(1)
    _all_reduce(group, name, count, dtype, number, operation)


def _lost_peer(group: Group, name: str, count: int, dtype: torch.dtype, number: int, operation: str) -> None:
    """The last member ends instead of coming: the others' call returns an error."""
    if group.rank == group.size - 1:
        _say(name, "")
        os._exit(0)
    try:
        _all_reduce(group, name, count, dtype, number, operation)
    except Refused:
        return
    raise AssertionError("a collective without one of its members ended well")


KINDS: Final = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "permute": _permute,
    "slow_peer": _slow_peer,
    "lost_peer": _lost_peer,
}


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        differing = int((found != expected).sum())
        raise AssertionError(f"{differing} of {expected.numel()} differ from the exact result")


def run_test(group: Group, name: str) -> str:
    """What is wrong, or ""; an error number of FlagCX's as "refused NUMBER"."""
    _, kind, operation, dtype_name, count = name.split()
    dtype, number = DTYPES[dtype_name]
    try:
        KINDS[kind](group, name, int(count), dtype, number, operation)
    except Refused as refusal:
        return f"refused {refusal}"
    except AssertionError as error:
        return str(error)
    return ""


def main() -> None:
    library, folder, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    group = Group(library, folder, rank, size)
    _say("homogeneous" if group.is_homogeneous() else "heterogeneous", "")
    for name in (folder / "tests").read_text().splitlines():
        _say(name, run_test(group, name))
    _say("ended", "")
    sys.stdout.flush()
    os._exit(0)  # flagcxCommDestroy never returns from FlagCX's host adaptor (bootstrapAdaptorCommDestroy)


def _say(name: str, message: str) -> None:
    print(json.dumps({"name": name, "message": message}), flush=True)


if __name__ == "__main__":
    main()
