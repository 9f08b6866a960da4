"""torch.flagos: what torch.amp asks of a device."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.device.api.devices import opened


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that torch.autocast("flagos") may compute in."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the device computes with bfloat16; where the inner device can tell, whether it emulates it."""
    supported = getattr(opened().inner_module, "is_bf16_supported", None)
    return True if supported is None else bool(supported(including_emulation))
