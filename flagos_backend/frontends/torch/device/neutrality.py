"""torch.accelerator's questions: answered as if the device were not there until it is used, and by torch.flagos then.

PyTorch takes a renamed PrivateUse1 for *the* accelerator of the process, and knows no answer of a device of Python to
some of the questions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

#: PyTorch's own: settings of CUDA's allocator; the stream, which compiled programs ask for before each run, and
#: which Dynamo would compile in turn.
_LEFT: Final = ("AllocatorSettings", "getStream")
#: The questions of torch.accelerator; they are functions of torch._C, looked up at each call.
_QUESTIONS: Final = tuple(
    name for name in dir(torch._C) if name.startswith("_accelerator_") and not name.endswith(_LEFT)
)
#: Those that PyTorch cannot answer for a device of Python, and who does.
_ANSWERS: Final = {
    "_accelerator_emptyCache": "empty_cache",
    "_accelerator_emptyHostCache": "empty_cache",
    "_accelerator_getDeviceCapability": "get_device_capability",
    "_accelerator_getDeviceStats": "nested_memory_stats",
    "_accelerator_getMemoryInfo": "mem_get_info",
    "_accelerator_isAllocatorInitialized": "is_initialized",
    "_accelerator_resetAccumulatedStats": "reset_accumulated_memory_stats",
    "_accelerator_resetPeakStats": "reset_peak_memory_stats",
    "_accelerator_synchronizeDevice": "synchronize",
}

#: What PyTorch answers where it was built for an accelerator of which the machine has none; the rest raises.
_WITHOUT_DEVICES: Final[dict[str, Any]] = {
    "_accelerator_emptyCache": None,
    "_accelerator_emptyHostCache": None,
    "_accelerator_isAllocatorInitialized": False,
}

#: Where torch._utils._get_available_device_type finds the devices to spread a batch over; of this one there is never
#: more than one. Others that ask (distributed checkpoints) have seen torch.flagos already, and want its name.
_SPREADS: Final = "torch.nn.parallel.data_parallel"


def install(in_use: Callable[[], bool]) -> bool:
    """Stands before the questions for the accelerator; until the device is in use they are answered as they were.

    Called before the device gets its name. Beside another accelerator, the user has asked for this one instead. Returns
    whether there is none, so that only the host can compute for the device.
    """
    before = torch._C._accelerator_getAccelerator()
    beside = before is not None and torch.get_device_module(before).device_count() > 0
    if beside:
        in_use = _always
    for name in _QUESTIONS:
        setattr(torch._C, name, _answer(name, getattr(torch._C, name), in_use, before))
    torch._C._get_accelerator = _unless_used(torch._C._get_accelerator, in_use, torch._C._get_accelerator())
    spreading: Any = sys.modules[_SPREADS]
    spreading._get_available_device_type = _hiding_this(spreading._get_available_device_type)
    return not beside


def _hiding_this(question: Callable[[], str | None]) -> Callable[[], str | None]:
    @functools.wraps(question)
    def answer() -> str | None:
        found = question()
        return None if found == DEVICE_TYPE else found

    return answer


def _always() -> bool:
    return True


def _unless_used(question: Callable[..., Any], in_use: Callable[[], bool], otherwise: Any) -> Callable[..., Any]:
    @functools.wraps(question)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return question(*args, **kwargs) if in_use() else otherwise

    return answer


def _answer(
    name: str, question: Callable[..., Any], in_use: Callable[[], bool], before: torch.device | None
) -> Callable[..., Any]:
    ours = _ANSWERS.get(name)

    @functools.wraps(question)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not in_use():
            if before is not None and name in _WITHOUT_DEVICES:
                return _WITHOUT_DEVICES[name]
            raise RuntimeError("Cannot access accelerator device when none is available.")
        if ours is None:
            return question(*args, **kwargs)
        return getattr(getattr(torch, DEVICE_TYPE), ours)(*args, **kwargs)

    return answer if name != "_accelerator_getAccelerator" else _unless_used(question, in_use, before)
