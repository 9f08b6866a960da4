"""Running sums, products and log-sum-exps along a dimension: windows that reach from its first element, or to its last
one. Accelerators have kernels for them; on the host ATen's run best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import Rule, lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionsAttributes, WindowAttributes, WindowDimension
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType
#: Gives the computation of two values of a type.
_Combiner = Callable[[Emitter, ElementType], Computation]


def _scan(combiner: _Combiner, initial: float, *, of_integers: bool) -> Rule:
    """``initial``: what the combiner does not feel."""

    def rule(emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, **_: Any) -> Instruction:
        kind = element_type(result)
        if kind.is_complex or kind is E.PRED or (kind.is_float and kind.bits < 16):
            raise NoLoweringError("running results of this type are ATen's")
        if kind.is_integer and (array(x).element_type.is_float or not of_integers):
            raise NoLoweringError("what is out of range is ATen's to say")
        x = emitter.cast(x, result)
        shape = array(x)
        if not shape.rank or not shape.num_elements:
            return x
        turned = _unturned(x, dim % shape.rank)
        size = shape.dims[dim % shape.rank]
        low, high = (size - 1, 0) if turned is None else (0, size - 1)
        window = [WindowDimension(1)] * shape.rank
        window[dim % shape.rank] = WindowDimension(size, padding_low=low, padding_high=high)
        scanned = emitter.builder.add(
            Opcode.REDUCE_WINDOW,
            [x if turned is None else turned, emitter.scalar(initial, kind)],
            WindowAttributes(tuple(window)),
            called=[combiner(emitter, kind)],
        )
        if turned is None:
            return scanned
        return emitter.builder.add(Opcode.REVERSE, [scanned], x.attributes)

    return rule


def _unturned(x: Instruction, dim: int) -> Instruction | None:
    """What was turned round along ``dim`` to be scanned from its end, as gradients of running sums are."""
    is_turned = x.opcode is Opcode.REVERSE and x.attributes_as(DimensionsAttributes).dimensions == (dim,)
    return x.operands[0] if is_turned else None


def _plain(opcode: Opcode) -> _Combiner:
    return lambda emitter, kind: emitter.combiner(opcode, kind)


def _log_add_exp(emitter: Emitter, kind: ElementType) -> Computation:
    """max(a, b) + log1p(exp(-|a - b|)); a + b where a - b is NaN, as of equal infinities."""
    builder = Builder(f"log_add_exp_{kind.name.lower()}")
    a, b = (builder.parameter(ArrayShape(kind), name) for name in ("lhs", "rhs"))
    difference = builder.add(Opcode.SUBTRACT, [a, b])
    is_nan = builder.add(Opcode.COMPARE, [difference, difference], CompareAttributes(Comparison.NE))
    rest = difference
    for opcode in (Opcode.ABS, Opcode.NEGATE, Opcode.EXP, Opcode.LOG1P):
        rest = builder.add(opcode, [rest])
    greatest = builder.add(Opcode.MAXIMUM, [a, b])
    general, special = builder.add(Opcode.ADD, [greatest, rest]), builder.add(Opcode.ADD, [a, b])
    return builder.build(builder.add(Opcode.SELECT, [is_nan, special, general]))


_RULES: Final = {
    aten.cumsum.default: _scan(_plain(Opcode.ADD), 0, of_integers=True),
    aten.cumprod.default: _scan(_plain(Opcode.MULTIPLY), 1, of_integers=True),
    aten.logcumsumexp.default: _scan(_log_add_exp, float("-inf"), of_integers=False),
}
for _overload, _rule in _RULES.items():
    lowering(_overload, on_host=False)(_rule)
