"""The values' gradient alone: the weights' product with the output's gradient, which is made without values. The calls
take zeros for them. For assemble.py."""

from __future__ import annotations

from flagos_backend.ir.attributes import ConstantAttributes, DimensionsAttributes
from flagos_backend.ir.constants import scalar_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.attention.labels import dims_of, element_type_of
from flagos_backend.passes.attention.symbols import Candidate, Contraction


def output_of_no_values(of: Candidate, gradient: Contraction) -> Contraction:
    """The output, as the calls need it, of a program that asks for ``gradient`` alone."""
    element, dot = element_type_of(gradient.other), gradient.dot
    named = zip(gradient.labels_of_result, dims_of(dot), strict=True)
    sizes = {label: size for label, size in named if label is not None}
    # As kernels read values best: positions, and a channel, which the weights have none for.
    labels = tuple(label for label in sizes if label in of.labels and label != of.axis)
    labels += tuple(label for label in sizes if label == of.axis)
    labels += tuple(label for label in sizes if label not in of.labels)
    number = ConstantAttributes(scalar_bytes(0.0, element))
    zero = Instruction(Opcode.CONSTANT, ArrayShape(element), (), number, (), f"{dot.name}.zero")
    shape = ArrayShape(element, tuple(sizes[label] for label in labels))
    values = Instruction(Opcode.BROADCAST, shape, (zero,), DimensionsAttributes(()), (), f"{dot.name}.values")
    return Contraction(dot, values, labels, frozenset((of.axis or 0,)), gradient.labels)
