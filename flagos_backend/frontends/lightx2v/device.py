"""What PLATFORM=flagos is to LightX2V: the device type of its tensors, and how its processes meet."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, Final

from flagos_backend.devices import flagcx
from flagos_backend.frontends.lightx2v import knobs

#: The vendors' backends of torch.distributed, by device type.
_VENDOR_BACKENDS: Final = {
    "cuda": "nccl",
    "npu": "hccl",
    "mlu": "cncl",
    "musa": "mccl",
    "xpu": "xccl",
    "gcu": "eccl",
}

logger = logging.getLogger("flagos.lightx2v")


class FlagosDevice:
    """LightX2V's interface of a platform: static methods, called in the order in which they stand here."""

    name = "flagos"

    @staticmethod
    def get_device() -> str:
        """The device type of torch that models compute on: LIGHTX2V_FL_DEVICE's, else that of this process'
        accelerator, else "cpu". Raises RuntimeError for a device that torch does not know."""
        return chosen_device()

    @staticmethod
    def init_device_env() -> None:
        """Says what was chosen, and gives PyTorch's operators to FlagGems if LIGHTX2V_FL_GLOBAL_GEMS asks for it."""
        knobs.flag(knobs.COMPILE, default=True)
        knobs.flag(knobs.DISABLE_FLAGCX, default=False)
        device = chosen_device()
        logger.info("LightX2V computes on %s through flagos", device)
        unused = knobs.names(knobs.GEMS_UNUSED)
        if knobs.flag(knobs.GLOBAL_GEMS, default=False):
            _enable_flaggems(unused)

    @staticmethod
    def is_available() -> bool:
        """Whether torch has the device. Without FlagGems, Triton and FlagCX it is available, too."""
        try:
            return _is_there(chosen_device())
        except Exception as error:
            logger.warning("the platform flagos is not available: %s", error)
            return False

    @staticmethod
    def init_parallel_env() -> None:
        """Joins the process group, over FlagCX where it is installed, else over the vendor's library, else gloo,
        and makes this process' device the one that LOCAL_RANK counts. Raises RuntimeError without torch.distributed."""
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            raise RuntimeError(
                "PLATFORM=flagos: this PyTorch has no torch.distributed, which `parallel` of the configuration needs. "
                "Install one that has, or leave `parallel` out."
            )
        device = chosen_device()
        if device != "cpu":
            module = torch.get_device_module(device)
            rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
            module.set_device(rank % max(1, module.device_count()))
        if dist.is_initialized():
            logger.warning(
                "the process group is initialized already, over %s, and is left as it is", dist.get_backend()
            )
            return
        backend = collective_backend(device)
        logger.info("LightX2V's processes meet over %s", backend)
        dist.init_process_group(backend=backend)


def chosen_device() -> str:
    """See FlagosDevice.get_device."""
    import torch

    asked = knobs.device_type()
    if not asked:
        found = torch.accelerator.current_accelerator()
        # With no other accelerator it is the device flagos itself; then what was written for the CPU is faster there.
        return found.type if found is not None and found.type != "flagos" and _is_there(found.type) else "cpu"
    if not _is_there(asked):
        raise RuntimeError(
            f"{knobs.DEVICE} is {asked!r}, in the environment, and torch has no such device here. Unset it to have the "
            "accelerator that there is, or the CPU; `flagos doctor` says what is found."
        )
    return asked


def _is_there(device: str) -> bool:
    import torch

    if device == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device).is_available())
    except (RuntimeError, AttributeError):  # torch knows no module of this name
        return False


def collective_backend(device: str) -> str:
    """The backend string of torch.distributed for tensors of a device type and of the CPU."""
    import torch.distributed as dist

    if device == "cpu":
        return "gloo"
    if not knobs.flag(knobs.DISABLE_FLAGCX, default=False) and flagcx.find() and _imports(flagcx.MODULE):
        return f"cpu:gloo,{device}:flagcx"
    vendor = _VENDOR_BACKENDS.get(device) or dist.Backend.default_device_backend_map.get(device, "")
    if vendor and dist.is_backend_available(vendor):
        return f"cpu:gloo,{device}:{vendor}"
    logger.warning("neither FlagCX nor a backend of %s is there: its tensors meet over gloo, through the host", device)
    return "gloo"


def _enable_flaggems(unused: list[str]) -> None:
    """For the rest of the process, with the compiler's guards."""
    # By name: it stands above the front ends, which know no kernels.
    module: Any = importlib.import_module("flagos_backend.gems")
    try:
        module.gems(deny=unused or None).__enter__()
    except (RuntimeError, ValueError) as error:
        logger.warning("%s asks for FlagGems everywhere; nothing changes: %s", knobs.GLOBAL_GEMS, error)


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception as error:  # FlagGems, for one, raises RuntimeError where it finds no chip
        logger.info("%s cannot be used: %s: %s", package, type(error).__name__, error)
        return False
    return True
