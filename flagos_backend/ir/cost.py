"""What a program costs: operations, bytes and memory, counted on the IR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2, prod

from flagos_backend.ir.attributes import (
    ConvolutionAttributes,
    DotAttributes,
    FftAttributes,
    RaggedDotAttributes,
    WhileAttributes,
)
from flagos_backend.ir.attributes import WindowAttributes as Window
from flagos_backend.ir.functions import EXPENSIVE
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import FftType
from flagos_backend.ir.opcode import Opcode as O
from flagos_backend.ir.types import ArrayShape, Shape, leaves

_TRANSCENDENTAL = EXPENSIVE - {O.REMAINDER}
# Names for values that exist, or parts of them: no work, no memory of their own.
_FREE = frozenset(
    {O.PARAMETER, O.CONSTANT, O.TUPLE, O.GET_TUPLE_ELEMENT, O.RESHAPE, O.COPY, O.ADD_DEPENDENCY, O.AFTER_ALL}
    | {O.OPTIMIZATION_BARRIER, O.PARTITION_ID, O.REPLICA_ID}
)
_MOVES_DATA = frozenset(
    {O.BROADCAST, O.CONCATENATE, O.DYNAMIC_SLICE, O.DYNAMIC_UPDATE_SLICE, O.GATHER, O.IOTA, O.PAD, O.REVERSE, O.SLICE}
    | {O.TRANSPOSE, O.BITCAST_CONVERT, O.ALL_GATHER, O.ALL_TO_ALL, O.COLLECTIVE_BROADCAST, O.COLLECTIVE_PERMUTE}
    | {O.CUSTOM_CALL, O.GET_DIMENSION_SIZE, O.RAGGED_ALL_TO_ALL}
)


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a device computes and moves at most in a second."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved: float) -> float:
        """A lower bound on the time for so many operations and bytes."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


#: One device of a host.
HOST_ROOFLINE = Roofline(5e10, 1e10)


@dataclass(frozen=True, slots=True)
class Cost:
    """``steps`` counts the instructions that do something, loops by their iterations (once where unknown)."""

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes_accessed: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.bytes_accessed + other.bytes_accessed,
            self.steps + other.steps,
        )

    def times(self, count: float) -> Cost:
        return Cost(self.flops * count, self.transcendentals * count, self.bytes_accessed * count, self.steps * count)

    @property
    def seconds(self) -> float:
        """A lower bound on the time of one run on one device of a host."""
        return self.seconds_on(HOST_ROOFLINE)

    def seconds_on(self, roofline: Roofline) -> float:
        """A lower bound on the time of one run on a device."""
        return roofline.seconds(self.flops + self.transcendentals, self.bytes_accessed)

    def properties(self, roofline: Roofline | None) -> tuple[tuple[str, float], ...]:
        """Under the names that XLA's cost analysis uses; without the time where the device's roofline is unknown."""
        counts = (
            ("flops", self.flops),
            ("transcendentals", self.transcendentals),
            ("bytes accessed", self.bytes_accessed),
        )
        return counts if roofline is None else (*counts, ("optimal_seconds", self.seconds_on(roofline)))


def size_of(shape: Shape) -> int:
    """Bytes of all arrays in ``shape``."""
    return sum(leaf.num_bytes for leaf in leaves(shape))


def cost_of(computation: Computation) -> Cost:
    """The sum over the instructions, called computations included."""
    return _Counter().computation(computation)


def instruction_cost(instruction: Instruction) -> Cost:
    """Of one, with what it calls."""
    return _Counter().instruction(instruction)


