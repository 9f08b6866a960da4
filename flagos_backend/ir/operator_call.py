"""The custom calls ``aten::<op>.<overload>``, which run an operator of PyTorch: what fusion knows of their operands.
kernels/reference/CUSTOM_CALLS.md holds the format; kernels/reference/aten.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.config import parse_config
from flagos_backend.ir.hlo import Instruction


def takes_strides(instruction: Instruction, operand: int) -> bool:
    """Whether ``instruction`` is such a call and takes its operand of that number with any strides."""
    attributes = instruction.attributes
    if not isinstance(attributes, CustomCallAttributes) or not attributes.target.startswith("aten::"):
        return False
    try:
        config = parse_config(attributes.backend_config)
    except ValueError:
        return False  # whoever prepares the kernel refuses it
    mine = [tensor for tensor in tensors_of(config) if tensor["tensor"] == operand]
    return bool(mine) and all(tensor.get("strided") is True for tensor in mine)


def tensors_of(value: Any) -> Iterator[dict[str, Any]]:
    """The arguments that are operands, wherever they stand."""
    if isinstance(value, dict) and "tensor" in value:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
