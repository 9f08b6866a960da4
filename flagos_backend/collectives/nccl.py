"""NCCL's own calls, for what torch.distributed does not have: a reduction whose result is another array. For
multi_process.py."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, Final

from torch.distributed import ReduceOp

from flagos_backend.process.torch_loading import Tensor, torch

_LIBRARY: Final = "libnccl.so.2"
# ncclDataType_t and ncclRedOp_t.
_TYPES: Final = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPERATIONS: Final = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}


def out_of_place(group: Any) -> Any:
    """What enqueues a reduction over the members of a group on the current stream: (source, target, operation), dense
    arrays of one type. None where the group is not NCCL's, has not met yet, or does not say what it calls."""
    communicator = getattr(group, "_comm_ptr", None)
    if communicator is None or (library := _library()) is None or not (handle := communicator()):
        return None

    def reduce_into(source: Tensor, target: Tensor, operation: Any) -> None:
        code = library.ncclAllReduce(
            source.data_ptr(),
            target.data_ptr(),
            source.numel(),
            _TYPES[source.dtype],
            _OPERATIONS[operation],
            handle,
            torch.cuda.current_stream(source.device).cuda_stream,
        )
        if code:
            raise RuntimeError(f"ncclAllReduce: {library.ncclGetErrorString(code).decode()}")

    return reduce_into


@functools.cache
def _library() -> Any:
    """The NCCL that PyTorch has loaded. None where that has no file of its own, or two are there: which of them a name
    means nobody says."""
    files = {line.split(maxsplit=5)[-1].strip() for line in _mapped() if _LIBRARY in line}
    if len(files) != 1:
        return None
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclAllReduce.argtypes = [address, address, size, ctypes.c_int, ctypes.c_int, address, address]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _mapped() -> list[str]:
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
