"""reduce-window and select-and-scatter of floats, as pooling and its gradient are, as launches of our Triton kernels
(windows_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CompareAttributes, WindowAttributes, WindowDimension
from flagos_backend.ir.hlo import Computation, Instruction, parameter_number
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.computations import plain_combiner
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_TYPES = frozenset({E.F16, E.BF16, E.F32, E.F64})
_COMBINES = frozenset({Opcode.ADD, Opcode.MAXIMUM, Opcode.MINIMUM})
_DIRECTIONS = frozenset({"GE", "GT", "LE", "LT"})
# Kernels walk the places of a window one by one, and number them in 8 bits.
_MAX_PLACES = 64
# They count elements in 32 bits.
_MAX_ELEMENTS = (1 << 31) - 1
_BLOCK, _WARPS = 512, 4
_ONE = WindowDimension(1)
# A launch: kernel, how many elements it makes, its arrays before that number, what only it is compiled for.
_Launch = Callable[[Any, int, Sequence[Tensor], dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Plane:
    """What windows reach over: the neighbouring dimensions from ``first`` to ``last``, which may be the same."""

    first: int
    last: int

    def sizes(self, instruction: Instruction, windows: Sequence[int]) -> dict[str, int]:
        """What kernels are compiled for; ``windows``: the dimensions of the array of windows."""
        dims, window = _shape(instruction.operands[0]).dims, instruction.attributes_as(WindowAttributes).window
        two = self.first != self.last
        rows, columns = window[self.first] if two else _ONE, window[self.last]
        return {
            "H": dims[self.first] if two else 1, "W": dims[self.last], "B": prod(dims[self.last + 1 :]),
            "OH": windows[self.first] if two else 1, "OW": windows[self.last],
            "KH": rows.size, "KW": columns.size, "SH": rows.stride, "SW": columns.stride,
            "PH": rows.padding_low, "PW": columns.padding_low,
            "DH": rows.window_dilation, "DW": columns.window_dilation,
        }  # fmt: skip


def _plane_of(instruction: Instruction) -> _Plane | None:
    reached = [d for d, w in enumerate(instruction.attributes_as(WindowAttributes).window) if w != _ONE]
    if not reached or reached[-1] - reached[0] > 1:
        return None
    return _Plane(reached[0], reached[-1])


def _shape(value: Instruction) -> ArrayShape:
    assert isinstance(value.shape, ArrayShape)
    return value.shape


def _unsupported_window(instruction: Instruction, arrays: Sequence[Instruction]) -> str:
    shapes = [value.shape for value in arrays]
    if not all(isinstance(shape, ArrayShape) and shape.element_type in _TYPES for shape in shapes):
        return "our kernels of windows take one array of floats"
    if any(not 0 < _shape(value).num_elements <= _MAX_ELEMENTS for value in arrays):
        return "it has no elements, or more than 32 bits count"
    window = instruction.attributes_as(WindowAttributes).window
    if _plane_of(instruction) is None:
        return "its windows do not reach over one or two neighbouring dimensions"
    if any(w.base_dilation != 1 or w.window_reversal for w in window):
        return "its array is dilated, or its windows reversed"
    if prod(w.size for w in window) > _MAX_PLACES:
        return f"its windows have more than {_MAX_PLACES} places"
    return ""


def reduction_unsupported(instruction: Instruction) -> str:
    """Why the kernel cannot compute this reduce-window; "" when it can."""
    if len(instruction.operands) != 2 or plain_combiner(instruction.called[0]) not in _COMBINES:
        return "its reducer is no sum, maximum or minimum"
    return _unsupported_window(instruction, (instruction, *instruction.operands))


def scatter_unsupported(instruction: Instruction) -> str:
    """Why the kernels cannot compute this select-and-scatter; "" when they can."""
    if _direction(instruction.called[0]) is None or plain_combiner(instruction.called[1]) is not Opcode.ADD:
        return "it does not select by an order, or does not add"
    return _unsupported_window(instruction, (instruction, *instruction.operands))


def _direction(select: Computation) -> str | None:
    """How a function compares its first argument with its second; None where it does something else."""
    root = select.root
    if root.opcode is not Opcode.COMPARE or [parameter_number(operand) for operand in root.operands] != [0, 1]:
        return None
    attributes = root.attributes_as(CompareAttributes)
    direction = attributes.direction.value
    return direction if attributes.order is ComparisonOrder.PARTIAL and direction in _DIRECTIONS else None


def reduction_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    from flagos_backend.kernels.triton import windows_kernels  # imports Triton

    shape, launch_each = _shape(instruction), _launcher(instruction, _shape(instruction).dims)
    combine = {"COMBINE": str(plain_combiner(instruction.called[0]))}

    def compute(run: Run, x: Tensor, initial: Tensor, result: Tensor) -> None:
        launch_each(windows_kernels.reduce_windows, result.numel(), (x.contiguous(), initial, result), combine)

    return (_variant(shape, compute),)


def scatter_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    from flagos_backend.kernels.triton import windows_kernels

    shape, windows = _shape(instruction), _shape(instruction.operands[1]).dims
    launch_each = _launcher(instruction, windows)
    compare = {"COMPARE": _direction(instruction.called[0])}

    def compute(run: Run, x: Tensor, source: Tensor, initial: Tensor, result: Tensor) -> None:
        places = torch.empty(windows, dtype=torch.int8, device=x.device)
        launch_each(windows_kernels.select_places, places.numel(), (x.contiguous(), places), compare)
        arrays = (places, source.contiguous(), initial, result)
        launch_each(windows_kernels.gather_selected, result.numel(), arrays, {})

    return (_variant(shape, compute),)


def _launcher(instruction: Instruction, windows: Sequence[int]) -> _Launch:
    import triton.language as tl

    plane = _plane_of(instruction)
    assert plane is not None
    wide = _shape(instruction).element_type is E.F64
    sizes = {**plane.sizes(instruction, windows), "ACC": tl.float64 if wide else tl.float32, "BLOCK": _BLOCK}

    def launch_each(kernel: Any, count: int, arrays: Sequence[Tensor], own: dict[str, Any]) -> None:
        launch(kernel, (-(-count // _BLOCK),), *arrays, count, **sizes, **own, num_warps=_WARPS)

    return launch_each


def _variant(shape: ArrayShape, compute: Callable[..., None]) -> Variant:
    """``compute``: fills its last argument from the others."""
    dtype = dtype_of(shape.element_type)

    def into(run: Run, outputs: Sequence[Tensor | None], *operands: Tensor) -> Value:
        (output,) = outputs
        result = torch.empty(shape.dims, dtype=dtype, device=operands[0].device) if output is None else output
        compute(run, *operands, result)
        return result

    def kernel(run: Run, *operands: Tensor) -> Value:
        return into(run, (None,), *operands)

    return Variant("", kernel, into)
