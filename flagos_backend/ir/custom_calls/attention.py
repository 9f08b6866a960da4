"""What the custom calls flagos.attention and flagos.attention_backward compute, as typed attributes, and how their
operands are seen by kernels. Written by passes/match, read by every provider of attention. CUSTOM_CALLS.md explains."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from flagos_backend.errors import MalformedProgram
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.config import is_integer, parse_config
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, leaves
from flagos_backend.process.torch_loading import torch

FORWARD = "flagos.attention"
BACKWARD = "flagos.attention_backward"

# A row whose logits are all at or below this share of the fill sees no key: its weights are all equal.
HIDDEN_ROW = 0.5


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(where(visible, scale·query·keyᵀ + bias, fill))·value over labelled dimensions.

    Each string names the dimensions of one array, a letter each, ``1`` for a size of one: ``t`` query position, ``s``
    key position, ``d`` what query and key contract, ``e`` channel of the value; any other letter of ``key`` is a batch
    dimension, any other of ``query`` one of the group of queries that share a key. ``bias`` is added to the logits;
    ``mask`` is true where a key is visible; ``upper`` and ``lower`` hide key position s from query position t unless
    t - lower <= s <= t + upper. With ``cap`` scale·query·keyᵀ is cap·tanh(scale·query·keyᵀ / cap). With ``sink``, which
    has no positions, the softmax is over one more logit a row, whose weight is dropped. With ``added`` what hides was
    added: the gradient of a row that sees no key reaches its logits all the same. Arithmetic takes place in f32,
    for f64 in f64; with ``tensor_float`` products may round f32 operands to TF32.
    """

    query: str
    key: str
    value: str
    output: str
    scale: float = 1.0
    fill: float = -math.inf
    cap: float | None = None
    bias: str | None = None
    mask: str | None = None
    sink: str | None = None
    upper: int | None = None
    lower: int | None = None
    added: bool = False
    tensor_float: bool = False

    @property
    def batch(self) -> str:
        """Batch dimensions, outermost first."""
        return "".join(letter for letter in self.key if letter not in "1sd")

    @property
    def groups(self) -> str:
        return "".join(letter for letter in self.query if letter not in "1td" and letter not in self.key)

    @property
    def heads_of_key(self) -> str:
        """The last batch dimension; none where one key is for all heads of a batch, which the query's layout tells:
        batch and heads that do not stand side by side would be copied to make them one dimension."""
        last = self.batch[-1:]
        together = all(self.batch in dims for dims in (self.query, self.key, self.value))
        return "" if self.groups and together and last + self.groups not in self.query else last

    @property
    def outer_batch(self) -> str:
        return self.batch[: len(self.batch) - len(self.heads_of_key)]

    @property
    def heads_of_query(self) -> str:
        return self.heads_of_key + self.groups

    def hides(self) -> bool:
        return self.mask is not None or self.upper is not None or self.lower is not None

    def operands(self) -> tuple[str, ...]:
        """Dimensions of the operands of the forward call, in order."""
        optional = (self.bias, self.mask, self.sink)
        return (self.query, self.key, self.value, *(dims for dims in optional if dims is not None))

    def __str__(self) -> str:
        """``bthd,bshd,bshe->bthe scale=0.125 upper=0``."""
        arrays = f"{self.query},{self.key},{self.value}->{self.output}"
        extra = {
            "cap": self.cap,
            "bias": self.bias,
            "mask": self.mask,
            "sink": self.sink,
            "upper": self.upper,
            "lower": self.lower,
        }
        shown = "".join(f" {name}={value}" for name, value in extra.items() if value is not None)
        flags = {"added": self.added, "tf32": self.tensor_float}
        marks = "".join(f" {name}" for name, value in flags.items() if value)
        return f"{arrays} scale={self.scale:.6g}{shown}{marks}"

    def to_config(self) -> dict[str, Any]:
        config = {name: value for name, value in asdict(self).items() if value is not None}
        config["fill"] = None if math.isinf(self.fill) else self.fill  # JSON has no infinity
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Raises TypeError or ValueError for what ``to_config`` does not write."""
        known = {field.name for field in fields(Attention)}
        values = {name: value for name, value in config.items() if name in known}
        values["fill"] = -math.inf if values.get("fill") is None else float(values["fill"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A forward call: operands query, key, value[, bias][, mask][, sink]; results the output and, if ``statistics``,
    the logarithm of the sum of exponentials f32[batch, heads, t] (f64 for f64), which a kernel may give as a number
    where weights are NaN, unless ``tells_nan``."""

    attention: Attention
    statistics: bool
    tells_nan: bool = False

    @classmethod
    def of(cls, instruction: Instruction) -> Self:
        config = _config_of(instruction)
        own = {name: config.pop(name, False) for name in ("statistics", "tells_nan")}
        attention, sizes = _decoded(instruction, config, AttentionCall)
        results = list(leaves(instruction.shape))
        if len(results) != 1 + own["statistics"]:
            raise _malformed(instruction, f"it has {len(results)} results, not {1 + own['statistics']}")
        _check_dims(instruction, "output", attention.output, results[0], sizes)
        return cls(attention, **own)

    def config(self) -> bytes:
        own = {"statistics": self.statistics, **({"tells_nan": True} if self.tells_nan else {})}
        return json.dumps({**self.attention.to_config(), **own}, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class AttentionBackwardCall:
    """A backward call: operands query, key, value, output, statistics, output gradient[, bias][, mask][, sink]; results
    the gradients of query, key, value, each row's sink (over batch, groups and t) and of what is added to the logits
    (over s and any of batch, groups and t, summed over the others) whose dimensions are given, a tuple in that order.
    A row of which every logit is -infinity, as its statistics are, has weights of zero if these are given as a number.
    """

    attention: Attention
    output_gradient: str
    query_gradient: str | None
    key_gradient: str | None
    value_gradient: str | None
    sink_gradient: str | None = None
    bias_gradient: str | None = None

    @classmethod
    def of(cls, instruction: Instruction) -> Self:
        config = _config_of(instruction)
        own = {name: config.pop(name, None) for name in _BACKWARD_DIMS}
        attention, sizes = _decoded(instruction, config, AttentionBackwardCall)
        if own["output_gradient"] is None:
            raise _malformed(instruction, "output_gradient is missing")
        call = cls(attention, **own)
        operands = [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]
        _check_dims(instruction, "output", attention.output, operands[3], sizes)
        _check_dims(instruction, "output_gradient", call.output_gradient, operands[5], sizes)
        wanted, results = call.wanted(), list(leaves(instruction.shape))
        if len(results) != len(wanted):
            raise _malformed(instruction, f"it has {len(results)} results, not {len(wanted)}")
        for (name, dims), shape in zip(wanted.items(), results, strict=True):
            _check_dims(instruction, f"{name}_gradient", dims, shape, sizes)
        return call

    def config(self) -> bytes:
        own = {name: getattr(self, name) for name in _BACKWARD_DIMS if getattr(self, name) is not None}
        return json.dumps({**self.attention.to_config(), **own}, allow_nan=False).encode()

    def wanted(self) -> dict[str, str]:
        """Dimensions of the results by what they are the gradients of, in order."""
        every = {name: getattr(self, f"{name}_gradient") for name in GRADIENTS}
        return {name: dims for name, dims in every.items() if dims is not None}


#: What a backward call may give the gradients of, in the order of its results.
GRADIENTS = ("query", "key", "value", "sink", "bias")
_BACKWARD_DIMS = ("output_gradient", *(f"{name}_gradient" for name in GRADIENTS))


def _is_dims(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    letters = value.replace("1", "")
    return len(set(letters)) == len(letters) and all(letter.isascii() and letter.isalpha() for letter in letters)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_DIMS_TEXT = "dimensions, a letter each, none twice"
_MANDATORY = ("query", "key", "value", "output")
#: What each field of a config must be, in words, and what tells whether it is.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_MANDATORY, (_DIMS_TEXT, _is_dims)),
    **dict.fromkeys(("bias", "mask", "sink", *_BACKWARD_DIMS), (_DIMS_TEXT, _or_null(_is_dims))),
    "scale": ("a finite number", _is_number),
    **dict.fromkeys(("fill", "cap"), ("a finite number or null", _or_null(_is_number))),
    **dict.fromkeys(("upper", "lower"), ("an integer of 64 bits or null", _or_null(is_integer))),
    **dict.fromkeys(("added", "tensor_float", "statistics", "tells_nan"), ("true or false", _is_flag)),
}


def _config_of(instruction: Instruction) -> dict[str, Any]:
    try:
        config = parse_config(instruction.attributes_as(CustomCallAttributes).backend_config)
    except ValueError as error:
        raise _malformed(instruction, f"its backend config is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise _malformed(instruction, "its backend config is not a JSON object")
    for name, (wanted, fits) in _TYPES.items():
        if name in config and not fits(config[name]):
            raise _malformed(instruction, f"{name} is {_shown(config[name])}, not {wanted}")
    return config


def _shown(value: Any) -> str:
    return textwrap.shorten(json.dumps(value), 60)


def _decoded(instruction: Instruction, config: dict[str, Any], kind: type) -> tuple[Attention, dict[str, int]]:
    """Also the sizes of dimensions by their letters."""
    unknown = config.keys() - {field.name for field in fields(Attention)}
    if unknown:
        raise _malformed(instruction, f"{kind.__name__} knows no {', '.join(sorted(unknown))}")
    try:
        attention = Attention.from_config(config)
    except (TypeError, ValueError) as error:
        raise _malformed(instruction, str(error)) from error
    return attention, _sizes(instruction, attention, kind)


def _sizes(instruction: Instruction, attention: Attention, kind: type) -> dict[str, int]:
    operands = attention.operands()
    given = [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]
    extra = 0 if kind is AttentionCall else 3
    if len(given) != len(operands) + extra:
        raise _malformed(instruction, f"it has {len(given)} operands, not {len(operands) + extra}")
    sizes: dict[str, int] = {"1": 1}
    for dims, shape in zip(operands, (*given[:3], *given[3 + extra :]), strict=True):
        if len(dims) != shape.rank:
            raise _malformed(instruction, f"the dimensions {dims!r} do not name those of {shape}")
        for letter, size in zip(dims, shape.dims, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise _malformed(instruction, f"the dimension {letter} is {sizes[letter]} and {size}")
    return {"t": 1, "s": 1, "d": 1, "e": 1, **sizes}


def _check_dims(instruction: Instruction, name: str, dims: str, shape: ArrayShape, sizes: dict[str, int]) -> None:
    if tuple(sizes.get(letter) for letter in dims) != shape.dims:
        raise _malformed(instruction, f"the dimensions {dims!r} of {name} do not name those of {shape}")


def _malformed(instruction: Instruction, fact: str) -> MalformedProgram:
    target = instruction.attributes_as(CustomCallAttributes).target
    return MalformedProgram.at(instruction, fact=f"the custom call {target} breaks its convention: {fact}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """B batches, H heads of the query, K heads of the key, T and S positions, D and E channels."""

    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    E: int

    @property
    def group(self) -> int:
        return self.H // self.K


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Views:
    """Arrays of a call as kernels see them: query [B,H,T,D], key [B,K,S,D], value [B,K,S,E], output [B,H,T,E]."""

    def __init__(self, attention: Attention, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``shapes``: the sizes of arrays by their dimensions' letters."""
        self.letters = {"1": 1, "t": 1, "s": 1, "d": 1, "e": 1}
        for dims, sizes in shapes.items():
            self.letters.update(zip(dims, sizes, strict=True))
        self.letters["1"] = 1
        self._outer, self._key_heads = attention.outer_batch, attention.heads_of_key
        self._heads = attention.heads_of_query
        heads = (self._outer, self._heads, self._key_heads)
        self.sizes = Sizes(*(self._count(letters) for letters in (*heads, "t", "s", "d", "e")))

    def _count(self, letters: str) -> int:
        return math.prod(self.letters[letter] for letter in letters)

    def query(self, tensor: torch.Tensor, dims: str, channel: str = "d") -> torch.Tensor:
        return self._merged(tensor, dims, (self._outer, self._heads, "t", channel))

    def key(self, tensor: torch.Tensor, dims: str, channel: str = "d") -> torch.Tensor:
        return self._merged(tensor, dims, (self._outer, self._key_heads, "s", channel))

    def logits(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """A bias or mask that broadcasts over [B, H, T, S]."""
        return self._merged(tensor, dims, (self._outer, self._heads, "t", "s"), repeat=True)

    def sink(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """[B, H], dimensions that are not there at stride 0."""
        found = self._merged(tensor, dims, (self._outer, self._heads), repeat=True)
        return found.expand(self.sizes.B, self.sizes.H)

    def rows(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """[B, H, T]"""
        return self._merged(tensor, dims, (self._outer, self._heads, "t"))

    def bias(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """[batches and heads, T, S] of those that ``dims`` has: where it has no query positions, [.., 1, S]."""
        present = "".join(letter for letter in self._outer + self._heads if letter in dims)
        return self._merged(tensor, dims, (present, "t" if "t" in dims else "", "s"))

    def shared(self, dims: str) -> list[int]:
        """Batches and heads, [B, H], as sizes of dimensions that ``dims`` lacks and that it has in turn, those that
        stand side by side merged; the first is of such that it lacks."""
        sizes = [1]
        for letter in self._outer + self._heads:
            if (letter in dims) is bool(len(sizes) % 2):
                sizes.append(1)
            sizes[-1] *= self.letters[letter]
        return sizes

    def like_rows(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """A contiguous [B,H,T] laid out as ``dims``; a view where it can be."""
        return self._spread(tensor, dims, self._outer + self._heads + "t")

    def like_bias(self, tensor: torch.Tensor, dims: str) -> torch.Tensor:
        """A contiguous [batches and heads, T, S], of those that ``dims`` has, laid out as ``dims``."""
        return self._spread(tensor, dims, self._outer + self._heads + "ts")

    def like_query(self, tensor: torch.Tensor, dims: str, channel: str) -> torch.Tensor:
        """A contiguous [B,H,T,channel] laid out as ``dims``; a view where it can be."""
        return self._spread(tensor, dims, self._outer + self._heads + "t" + channel)

    def like_key(self, tensor: torch.Tensor, dims: str, channel: str) -> torch.Tensor:
        """A contiguous [B,K,S,channel] laid out as ``dims``; a view where it can be."""
        return self._spread(tensor, dims, self._outer + self._key_heads + "s" + channel)

    def new(self, dims: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An array laid out as ``dims``, in which ``query`` or ``key`` find what to write: a view where one exists."""
        return torch.empty([self.letters[letter] for letter in dims], dtype=dtype, device=device)

    def finish_query(self, whole: torch.Tensor, written: torch.Tensor, dims: str, channel: str) -> torch.Tensor:
        """An array laid out as ``dims`` after a kernel filled ``written``, which ``query`` found in it."""
        return whole if _share_storage(whole, written) else self.like_query(written, dims, channel)

    def finish_key(self, whole: torch.Tensor, written: torch.Tensor, dims: str, channel: str) -> torch.Tensor:
        """An array laid out as ``dims`` after a kernel filled ``written``, which ``key`` found in it."""
        return whole if _share_storage(whole, written) else self.like_key(written, dims, channel)

    def finish_rows(self, whole: torch.Tensor, written: torch.Tensor, dims: str) -> torch.Tensor:
        """An array laid out as ``dims`` after a kernel filled ``written``, which ``rows`` found in it."""
        return whole if _share_storage(whole, written) else self.like_rows(written, dims)

    def finish_bias(self, whole: torch.Tensor, written: torch.Tensor, dims: str) -> torch.Tensor:
        """An array laid out as ``dims`` after a kernel filled ``written``, which ``bias`` found in it."""
        return whole if _share_storage(whole, written) else self.like_bias(written, dims)

    def _spread(self, tensor: torch.Tensor, dims: str, order: str) -> torch.Tensor:
        present = [letter for letter in order if letter in dims]
        tensor = tensor.reshape([self.letters[letter] for letter in present])
        tensor = tensor.permute([present.index(letter) for letter in dims if letter != "1"])
        return tensor.reshape([self.letters[letter] for letter in dims])

    def _merged(self, tensor: torch.Tensor, dims: str, parts: tuple[str, ...], *, repeat: bool = False) -> torch.Tensor:
        """``tensor`` with its dimensions in the order of ``parts``, those of one part merged; a view where it can be.
        With ``repeat`` a part of which nothing is there has size one, and one of which some is there is filled up."""
        kept = [(letter, axis) for axis, letter in enumerate(dims) if letter != "1"]
        places = dict(kept)
        order = [letter for part in parts for letter in part]
        tensor = tensor.squeeze([axis for axis, letter in enumerate(dims) if letter == "1"]) if "1" in dims else tensor
        squeezed = {letter: index for index, (letter, _) in enumerate(kept)}
        present = [letter for letter in order if letter in places]
        tensor = tensor.permute([squeezed[letter] for letter in present])
        sizes: list[int] = []
        expanded: list[int] = []
        for part in parts:
            some = any(letter in places for letter in part)
            whole = [self.letters[letter] for letter in part]
            expanded += whole if some or not repeat else [1] * len(part)
            sizes.append(math.prod(whole) if some or not repeat else 1)
        tensor = tensor.reshape([self.letters[letter] if letter in places else 1 for letter in order])
        return tensor.expand(expanded).reshape(sizes)
