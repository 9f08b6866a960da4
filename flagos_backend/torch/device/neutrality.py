"""torch.accelerator's questions: answered as if the device were not there until it is used, and by torch.flagos then.

PyTorch takes a renamed PrivateUse1 for *the* accelerator of the process, and knows no answer of a device of Python to
some of the questions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from flagos_backend.torch.device.memory import DEVICE_TYPE

#: The questions of torch.accelerator; they are functions of torch._C, looked up at each call.
_QUESTIONS: Final = tuple(
    name for name in dir(torch._C) if name.startswith("_accelerator_") and not name.endswith("AllocatorSettings")
)
#: Those that PyTorch cannot answer for a device of Python, and who does.
_ANSWERS: Final = {
    "_accelerator_emptyCache": "empty_cache",
    "_accelerator_emptyHostCache": "empty_cache",
    "_accelerator_getDeviceCapability": "get_device_capability",
    "_accelerator_getDeviceStats": "nested_memory_stats",
    "_accelerator_getMemoryInfo": "mem_get_info",
    "_accelerator_getStream": "current_stream",
    "_accelerator_isAllocatorInitialized": "is_initialized",
    "_accelerator_resetAccumulatedStats": "reset_accumulated_memory_stats",
    "_accelerator_resetPeakStats": "reset_peak_memory_stats",
    "_accelerator_setStream": "set_stream",
    "_accelerator_synchronizeDevice": "synchronize",
}


def install(in_use: Callable[[], bool]) -> None:
    """Stands before the questions for the accelerator, if there was none before."""
    if torch._C._accelerator_getAccelerator() is not None:
        return  # the user has asked for this device instead
    for name in _QUESTIONS:
        setattr(torch._C, name, _answer(name, getattr(torch._C, name), in_use))


def _answer(name: str, question: Callable[..., Any], in_use: Callable[[], bool]) -> Callable[..., Any]:
    ours = _ANSWERS.get(name)

    @functools.wraps(question)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not in_use():
            if name == "_accelerator_getAccelerator":
                return None
            raise RuntimeError("Cannot access accelerator device when none is available.")
        if ours is None:
            return question(*args, **kwargs)
        return getattr(getattr(torch, DEVICE_TYPE), ours)(*args, **kwargs)

    return answer
