"""Builds the custom calls of a matched attention (assemble.py) and their operands as instructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    ConstantAttributes,
    CustomCallAttributes,
    DimensionsAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.constants import scalar_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape
from flagos_backend.kernels.attention import BACKWARD, FORWARD, Attention, AttentionBackwardCall, AttentionCall, Views
from flagos_backend.passes.match.assemble import Matched, MatchedGradients, Result
from flagos_backend.passes.match.groups import Operand, Repetition
from flagos_backend.passes.match.labels import dims_of, element_type_of
from flagos_backend.passes.match.symbols import Term

Replacements = dict[Instruction, Instruction]


class CallBuilder:
    """The calls of one attention whose output stands in for ``result``; with ``repetition`` on keys and values as they
    were before it."""

    def __init__(self, matched: Matched, result: Result, repetition: Repetition | None = None) -> None:
        self._matched, self._repetition = matched, repetition
        self._like = matched.output.dot
        self._result = result.instruction
        self._result_dims = self._split_dims(matched.dims(result.labels))
        self._new: list[Instruction] = []

    def forward(self) -> tuple[Attention, Replacements]:
        """What replaces the output of an attention without gradients."""
        operands = self._operands()
        attention = self._attention(operands, self._result_dims)
        shape = ArrayShape(element_type_of(self._result), _sizes(operands, self._result_dims))
        call = AttentionCall(attention, statistics=False)
        made = self._call(FORWARD, shape, [o.instruction for o in operands], call.config())
        return attention, {self._result: self._shaped(made, self._result)}

    def forward_and_backward(self, gradients: MatchedGradients) -> tuple[Attention, Replacements]:
        """What replaces the output and the gradients."""
        matched = self._matched
        operands = self._operands()
        attention = self._attention(operands, self._result_dims)
        views = Views(attention, {o.dims: dims_of(o.instruction) for o in operands})
        wide = any(element_type_of(o.instruction) is ElementType.F64 for o in operands[:3])
        size = views.sizes
        statistics = ArrayShape(ElementType.F64 if wide else ElementType.F32, (size.B, size.H, size.T))
        inputs = [o.instruction for o in operands]
        of_output = ArrayShape(element_type_of(self._result), _sizes(operands, self._result_dims))
        both = TupleShape((of_output, statistics))
        call = self._call(FORWARD, both, inputs, AttentionCall(attention, statistics=True).config())
        output = self._element(call, 0)
        upstream = Operand(gradients.output_gradient, matched.dims(gradients.output_gradient_labels))
        upstream = self._split(upstream)
        names: list[str] = [name for name in ("query", "key", "value") if name in gradients.wanted]
        results = [gradients.wanted[name] for name in names]
        dims = {name: matched.dims(gradients.wanted[name].labels) for name in names}
        if gradients.sink is not None:
            names, results = [*names, "sink"], [*results, gradients.sink]
            dims["sink"] = matched.dims(gradients.sink.labels)
        for name in ("query", "sink"):
            if name in dims:
                dims[name] = self._split_dims(dims[name])
        backward = AttentionBackwardCall(
            attention, upstream.dims, *(dims.get(name) for name in ("query", "key", "value", "sink"))
        )
        arguments = [*inputs[:3], output, self._element(call, 1), upstream.instruction, *inputs[3:]]
        shape = TupleShape(
            tuple(
                ArrayShape(element_type_of(result.instruction), _sizes(operands, dims[name]))
                for name, result in zip(names, results, strict=True)
            )
        )
        gradient = self._call(BACKWARD, shape, arguments, backward.config())
        replaced = {
            result.instruction: self._shaped(self._element(gradient, i), result.instruction)
            for i, result in enumerate(results)
        }
        return attention, replaced if matched.is_only_backward else {
            self._result: self._shaped(output, self._result),
            **replaced,
        }

    # ---- operands ----

    def _operands(self) -> list[Operand]:
        matched, repetition = self._matched, self._repetition
        a = matched.attention
        query, key, value = (
            Operand(matched.query, a.query),
            Operand(matched.key, a.key),
            Operand(matched.value, a.value),
        )
        if repetition is not None:
            key, value = self._before(repetition.key, key), self._before(repetition.value, value)
        return [self._split(query), key, value, *(self._split(operand) for operand in self._optional())]

    def _before(self, source: Operand, repeated: Operand) -> Operand:
        """``source`` in the type that it had when it was repeated."""
        array, element = source.instruction, element_type_of(repeated.instruction)
        if element_type_of(array) is not element:
            array = self._emit(Opcode.CONVERT, ArrayShape(element, dims_of(array)), (array,))
        return Operand(array, source.dims)

    def _attention(self, operands: Sequence[Operand], output: str) -> Attention:
        query, key, value, *rest = (operand.dims for operand in operands)
        bias = rest.pop(0) if self._matched.biases else None
        mask = rest.pop(0) if self._matched.masks else None
        sink = rest.pop(0) if self._matched.sink else None
        a = self._matched.attention
        return replace(a, query=query, key=key, value=value, output=output, bias=bias, mask=mask, sink=sink)

    def _optional(self) -> list[Operand]:
        found = []
        if self._matched.biases:
            found.append(self._combined(Opcode.ADD, [self._times(term) for term in self._matched.biases]))
        if self._matched.masks:
            terms = [
                term
                if visible
                else Term(self._emit(Opcode.NOT, term.instruction.shape, (term.instruction,)), term.labels)
                for term, visible in self._matched.masks
            ]
            found.append(self._combined(Opcode.AND, terms))
        if self._matched.sink:
            found.append(Operand(self._matched.sink.instruction, self._matched.dims(self._matched.sink.labels)))
        return found

    def _times(self, bias: Term) -> Term:
        """What is added: no narrower than f32, which the program rounds the sum to at the latest."""
        if bias.factor == 1.0:
            return bias
        array, element = bias.instruction, element_type_of(bias.instruction)
        if element not in (ElementType.F32, ElementType.F64):
            element = ElementType.F32
            array = self._emit(Opcode.CONVERT, ArrayShape(element, dims_of(array)), (array,))
        number = ConstantAttributes(scalar_bytes(bias.factor, element))
        factor = self._emit(Opcode.CONSTANT, ArrayShape(element, ()), (), number)
        shape = ArrayShape(element, dims_of(array))
        factors = self._emit(Opcode.BROADCAST, shape, (factor,), DimensionsAttributes(()))
        return Term(self._emit(Opcode.MULTIPLY, shape, (array, factors)), bias.labels)

    def _combined(self, opcode: Opcode, terms: Sequence[Term]) -> Operand:
        """One array for all ``terms``: over the union of their dimensions."""
        operands = [Operand(term.instruction, self._matched.dims(term.labels)) for term in terms]
        if len(operands) == 1:
            return operands[0]
        sizes = {letter: size for o in operands for letter, size in zip(o.dims, dims_of(o.instruction), strict=True)}
        sizes.pop("1", None)
        union = "".join(sizes)
        kind = element_type_of(self._matched.of.dot) if opcode is Opcode.ADD else ElementType.PRED
        if opcode is Opcode.ADD and any(element_type_of(o.instruction) is ElementType.F32 for o in operands):
            kind = ElementType.F64 if kind is ElementType.F64 else ElementType.F32
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

    def _split_dims(self, dims: str) -> str:
        return self._repetition.split_dims(dims) if self._repetition else dims

    def _split(self, operand: Operand) -> Operand:
        """An array over the heads of the query over heads of the key and the group that shares one."""
        repetition = self._repetition
        if repetition is None or not repetition.splits or repetition.letter not in operand.dims:
            return operand
        sizes: list[int] = []
        for letter, size in zip(operand.dims, dims_of(operand.instruction), strict=True):
            sizes += [size // repetition.times, repetition.times] if letter == repetition.letter else [size]
        shape = ArrayShape(element_type_of(operand.instruction), tuple(sizes))
        array = self._emit(Opcode.RESHAPE, shape, (operand.instruction,))
        return Operand(array, repetition.split_dims(operand.dims))

    def _shaped(self, made: Instruction, replaced: Instruction) -> Instruction:
        """``made`` with the dimensions of what it replaces."""
        return made if made.shape == replaced.shape else self._emit(Opcode.RESHAPE, replaced.shape, (made,))

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


def _sizes(operands: Sequence[Operand], dims: str) -> tuple[int, ...]:
    sizes = {letter: n for o in operands for letter, n in zip(o.dims, dims_of(o.instruction), strict=True)}
    sizes["1"] = 1
    return tuple(sizes[letter] for letter in dims)