class _Counter:
    def __init__(self) -> None:
        self._known: dict[int, Cost] = {}

    def computation(self, computation: Computation) -> Cost:
        if id(computation) not in self._known:
            self._known[id(computation)] = sum(map(self.instruction, computation.instructions), Cost())
        return self._known[id(computation)]

    def instruction(self, instruction: Instruction) -> Cost:
        match instruction.opcode:
            case opcode if opcode in _FREE:
                return Cost()
            case O.CALL:
                return self.computation(instruction.called[0])
            case O.WHILE:
                iterations = instruction.attributes_as(WhileAttributes).trip_count
                return sum(map(self.computation, instruction.called), Cost()).times(
                    1 if iterations is None else iterations
                )
            case O.CONDITIONAL:
                return max(map(self.computation, instruction.called), key=lambda cost: cost.seconds)
            case _:
                flops, transcendentals = self._work(instruction)
                return Cost(flops, transcendentals, _traffic(instruction), 1.0)

    def _work(self, instruction: Instruction) -> tuple[float, float]:
        count = sum(leaf.num_elements for leaf in leaves(instruction.shape))
        opcode = instruction.opcode
        if opcode in _MOVES_DATA:
            return 0.0, 0.0
        if opcode in _TRANSCENDENTAL:
            return 0.0, float(count)
        if opcode in (O.DOT, O.RAGGED_DOT, O.CONVOLUTION):
            return 2.0 * count * _contraction(instruction), 0.0
        if opcode is O.FFT:
            return _transform(instruction), 0.0
        if not instruction.called:
            return float(count), 0.0
        # A scalar function, called once an element it takes in (or once an element and window place).
        calls: float = sum(leaf.num_elements for leaf in leaves(instruction.operands[0].shape))
        if opcode in (O.REDUCE_WINDOW, O.SELECT_AND_SCATTER):
            calls = count * prod(d.size for d in instruction.attributes_as(Window).window)
        elif opcode is O.SORT:
            calls *= max(1.0, float(int(calls).bit_length()))
        elif opcode is O.SCATTER:
            calls = sum(leaf.num_elements for leaf in leaves(instruction.operands[-1].shape))
        inner = self.computation(instruction.called[0])
        return calls * inner.flops, calls * inner.transcendentals


def _contraction(instruction: Instruction) -> int:
    """How many products make one element of the result."""
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    match instruction.attributes:
        case DotAttributes() as dot:
            return prod(shape.dims[d] for d in dot.lhs_contracting)
        case RaggedDotAttributes() as ragged:
            return prod(shape.dims[d] for d in ragged.dot.lhs_contracting)
        case ConvolutionAttributes() as convolution:
            features = shape.dims[convolution.input_feature] // convolution.feature_group_count
            return features * prod(d.size for d in convolution.window)
        case _:
            raise TypeError(f"{instruction!r} is no contraction")


def _transform(instruction: Instruction) -> float:
    """Operations of the fast algorithm: 5 n log2 n of n complex numbers, half of it where one side is real."""
    attributes = instruction.attributes_as(FftAttributes)
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    points = prod(shape.dims[: shape.rank - len(attributes.lengths)]) * prod(attributes.lengths)
    is_real = attributes.fft_type in (FftType.RFFT, FftType.IRFFT)
    return (2.5 if is_real else 5.0) * points * log2(max(2, prod(attributes.lengths)))


def _traffic(instruction: Instruction) -> float:
    written = size_of(instruction.shape)
    if instruction.opcode in (O.DYNAMIC_SLICE, O.SLICE, O.GATHER):
        return 2.0 * written  # reads what it returns, not the whole array
    if instruction.opcode is O.DYNAMIC_UPDATE_SLICE:
        return 2.0 * size_of(instruction.operands[1].shape)
    return float(written + sum(size_of(operand.shape) for operand in instruction.operands))


def temporary_bytes(computation: Computation) -> int:
    """The greatest sum of the sizes of values that live at once, arguments and results left out."""
    last_use = {id(o): index for index, i in enumerate(computation.instructions) for o in i.operands}
    results = set(map(id, _root_values(computation.root)))
    alive, peak = 0, 0
    ends: dict[int, int] = {}
    for index, instruction in enumerate(computation.instructions):
        inner = max(map(temporary_bytes, instruction.called), default=0)
        own = 0 if instruction.opcode in _FREE or id(instruction) in results else size_of(instruction.shape)
        alive += own
        peak = max(peak, alive + inner)
        end = last_use.get(id(instruction), index)
        ends[end] = ends.get(end, 0) + own
        alive -= ends.pop(index, 0)
    return peak


def _root_values(root: Instruction) -> Iterator[Instruction]:
    yield root
    if root.opcode is O.TUPLE:
        for operand in root.operands:
            yield from _root_values(operand)
