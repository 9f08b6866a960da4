"""Who makes which accelerator, and which package teaches torch to drive it. A table, read by discovery.py."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.process.torch_loading import torch


@dataclass(frozen=True, slots=True)
class Vendor:
    """``name`` is FlagGems' name of the vendor. ``package`` adds ``device_type`` to torch; "" when torch has it itself.
    ``products``: how names of its products begin, where several vendors share one device type."""

    name: str
    device_type: str
    package: str = ""
    products: tuple[str, ...] = ()


# Of vendors that share a device type the last is the one whose products need no name.
VENDORS = (
    Vendor("ascend", "npu", "torch_npu"),
    Vendor("mthreads", "musa", "torch_musa"),
    Vendor("cambricon", "mlu", "torch_mlu"),
    Vendor("enflame", "gcu", "torch_gcu"),
    Vendor("tsingmicro", "txda", "torch_txda"),
    Vendor("intel", "xpu"),
    Vendor("metax", "cuda", products=("MetaX", "MXC")),
    Vendor("iluvatar", "cuda", products=("Iluvatar", "BI-V")),
    Vendor("hygon", "cuda", products=("K100", "Z100", "BW")),
    Vendor("amd", "cuda", products=("AMD", "Radeon")),
    Vendor("nvidia", "cuda"),
)


def vendor_of(device_type: str, product: str) -> str:
    """FlagGems' name of the vendor of ``product``; the device type itself for one that is not in the table."""
    for vendor in VENDORS:
        if vendor.device_type == device_type and (not vendor.products or product.startswith(vendor.products)):
            return vendor.name
    return device_type


def product_of(device_type: str) -> str:
    """The name of the product that the current device of ``device_type`` is; "" where one vendor makes all of them, as
    not all of torch's device modules know a name."""
    if not any(vendor.products for vendor in VENDORS if vendor.device_type == device_type):
        return ""
    return str(torch.get_device_module(device_type).get_device_name())


def package_of(device_type: str) -> str:
    """The package that adds ``device_type`` to torch, or ""."""
    return next((vendor.package for vendor in VENDORS if vendor.device_type == device_type), "")
