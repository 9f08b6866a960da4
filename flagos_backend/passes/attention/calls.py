"""Builds the custom calls of a matched attention (assemble.py) and their operands as instructions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CompareAttributes,
    ConstantAttributes,
    CustomCallAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    ParameterAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.constants import scalar_bytes
from flagos_backend.ir.custom_calls.attention import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    Attention,
    AttentionBackwardCall,
    AttentionCall,
    Views,
)
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape
from flagos_backend.passes.attention.assemble import Matched, MatchedGradients, Result
from flagos_backend.passes.attention.groups import Operand, Repetition
from flagos_backend.passes.attention.labels import dims_of, element_type_of
from flagos_backend.passes.attention.symbols import BiasGradient, Cancelled, Factor, FactorGradient, Term

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
        if self._matched.zeroes_fully_masked or self._matched.zeroes_nan:
            made, _ = self._with_statistics(attention, operands)
            return attention, {self._result: self._shaped(made, self._result)}
        shape = ArrayShape(element_type_of(self._result), _sizes(operands, self._result_dims))
        call = AttentionCall(attention, statistics=False)
        made = self._call(FORWARD, shape, [o.instruction for o in operands], call.config())
        if self._matched.zeroes_rows:
            made = self._zeroed(made, self._result_dims, operands, self._rows_that_see(attention, operands))
        return attention, {self._result: self._shaped(made, self._result)}

    def forward_and_backward(self, gradients: MatchedGradients) -> tuple[Attention, Replacements]:
        """What replaces the output and the gradients."""
        matched = self._matched
        operands = self._operands()
        attention = self._attention(operands, self._result_dims)
        wide = any(element_type_of(o.instruction) is ElementType.F64 for o in operands[:3])
        inputs = [o.instruction for o in operands]
        output, of_rows = self._with_statistics(attention, operands)
        upstream = Operand(gradients.output_gradient, matched.dims(gradients.output_gradient_labels))
        upstream = self._split(upstream)
        if matched.zeroes_rows:  # the call's own output and statistics of such a row are NaN
            seeing = self._rows_that_see(attention, operands)
            output = self._zeroed(output, self._result_dims, operands, seeing)
            of_rows = self._zeroed(of_rows, _rows(attention), operands, seeing)
            upstream = replace(
                upstream, instruction=self._zeroed(upstream.instruction, upstream.dims, operands, seeing)
            )
        results = dict(gradients.wanted)
        if gradients.sink is not None:
            results["sink"] = gradients.sink
        dims = {name: matched.dims(result.labels) for name, result in results.items()}
        dims |= {name: self._split_dims(dims[name]) for name in ("query", "sink") if name in dims}
        elements = {name: element_type_of(result.instruction) for name, result in results.items()}
        if gradients.factors:  # they are made of it
            dims = {"query": attention.query} | dims
        if matched.factors:  # and what it is multiplied with is rounded after that
            elements["query"] = ElementType.F64 if wide else ElementType.F32
        if gradients.biases:
            dims["bias"], elements["bias"] = self._of_biases(gradients.biases, attention, wide)
        backward = AttentionBackwardCall(attention, upstream.dims, *(dims.get(name) for name in GRADIENTS))
        arguments = [*inputs[:3], output, of_rows, upstream.instruction, *inputs[3:]]
        names = list(backward.wanted())
        made: dict[str, Operand] = {}
        if names:
            shape = TupleShape(tuple(ArrayShape(elements[name], _sizes(operands, dims[name])) for name in names))
            gradient = self._call(BACKWARD, shape, arguments, backward.config())
            made = {name: Operand(self._element(gradient, i), dims[name]) for i, name in enumerate(names)}
        replaced = {} if matched.is_only_backward else {self._result: self._shaped(output, self._result)}
        for factor in gradients.factors:
            replaced[factor.instruction] = self._gradient_of_factor(factor, made["query"], operands)
        for bias in gradients.biases:
            replaced[bias.instruction] = self._gradient_of_bias(bias, made["bias"], operands)
        if gradients.cancelled:
            arrays = (Operand(output, self._result_dims), upstream)
            replaced |= self._cancelled(gradients.cancelled, arrays, attention, operands)
        if matched.factors and "query" in results:
            element = element_type_of(results["query"].instruction)
            made["query"] = self._times_factors(made["query"], matched.factors, element, operands)
        for name, result in results.items():
            replaced[result.instruction] = self._shaped(made[name].instruction, result.instruction)
        return attention, replaced

    def _with_statistics(self, attention: Attention, operands: Sequence[Operand]) -> tuple[Instruction, Instruction]:
        """Output and statistics. With a number in the place of their -infinity weights of such a row are zero, also in
        the backward call."""
        views = Views(attention, {o.dims: dims_of(o.instruction) for o in operands})
        wide, size = any(element_type_of(o.instruction) is ElementType.F64 for o in operands[:3]), views.sizes
        statistics = ArrayShape(ElementType.F64 if wide else ElementType.F32, (size.B, size.H, size.T))
        of_output = ArrayShape(element_type_of(self._result), _sizes(operands, self._result_dims))
        config = AttentionCall(attention, statistics=True, tells_nan=self._matched.zeroes_nan).config()
        call = self._call(FORWARD, TupleShape((of_output, statistics)), [o.instruction for o in operands], config)
        output, of_rows = self._element(call, 0), self._element(call, 1)
        if not (self._matched.zeroes_fully_masked or self._matched.zeroes_nan):
            return output, of_rows
        letters = _rows(attention)
        seen = replace(statistics, element_type=ElementType.PRED)
        if self._matched.zeroes_nan:
            seeing = self._emit(Opcode.IS_FINITE, seen, (of_rows,))
        else:
            nothing = self._filled(statistics, -math.inf)
            seeing = self._emit(Opcode.COMPARE, seen, (of_rows, nothing), CompareAttributes(Comparison.NE))
        sizes = _sizes(operands, letters)
        if sizes != seen.dims:
            seeing = self._emit(Opcode.RESHAPE, replace(seen, dims=sizes), (seeing,))
        rows = Operand(seeing, letters)
        output = self._zeroed(output, self._result_dims, operands, rows, self._nothing_of_values(operands))
        return output, self._zeroed(of_rows, letters, operands, rows)

    def _nothing_of_values(self, operands: Sequence[Operand]) -> Operand:
        """What weights of zero make of the values: zero, or NaN where one of them is no number."""
        nothing = replace(operands[2], instruction=self._times_zero(operands[2].instruction))
        return self._reduced(Opcode.ADD, nothing, "s") if "s" in nothing.dims else nothing

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
        operands = [self._split(query), key, value, *(self._split(operand) for operand in self._optional())]
        if matched.factors:
            element = element_type_of(query.instruction)
            operands[0] = self._times_factors(operands[0], matched.factors, element, operands)
        return operands

    def _before(self, source: Operand, repeated: Operand) -> Operand:
        """``source`` in the type that it had when it was repeated."""
        return replace(source, instruction=self._converted(source.instruction, element_type_of(repeated.instruction)))

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
            array = self._converted(array, element)
        shape = ArrayShape(element, dims_of(array))
        return Term(self._emit(Opcode.MULTIPLY, shape, (array, self._filled(shape, bias.factor))), bias.labels)

    def _combined(self, opcode: Opcode, terms: Sequence[Term]) -> Operand:
        """One array for all ``terms``: over the union of their dimensions."""
        operands = [Operand(term.instruction, self._matched.dims(term.labels)) for term in terms]
        if len(operands) == 1:
            return operands[0]
        sizes = {letter: size for o in operands for letter, size in zip(o.dims, dims_of(o.instruction), strict=True)}
        # The kernels' order, keys side by side.
        every = (self._matched.attention.batch, self._matched.attention.groups, "ts")
        union = "".join(letter for letter in "".join(every) if letter in sizes)
        kind = element_type_of(self._matched.of.dot) if opcode is Opcode.ADD else ElementType.PRED
        if opcode is Opcode.ADD and any(element_type_of(o.instruction) is ElementType.F32 for o in operands):
            kind = ElementType.F64 if kind is ElementType.F64 else ElementType.F32
        shape = ArrayShape(kind, tuple(sizes[letter] for letter in union))
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
        array = self._converted(array, shape.element_type)
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

    # ---- factors ----

    def _times_factors(
        self, array: Operand, factors: Sequence[Factor], element: ElementType, operands: Sequence[Operand]
    ) -> Operand:
        """Over the dimensions of ``array``, rounded to ``element`` at the end."""
        letters, sizes = array.dims.replace("1", ""), dims_of(array.instruction)
        wide = ElementType.F64 if element_type_of(array.instruction) is ElementType.F64 else ElementType.F32
        product = self._converted(array.instruction, wide)
        for factor in factors:
            term = self._split(Operand(factor.term.instruction, self._matched.dims(factor.term.labels)))
            other = self._broadcast(term, letters, ArrayShape(wide, _sizes(operands, letters)))
            if dims_of(other) != sizes:
                other = self._emit(Opcode.RESHAPE, ArrayShape(wide, sizes), (other,))
            opcode = Opcode.DIVIDE if factor.divides else Opcode.MULTIPLY
            product = self._emit(opcode, product.shape, (product, other))
        return Operand(self._converted(product, element), array.dims)

    def _gradient_of_factor(
        self, wanted: FactorGradient, gradient: Operand, operands: Sequence[Operand]
    ) -> Instruction:
        """Summed over keys, the gradient of the logits times the product is the queries' gradient times the queries."""
        letters = gradient.dims.replace("1", "")
        wide = element_type_of(gradient.instruction)
        shape = ArrayShape(wide, _sizes(operands, letters))
        query = self._split(Operand(self._matched.query, self._matched.attention.query))
        sides = [self._broadcast(operand, letters, shape) for operand in (gradient, query)]
        terms = Operand(self._emit(Opcode.MULTIPLY, shape, sides), letters)
        within = [factor for factor in wanted.factors if set(factor.term.labels) - {None, *wanted.labels}]
        around = [factor for factor in wanted.factors if factor not in within]
        terms = self._times_factors(terms, within, wide, operands)
        kept = self._split_dims(self._matched.dims(wanted.labels)).replace("1", "")
        total = self._reduced(Opcode.ADD, terms, [letter for letter in letters if letter not in kept])
        ordered = self._broadcast(total, kept, ArrayShape(wide, _sizes(operands, kept)))
        element = element_type_of(wanted.instruction)
        return self._shaped(
            self._times_factors(Operand(ordered, kept), around, element, operands).instruction,
            wanted.instruction,
        )

    # ---- biases ----

    def _of_biases(self, wanted: Sequence[BiasGradient], attention: Attention, wide: bool) -> tuple[str, ElementType]:
        """Dimensions and type of the one gradient that all are made of: as the program has it, if it is that itself."""
        dims = [self._split_dims(self._matched.dims(bias.labels)) for bias in wanted]
        if len(wanted) == 1 and wanted[0].scale == 1.0:
            return dims[0], element_type_of(wanted[0].instruction)
        every = attention.batch + attention.groups + "ts"
        union = "".join(letter for letter in every if any(letter in each for each in dims))
        return union, ElementType.F64 if wide else ElementType.F32

    def _gradient_of_bias(self, wanted: BiasGradient, gradient: Operand, operands: Sequence[Operand]) -> Instruction:
        kept = self._split_dims(self._matched.dims(wanted.labels))
        array = gradient.instruction
        if (kept, wanted.scale) != (gradient.dims, 1.0):
            summed = [letter for letter in gradient.dims if letter not in kept]
            total = self._reduced(Opcode.ADD, gradient, summed) if summed else gradient
            letters = kept.replace("1", "")
            shape = ArrayShape(element_type_of(array), _sizes(operands, letters))
            array = self._broadcast(total, letters, shape)
            if wanted.scale != 1.0:
                array = self._emit(Opcode.MULTIPLY, shape, (array, self._filled(shape, wanted.scale)))
            array = self._converted(array, element_type_of(wanted.instruction))
        return self._shaped(array, wanted.instruction)

    def _cancelled(
        self, wanted: Sequence[Cancelled], arrays: Sequence[Operand], attention: Attention, operands: Sequence[Operand]
    ) -> Replacements:
        """Zero, or NaN where a row of ``arrays``, output and gradient of it, has an infinity or a NaN: weights, values
        or gradients of weights have one then. Where seen keys alone count, zero in a row that sees none."""
        nothing = [replace(array, instruction=self._times_zero(array.instruction)) for array in arrays]
        of_seen = nothing
        if self._matched.masks and not (self._matched.zeroes_rows or attention.added):
            seeing = self._rows_that_see(attention, operands)
            of_seen = [
                replace(array, instruction=self._zeroed(array.instruction, array.dims, operands, seeing))
                for array in nothing
            ]
        return {
            found.instruction: self._sum_of(found, of_seen if found.seen_alone else nothing, operands)
            for found in wanted
        }

    def _times_zero(self, array: Instruction) -> Instruction:
        shape = ArrayShape(element_type_of(array), dims_of(array))
        return self._emit(Opcode.MULTIPLY, shape, (array, self._filled(shape, 0.0)))

    def _sum_of(self, wanted: Cancelled, arrays: Sequence[Operand], operands: Sequence[Operand]) -> Instruction:
        letters = self._split_dims(self._matched.dims(wanted.labels)).replace("1", "")
        shape = ArrayShape(element_type_of(wanted.instruction), _sizes(operands, letters))
        terms = []
        for array in arrays:
            summed = [letter for letter in array.dims.replace("1", "") if letter not in letters]
            total = self._reduced(Opcode.ADD, array, summed) if summed else array
            terms.append(self._broadcast(total, letters, shape))
        return self._shaped(self._emit(Opcode.ADD, shape, terms), wanted.instruction)

    # ---- rows that see no key ----

    def _rows_that_see(self, attention: Attention, operands: Sequence[Operand]) -> Operand:
        """For which rows mask and band leave a key."""
        visible = operands[3 if attention.bias is None else 4]
        bounds = (
            (Comparison.LE, attention.upper),
            (Comparison.GE, None if attention.lower is None else -attention.lower),
        )
        if any(bound is not None for _, bound in bounds):
            letters = "".join(dict.fromkeys(visible.dims.replace("1", "") + "ts"))
            shape = ArrayShape(ElementType.PRED, _sizes(operands, letters))
            positions = replace(shape, element_type=ElementType.S32)
            key, query = (
                self._emit(Opcode.IOTA, positions, (), DimensionAttributes(letters.index(letter))) for letter in "st"
            )
            ahead = self._emit(Opcode.SUBTRACT, positions, (key, query))
            both = self._broadcast(visible, letters, shape)
            for direction, bound in bounds:
                if bound is not None:
                    sides = (ahead, self._filled(positions, bound))
                    inside = self._emit(Opcode.COMPARE, shape, sides, CompareAttributes(direction))
                    both = self._emit(Opcode.AND, shape, (both, inside))
            visible = Operand(both, letters)
        return self._reduced(Opcode.OR, visible, "s") if "s" in visible.dims else visible

    def _zeroed(
        self,
        array: Instruction,
        letters: str,
        operands: Sequence[Operand],
        seeing: Operand,
        instead: Operand | None = None,
    ) -> Instruction:
        """``array``, whose dimensions are ``letters`` or some of them merged, zero, or ``instead``, in rows that see no
        key."""
        letters, sizes = letters.replace("1", ""), dims_of(array)
        found = self._broadcast(seeing, letters, ArrayShape(ElementType.PRED, _sizes(operands, letters)))
        if dims_of(found) != sizes:
            found = self._emit(Opcode.RESHAPE, ArrayShape(ElementType.PRED, sizes), (found,))
        shape = ArrayShape(element_type_of(array), sizes)
        if instead is None:
            return self._emit(Opcode.SELECT, shape, (found, array, self._filled(shape, 0.0)))
        other = self._broadcast(instead, letters, replace(shape, dims=_sizes(operands, letters)))
        other = other if dims_of(other) == sizes else self._emit(Opcode.RESHAPE, shape, (other,))
        return self._emit(Opcode.SELECT, shape, (found, array, other))

    # ---- instructions ----

    def _reduced(self, opcode: Opcode, operand: Operand, letters: Iterable[str]) -> Operand:
        """A sum, or whether anything is true, over the dimensions ``letters``."""
        places = tuple(sorted(operand.dims.index(letter) for letter in letters))
        one = ArrayShape(element_type_of(operand.instruction))
        pair = tuple(Instruction(Opcode.PARAMETER, one, (), ParameterAttributes(n), name=f"{n}") for n in range(2))
        reduced = Instruction(opcode, one, pair, name="reduced")
        kept = [d for d in range(len(operand.dims)) if d not in places]
        shape = replace(one, dims=tuple(dims_of(operand.instruction)[d] for d in kept))
        sides = (operand.instruction, self._filled(one, 0))
        callee = Computation("reduced", (*pair, reduced), reduced)
        made = self._emit(Opcode.REDUCE, shape, sides, DimensionsAttributes(places), (callee,))
        return Operand(made, "".join(operand.dims[d] for d in kept))

    def _converted(self, array: Instruction, element: ElementType) -> Instruction:
        if element_type_of(array) is element:
            return array
        return self._emit(Opcode.CONVERT, ArrayShape(element, dims_of(array)), (array,))

    def _filled(self, shape: ArrayShape, value: float) -> Instruction:
        number = ConstantAttributes(scalar_bytes(value, shape.element_type))
        scalar = self._emit(Opcode.CONSTANT, ArrayShape(shape.element_type), (), number)
        return self._emit(Opcode.BROADCAST, shape, (scalar,), DimensionsAttributes(())) if shape.dims else scalar

    def _emit(
        self,
        opcode: Opcode,
        shape: Shape,
        operands: Iterable[Instruction],
        attributes: Attributes = NONE,
        called: tuple[Computation, ...] = (),
    ) -> Instruction:
        number = len(self._new)
        name = f"attention.{self._like.name}" + (f".{number}" if number else "")
        instruction = Instruction(opcode, shape, tuple(operands), attributes, called, name, self._like.metadata)
        self._new.append(instruction)
        return instruction

    def _call(self, target: str, shape: Shape, operands: Sequence[Instruction], config: bytes) -> Instruction:
        return self._emit(Opcode.CUSTOM_CALL, shape, operands, CustomCallAttributes(target, config))

    def _element(self, call: Instruction, index: int) -> Instruction:
        assert isinstance(call.shape, TupleShape)
        shape = call.shape.elements[index]
        return self._emit(Opcode.GET_TUPLE_ELEMENT, shape, (call,), TupleIndexAttributes(index))


def _rows(attention: Attention) -> str:
    """The dimensions of statistics, some of which are merged there."""
    return attention.outer_batch + attention.heads_of_query + ("t" if "t" in attention.query else "")


def _sizes(operands: Sequence[Operand], dims: str) -> tuple[int, ...]:
    sizes = {letter: n for o in operands for letter, n in zip(o.dims, dims_of(o.instruction), strict=True)}
    sizes["1"] = 1
    return tuple(sizes[letter] for letter in dims)
