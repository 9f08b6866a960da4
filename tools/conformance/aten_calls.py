"""Calls of ATen operators, as programs make them: taken down while eager PyTorch runs, kept in files, and as FlagOS
compiles them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flagos_backend.gems.decisions import instruction_of
from flagos_backend.ir.hlo import Instruction


@dataclass(frozen=True)
class Call:
    """``name``: of the operator, without the overload ``default``: ``mm``, ``sum.dim_IntList``."""

    name: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> Any:
        packet, _, overload = self.name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload or "default")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands of ``instruction``."""
        return _tensors(self.arguments, dict(self.keywords))

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: of floats if it has any, rather integers than truth values."""
        dtypes = [tensor.dtype for tensor in self.tensors] or [tensor.dtype for tensor in _tensors(self.run())]
        return max(dtypes, key=lambda dtype: (dtype.is_floating_point or dtype.is_complex, dtype is not torch.bool))

    def mapped(self, place: Callable[[Any], Any]) -> Call:
        """Of other arguments: ``place`` maps each leaf."""
        return Call(self.name, *tree_map(place, (list(self.arguments), dict(self.keywords))))

    def run(self, place: Callable[[Any], Any] = lambda value: value) -> Any:
        """What ATen makes of it. ``place`` maps each leaf of the arguments."""
        call = self.mapped(place)
        return call.operator(*call.arguments, **call.keywords)

    def instruction(self, outcome: Any) -> Instruction:
        """The custom call that torch.compile emits for it; ``outcome`` is what it returns.

        Raises NoLoweringError for what cannot be compiled.
        """
        return instruction_of(self.operator, self.arguments, self.keywords, outcome)

    def __str__(self) -> str:
        written = [_text(value) for value in self.arguments]
        written += [f"{name}={_text(value)}" for name, value in self.keywords.items()]
        return f"{self.name}({', '.join(written)})"


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _text(value: Any) -> str:
    """Sizes and types of tensors, everything else as it is."""
    if isinstance(value, torch.Tensor):
        sizes = ",".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]" + ("" if value.is_contiguous() else " strided")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


class Recorder(TorchDispatchMode):
    """Takes down which of the operators ``names`` run, with copies of what they are given: one call of each way to
    call it, by sizes, types and numbers. Arguments with more than ``limit`` elements are left out."""

    def __init__(self, names: Collection[str], limit: int) -> None:
        super().__init__()
        self._names, self._limit = names, limit
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        name += "" if operator._overloadname == "default" else f".{operator._overloadname}"
        if name in self._names and operator._schema.name.startswith("aten::"):
            call = Call(name, args, kwargs or {})
            is_small = all(t.layout is torch.strided and t.numel() <= self._limit for t in call.tensors)
            if is_small and (text := str(call)) not in self.calls:
                self.calls[text] = call.mapped(_copy)
        return outcome


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# ---- files of calls ----


class _Writer(pickle.Pickler):
    """Tensors apart: torch's own writer has all their types, and none of the other arguments'."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def save(cases: Mapping[str, Sequence[Call]], path: str) -> None:
    """Writes calls by a name to a file."""
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(cases)
    torch.save((file.getvalue(), writer.tensors), path)


def load(path: str) -> dict[str, list[Call]]:
    """What ``save`` has written."""
    written, tensors = torch.load(path, weights_only=False)
    cases: dict[str, list[Call]] = _Reader(io.BytesIO(written), tensors).load()
    return cases
