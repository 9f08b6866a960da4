"""Random bits: counter-based generators as whole-tensor integer arithmetic, and the stateful rng instruction.

Bit-exact with stock XLA's ThreeFry-2x32-20 and Philox-4x32-10 (Salmon et al., SC 2011), its counter layout included.
"""

from __future__ import annotations

import threading
from math import prod

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.attributes import RngAttributes, RngBitGeneratorAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode, RngAlgorithm, RngDistribution
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.reference import integers, storage
from flagos_backend.kernels.reference.registry import Kernel, Run, kernel
from flagos_backend.process.torch_loading import Tensor, torch

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_THREEFRY_PARITY = 0x1BD11BDA
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SIGN_BIT = -(1 << 63)

_generator = torch.Generator()
_generator.manual_seed(0)
_generator_lock = threading.Lock()


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """The low and high 32 bits of int64 bit patterns, as int32 bit patterns."""
    words = value.contiguous().unsqueeze(-1).view(torch.int32)
    return words[..., 0], words[..., 1]


def _join(low: Tensor, high: Tensor) -> Tensor:
    """int64 bit patterns from their int32 halves."""
    return torch.stack((low, high), dim=-1).view(torch.int64).squeeze(-1)


def threefry2x32(counters: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Twenty rounds of ThreeFry-2x32. All words are int32 bit patterns; the keys are scalars."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _THREEFRY_PARITY)
    x = counters[0] + schedule[0]
    y = counters[1] + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x += y
            rotated = (y >> (32 - distance)).bitwise_and_((1 << distance) - 1)
            y = (y << distance).bitwise_or_(rotated).bitwise_xor_(x)
        x += schedule[(group + 1) % 3]
        y += schedule[(group + 2) % 3] + (group + 1)
    return x, y


def philox4x32(counters: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Ten rounds of Philox-4x32. Counters and results are int64 tensors that hold 32-bit words."""
    x0, x1, x2, x3 = counters
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_wide(x0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_wide(x2, _PHILOX_MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK32
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK32
    return [x0, x1, x2, x3]


def _multiply_wide(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    product = word * multiplier  # the unsigned 64-bit product's bit pattern: wrapping keeps every bit
    return (product >> 32) & _MASK32, product & _MASK32


def _threefry_words(state: Tensor, count: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """``count`` pairs of words and the state after them, as the counter moves by one for each pair."""
    counters = _halves(state[1] + torch.arange(count, device=state.device))
    key = _halves(state[0])
    return threefry2x32(counters, key), torch.stack((state[0], state[1] + count))


def _threefry32(state: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """XLA splits one dimension in two halves: the first even one, or else the first of the greatest size."""
    if not dims:
        (first, _), new_state = _threefry_words(state, 1)
        return first.reshape(()), new_state
    even = [i for i, size in enumerate(dims) if size % 2 == 0]
    split = even[0] if even else max(range(len(dims)), key=lambda i: dims[i])
    half = (dims[split] + 1) // 2
    half_dims = (*dims[:split], half, *dims[split + 1 :])
    (first, second), new_state = _threefry_words(state, prod(half_dims))
    both = torch.stack((first.reshape(half_dims), second.reshape(half_dims)), dim=split + 1)
    whole = both.reshape(*dims[:split], half * 2, *dims[split + 1 :])
    return whole.narrow(split, 0, dims[split]), new_state


def _threefry64(state: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    words, new_state = _threefry_words(state, prod(dims))
    return _join(*words).reshape(dims), new_state


def _philox_words(state: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """At least ``count`` 32-bit words (int64 tensor, a multiple of 4 of them) and the state after them.

    The state is (key, counter low, counter high), or (key, counter high's initial value) without a third word: then the
    key is the counter's high half too and only its low half is kept.
    """
    parts = [int(word) for word in state.tolist()]
    key, low, high = parts if len(parts) >= 3 else (parts[0], parts[1], parts[0])
    blocks = -(-count // 4)
    lows = low + torch.arange(blocks, device=state.device)
    wrapped = _order(lows) < (low ^ _SIGN_BIT)
    highs = torch.where(wrapped, _wrap64(high + 1), high)
    counters = [lows & _MASK32, (lows >> 32) & _MASK32, highs & _MASK32, (highs >> 32) & _MASK32]
    words = torch.stack(philox4x32(counters, (key & _MASK32, (key >> 32) & _MASK32)), dim=-1)
    new_low = _wrap64(low + blocks)
    new_high = _wrap64(high + ((new_low & _MASK64) < (low & _MASK64)))
    after = (key, new_low, new_high)[: len(parts)]
    return words.reshape(-1), torch.tensor(after, dtype=torch.int64, device=state.device)


def _wrap64(value: int) -> int:
    return ((value - _SIGN_BIT) & _MASK64) + _SIGN_BIT


def _philox32(state: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    words, new_state = _philox_words(state, prod(dims))
    return words[: prod(dims)].to(torch.int32).reshape(dims), new_state


def _philox64(state: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    words, new_state = _philox_words(state, prod(dims) * 2)
    pairs = words.reshape(-1, 2)[: prod(dims)]
    return (pairs[:, 0] | (pairs[:, 1] << 32)).reshape(dims), new_state


def random_bits(algorithm: RngAlgorithm, state: Tensor, result: ArrayShape) -> tuple[Tensor, Tensor]:
    """The state after drawing, and the bits in ``result``'s storage dtype.

    ``state``: int64 bit patterns, [2] for ThreeFry (key, counter), [2] or [3] for Philox. DEFAULT is Philox, as on
    stock XLA's CPU.
    """
    wide = result.element_type.bits == 64
    if algorithm is RngAlgorithm.THREE_FRY:
        bits, after = (_threefry64 if wide else _threefry32)(state, result.dims)
    else:
        bits, after = (_philox64 if wide else _philox32)(state, result.dims)
    return after, _narrow(bits, result.element_type)


def _narrow(bits: Tensor, element_type: ElementType) -> Tensor:
    """Keeps the low bits, in storage form."""
    width = element_type.bits
    if width < 8:
        bits = bits & ((1 << width) - 1)
        if element_type.is_signed:
            bits = bits - ((bits >> (width - 1)) << width)
    return bits.to(storage.dtype_of(element_type))


@kernel(Opcode.RNG_BIT_GENERATOR)
def prepare_rng_bit_generator(instruction: Instruction) -> Kernel:
    algorithm = instruction.attributes_as(RngBitGeneratorAttributes).algorithm
    shape = instruction.shape
    assert isinstance(shape, TupleShape)
    state_shape, result = shape.elements
    assert isinstance(state_shape, ArrayShape)
    assert isinstance(result, ArrayShape)
    if not result.element_type.is_integer:
        raise UnsupportedElementType.at(instruction, element_type=result.element_type.name)

    def run(_: Run, state: Tensor) -> tuple[Tensor, Tensor]:
        words = state if state.dtype == torch.int64 else state.contiguous().view(torch.int64)
        after, bits = random_bits(algorithm, words.reshape(-1), result)
        return after.view(state.dtype).reshape(state.shape), bits

    return run


def _uniform_integers(low: int, high: int, dims: tuple[int, ...]) -> Tensor:
    """int64 bit patterns in [low, high); an empty range gives ``low``."""
    count = high - low
    if count <= 0:
        return torch.full(dims, _wrap64(low), dtype=torch.int64)
    # Numbers from the incomplete last multiple of count are drawn again: no value comes more often than another.
    limit = (1 << 64) // count * count
    bits = _random_words(dims)
    while True:
        beyond = _order(bits) >= _order(torch.tensor(_wrap64(limit))) if limit < 1 << 64 else torch.tensor(False)
        if not beyond.any():
            break
        bits = torch.where(beyond, _random_words(dims), bits)
    return integers.remainder(ElementType.U64)(bits, torch.tensor(_wrap64(count))) + _wrap64(low)


def _random_words(dims: tuple[int, ...]) -> Tensor:
    """64 random bits each."""
    halves = torch.empty((2, *dims), dtype=torch.int64).random_(0, 1 << 32, generator=_generator)
    return halves[0] | (halves[1] << 32)


def _order(bits: Tensor) -> Tensor:
    """int64 in the order of the unsigned values of ``bits``."""
    return bits ^ _SIGN_BIT


def _unsigned(value: int, element_type: ElementType) -> int:
    return value & ((1 << element_type.bits) - 1) if element_type.is_unsigned else value


@kernel(Opcode.RNG)
def prepare_rng(instruction: Instruction) -> Kernel:
    """Stateful: one generator for the process, seeded alike in each, so a program's numbers repeat from run to run."""
    distribution = instruction.attributes_as(RngAttributes).distribution
    result = instruction.shape
    assert isinstance(result, ArrayShape)
    element_type = result.element_type
    dtype = storage.dtype_of(element_type)
    if not (element_type.is_float and dtype.is_floating_point) and not (
        element_type.is_integer and distribution is RngDistribution.UNIFORM
    ):
        raise UnsupportedElementType.at(instruction, element_type=element_type.name)

    def normal(run: Run, mean: Tensor, deviation: Tensor) -> Tensor:
        with _generator_lock:
            drawn = torch.randn(result.dims, dtype=dtype, generator=_generator)
        return drawn.to(run.device).mul_(deviation).add_(mean)

    def uniform(run: Run, low: Tensor, high: Tensor) -> Tensor:
        with _generator_lock:
            drawn = torch.rand(result.dims, dtype=dtype, generator=_generator)
        return drawn.to(run.device).mul_(high - low).add_(low)

    def uniform_integer(run: Run, low: Tensor, high: Tensor) -> Tensor:
        bounds = [_unsigned(int(bound), element_type) for bound in (low, high)]
        with _generator_lock:
            drawn = _uniform_integers(bounds[0], bounds[1], result.dims)
        return _narrow(drawn, element_type).to(run.device)

    if distribution is RngDistribution.NORMAL:
        return normal
    return uniform_integer if element_type.is_integer else uniform
