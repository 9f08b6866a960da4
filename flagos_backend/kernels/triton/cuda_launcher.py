"""One launcher for kernels of every signature, where Triton would have a C compiler write one for each: Triton 3.6 on
NVIDIA's devices. loading.py puts it there before the first launch of the process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from flagos_backend.kernels.triton import _cuda

logger = logging.getLogger("flagos_backend")

#: One argument of each type that Triton's launchers know, as a signature.
_TYPES: Final = (
    *("*fp32", "constexpr", "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"),
    *("fp16", "bf16", "fp32", "f32", "fp64", ("*i8", ("i32", "constexpr"))),
)

#: Digests of what writes launchers, in versions against which ours was compared. Whatever differs keeps its own.
_VERIFIED: Final = frozenset({"224b51add02a4d63a2e6a5f27bbc9eb0aba775100d4363b26cd47915c8edf6a8"})  # 3.6.0


def install(driver: ModuleType) -> str:
    """Has ``driver``, Triton's module of NVIDIA's, make launchers of ours. Returns why it does not, or "".

    A signature of tensor descriptors gets Triton's own launcher.
    """
    if not hasattr(driver, "make_launcher"):
        return "Triton has one launcher for all signatures"
    found = fingerprint(driver)
    if found not in _VERIFIED:
        return f"this Triton's launchers, {found}, are none that ours was compared with"
    launchers = driver.CudaLauncher
    if not hasattr(launchers.__init__, "__wrapped__"):
        launchers.__init__ = _without_compiler(launchers.__init__)
    return ""


def fingerprint(driver: ModuleType) -> str:
    """A digest of the source that ``driver`` writes for a launcher, and of the class that calls it; "" without them."""
    try:
        written = driver.make_launcher({}, dict(enumerate(_TYPES)), None)
        class_source = inspect.getsource(driver.CudaLauncher)
    except (AttributeError, KeyError, OSError, TypeError):
        return ""
    return hashlib.sha256(f"{written}\n{class_source}".encode()).hexdigest()


def _without_compiler(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(original)
    def initialize(self: Any, src: Any, metadata: Any) -> None:
        try:
            launch = _cuda.Launcher(tuple(src.signature.values()))
        except (TypeError, ValueError) as error:
            logger.debug("a launcher is compiled by a C compiler: %s", error)
            original(self, src, metadata)
            return
        self.launch = launch
        self.num_ctas = getattr(metadata, "num_ctas", 1)
        self.global_scratch_size = metadata.global_scratch_size
        self.global_scratch_align = metadata.global_scratch_align
        self.profile_scratch_size = metadata.profile_scratch_size
        self.profile_scratch_align = metadata.profile_scratch_align
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl

    return initialize
