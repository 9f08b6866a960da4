"""Builds the custom calls of a matched attention (assemble.py) and their operands as instructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CustomCallAttributes,
    DimensionsAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape
from flagos_backend.kernels.attention import BACKWARD, FORWARD, Attention, AttentionBackwardCall, AttentionCall, Views
from flagos_backend.passes.match.assemble import Matched, MatchedGradients, Result
from flagos_backend.passes.match.labels import dims_of, element_type_of, peel
from flagos_backend.passes.match.symbols import Term

Replacements = dict[Instruction, Instruction]


@dataclass(frozen=True, slots=True)
class Operand:
    instruction: Instruction
    dims: str


class CallBuilder:
    """The calls of one attention whose output stands in for ``result``."""

    def __init__(self, matched: Matched, result: Result) -> None:
        self._matched = matched
        self._like = matched.output.dot
        self._result, self._result_dims = result.instruction, matched.dims(result.labels)
        self._new: list[Instruction] = []

    def forward(self) -> tuple[Attention, Replacements]:
        """What replaces the output of an attention without gradients."""
        matched = self._matched
        a = matched.attention
        operands = [Operand(matched.query, a.query), Operand(matched.key, a.key), Operand(matched.value, a.value)]
        operands += self._optional()
        result_dims = self._result_dims
        repeated = _ungrouped(operands[1], operands[2])
        if repeated is not None:
            operands, result_dims = (
                self._split_heads(operands, repeated),
                result_dims.replace(repeated.letter, repeated.letter + repeated.group),
            )
        attention = self._attention(operands, result_dims)
        shape = ArrayShape(element_type_of(self._result), _sizes(operands, result_dims))
        call = AttentionCall(attention, statistics=False)
        made = self._call(FORWARD, shape, [o.instruction for o in operands], call.config())
        if shape != self._result.shape:
            made = self._emit(Opcode.RESHAPE, self._result.shape, (made,))
        return attention, {self._result: made}

    def forward_and_backward(self, gradients: MatchedGradients) -> tuple[Attention, Replacements]:
        """What replaces the output and the gradients."""
        matched = self._matched
        a = matched.attention
        operands = [Operand(matched.query, a.query), Operand(matched.key, a.key), Operand(matched.value, a.value)]
        operands += self._optional()
        attention = self._attention(operands, self._result_dims)
        views = Views(attention, {o.dims: dims_of(o.instruction) for o in operands})
        wide = any(element_type_of(o.instruction) is ElementType.F64 for o in operands[:3])
        size = views.sizes
        statistics = ArrayShape(ElementType.F64 if wide else ElementType.F32, (size.B, size.H, size.T))
        inputs = [o.instruction for o in operands]
        both = TupleShape((self._result.shape, statistics))
        call = self._call(FORWARD, both, inputs, AttentionCall(attention, statistics=True).config())
        output = self._element(call, 0)
        dims = {name: matched.dims(result.labels) for name, result in gradients.wanted.items()}
        backward = AttentionBackwardCall(
            attention,
            matched.dims(gradients.output_gradient_labels),
            *(dims.get(name) for name in ("query", "key", "value")),
        )
        results = [gradients.wanted[name].instruction for name in ("query", "key", "value") if name in dims]
        arguments = [*inputs[:3], output, self._element(call, 1), gradients.output_gradient, *inputs[3:]]
        shape = TupleShape(tuple(result.shape for result in results))
        gradient = self._call(BACKWARD, shape, arguments, backward.config())
        replaced = {result: self._element(gradient, i) for i, result in enumerate(results)}
        return attention, replaced if matched.is_only_backward else {self._result: output, **replaced}

    # ---- operands ----

    def _attention(self, operands: Sequence[Operand], output: str) -> Attention:
        query, key, value, *rest = (operand.dims for operand in operands)
        bias = rest.pop(0) if self._matched.biases else None
        mask = rest.pop(0) if self._matched.masks else None
        return replace(self._matched.attention, query=query, key=key, value=value, output=output, bias=bias, mask=mask)

    def _optional(self) -> list[Operand]:
        found = []
        if self._matched.biases:
            found.append(self._combined(Opcode.ADD, self._matched.biases))
        if self._matched.masks:
            terms = [
                term
                if visible
                else Term(self._emit(Opcode.NOT, term.instruction.shape, (term.instruction,)), term.labels)
                for term, visible in self._matched.masks
            ]
            found.append(self._combined(Opcode.AND, terms))
        return found

    def _combined(self, opcode: Opcode, terms: Sequence[Term]) -> Operand:
        """One array for all ``terms``: over the union of their dimensions."""
        operands = [Operand(term.instruction, self._matched.dims(term.labels)) for term in terms]
        if len(operands) == 1:
            return operands[0]
        sizes = {letter: size for o in operands for letter, size in zip(o.dims, dims_of(o.instruction), strict=True)}
        sizes.pop("1", None)
        union = "".join(sizes)
        kind = element_type_of(self._matched.of.dot) if opcode is Opcode.ADD else ElementType.PRED
        shape = ArrayShape(kind, tuple(sizes.values()))
        arrays = [self._broadcast(operand, union, shape) for operand in operands]
        total = arrays[0]
        for array in arrays[1:]:
            total = self._emit(opcode, shape, (total, array))
        return Operand(total, union)

    def _broadcast(self, operand: Operand, dims: str, shape: ArrayShape) -> Instruction:
        kept = operand.dims.replace("1", "")
        sizes = tuple(n for n, letter in zip(dims_of(operand.instruction), operand.dims, strict=True) if letter != "1")
        array = operand.instruction
        if dims_of(array) != sizes:
            array = self._emit(Opcode.RESHAPE, ArrayShape(element_type_of(array), sizes), (array,))
        if element_type_of(array) is not shape.element_type:
            array = self._emit(Opcode.CONVERT, ArrayShape(shape.element_type, sizes), (array,))
        order = sorted(range(len(kept)), key=lambda position: dims.index(kept[position]))
        if order != list(range(len(kept))):
            permuted = ArrayShape(shape.element_type, tuple(sizes[position] for position in order))
            array = self._emit(Opcode.TRANSPOSE, permuted, (array,), DimensionsAttributes(tuple(order)))
        places = tuple(sorted(dims.index(letter) for letter in kept))
        return self._emit(Opcode.BROADCAST, shape, (array,), DimensionsAttributes(places))

    def _split_heads(self, operands: list[Operand], repeated: Repeated) -> list[Operand]:
        """Every operand with the heads of the query as heads of the key times the group that shares one."""
        query, _, _, *rest = operands
        return [self._split(query, repeated), repeated.key, repeated.value, *(self._split(o, repeated) for o in rest)]

    def _split(self, operand: Operand, repeated: Repeated) -> Operand:
        if repeated.letter not in operand.dims:
            return operand
        sizes: list[int] = []
        for letter, size in zip(operand.dims, dims_of(operand.instruction), strict=True):
            sizes += [size // repeated.times, repeated.times] if letter == repeated.letter else [size]
        shape = ArrayShape(element_type_of(operand.instruction), tuple(sizes))
        dims = operand.dims.replace(repeated.letter, repeated.letter + repeated.group)
        return Operand(self._emit(Opcode.RESHAPE, shape, (operand.instruction,)), dims)

    # ---- instructions ----

    def _emit(
        self, opcode: Opcode, shape: Shape, operands: Iterable[Instruction], attributes: Attributes = NONE
    ) -> Instruction:
        number = len(self._new)
        name = f"attention.{self._like.name}" + (f".{number}" if number else "")
        instruction = Instruction(opcode, shape, tuple(operands), attributes, (), name, self._like.metadata)
        self._new.append(instruction)
        return instruction

    def _call(self, target: str, shape: Shape, operands: Sequence[Instruction], config: bytes) -> Instruction:
        return self._emit(Opcode.CUSTOM_CALL, shape, operands, CustomCallAttributes(target, config))

    def _element(self, call: Instruction, index: int) -> Instruction:
        assert isinstance(call.shape, TupleShape)
        shape = call.shape.elements[index]
        return self._emit(Opcode.GET_TUPLE_ELEMENT, shape, (call,), TupleIndexAttributes(index))


@dataclass(frozen=True, slots=True)
class Repeated:
    """Keys and values before each of their heads (dimension ``letter``) was repeated ``times``."""

    key: Operand
    value: Operand
    letter: str
    group: str
    times: int


_NEW_GROUP = "y"


def _ungrouped(key: Operand, value: Operand) -> Repeated | None:
    first, second = _before_repeat(key), _before_repeat(value)
    if first is None or second is None or first[1:] != second[1:]:
        return None
    return Repeated(first[0], second[0], first[1], _NEW_GROUP, first[2])


def _before_repeat(operand: Operand) -> tuple[Operand, str, int] | None:
    """For reshape(broadcast(x)) that repeats each entry of one dimension: x, the dimension, how often."""
    numbers = tuple(None if letter == "1" else ord(letter) for letter in operand.dims)
    merged, labels = peel(operand.instruction, numbers, exact=True)
    if merged.opcode is not Opcode.RESHAPE or merged.operands[0].opcode is not Opcode.BROADCAST:
        return None
    broadcast = merged.operands[0]
    sizes, source = dims_of(broadcast), broadcast.operands[0]
    dimensions = broadcast.attributes_as(DimensionsAttributes).dimensions
    new = [d for d, size in enumerate(sizes) if d not in dimensions and size > 1]
    if len(new) != 1 or new[0] == 0 or list(dimensions) != sorted(dimensions):
        return None
    place, times = new[0], sizes[new[0]]
    if dims_of(merged) != (*sizes[: place - 1], sizes[place - 1] * times, *sizes[place + 1 :]):
        return None
    label = labels[place - 1]
    if label is None or sizes[place - 1] == 1:
        return None
    spread = (*labels[:place], None, *labels[place:])
    dims = "".join("1" if (found := spread[d]) is None else chr(found) for d in dimensions)
    if dims_of(source) != tuple(sizes[d] for d in dimensions):
        return None
    return Operand(source, dims), chr(label), times


def _sizes(operands: Sequence[Operand], dims: str) -> tuple[int, ...]:
    sizes = {letter: n for o in operands for letter, n in zip(o.dims, dims_of(o.instruction), strict=True)}
    sizes["1"] = 1
    return tuple(sizes[letter] for letter in dims)
