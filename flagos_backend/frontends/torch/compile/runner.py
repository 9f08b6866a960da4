"""Makes a function of steps: generated code, since what a step costs is what a small operator costs. For
specialization.py.

The first call looks at what each operator did: its results are new tensors of the traced kind, and nothing was written
but what its schema names. Later calls look only at results that reach no program, since programs look themselves.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flagos_backend.frontends.torch.compile.errors import UndeclaredWrite, UnexpectedResult
from flagos_backend.frontends.torch.compile.segments import CompiledGraph
from flagos_backend.frontends.torch.compile.steps import (
    CallStep,
    Expected,
    ItemStep,
    ProgramStep,
    Sequence,
    Step,
    Value,
)


def runner_of(sequence: Sequence) -> CompiledGraph:
    """What runs the steps. Raises what an operator raises, with a note that names it; UnexpectedResult and
    UndeclaredWrite. May be called from several threads at once."""
    run, run_first = _Writer(sequence, first=False).function(), _Writer(sequence, first=True).function()
    was_looked_at = False

    def call(inputs: list[Any]) -> list[Any]:
        nonlocal was_looked_at
        if was_looked_at:
            return run(inputs)
        outputs = run_first(inputs)
        was_looked_at = True
        return outputs

    return call


class _Writer:
    """``first``: whether it looks at everything."""

    def __init__(self, sequence: Sequence, *, first: bool) -> None:
        self._sequence, self._first = sequence, first
        self._known: dict[str, Any] = {}
        self._lines: list[str] = []

    def function(self) -> CompiledGraph:
        sequence = self._sequence
        self._line("def run(inputs):")
        if sequence.inputs:
            self._line(f"    {_row(map(_name, sequence.inputs))} = inputs")
        self._line("    inputs.clear()")
        dead = self._dead()
        for number, step in enumerate(sequence.steps):
            self._step(step)
            if dead[number]:
                self._line(f"    del {', '.join(map(_name, dead[number]))}")
        self._line(f"    return {self._text(list(sequence.outputs))}")
        exec("\n".join(self._lines), self._known)
        function: CompiledGraph = self._known["run"]
        return function

    def _dead(self) -> list[list[str]]:
        """The values that nobody needs after each step."""
        last: dict[str, int] = {}
        for number, step in enumerate(self._sequence.steps):
            for name in (*_reads(step), *_gives(step)):
                last[name] = number
        for name in self._sequence.inputs:
            last.setdefault(name, 0)
        kept = {leaf.name for leaf in tree_leaves(list(self._sequence.outputs)) if isinstance(leaf, Value)}
        dead: list[list[str]] = [[] for _ in self._sequence.steps]
        for name, number in last.items():
            if name not in kept:
                dead[number].append(name)
        return dead

    def _line(self, line: str) -> None:
        self._lines.append(line)

    def _constant(self, value: Any) -> str:
        name = f"k_{len(self._known)}"
        self._known[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Value):
            return _name(value.name)
        if type(value) in (int, bool, str, type(None)):
            return repr(value)
        if isinstance(value, slice):
            return f"slice({', '.join(self._text(part) for part in (value.start, value.stop, value.step))})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is tuple:
            return _row(map(self._text, value))
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._text(part)}' for key, part in value.items())}}}"
        return self._constant(value)

    def _step(self, step: Step) -> None:
        if isinstance(step, ProgramStep):
            # The list of inputs is nobody else's, so that what only launches need not empty it.
            program = getattr(step.program, "launch", step.program)
            call = f"{self._constant(program)}([{', '.join(map(_name, step.inputs))}])"
            self._line(f"    {_row(map(_name, step.outputs))} = {call}" if step.outputs else f"    {call}")
        elif isinstance(step, ItemStep):
            key = "" if step.key is None else f"[{step.key!r}]"
            self._line(f"    {_name(step.output)} = {_name(step.source)}{key}")
            self._look(step, step.expected)
        else:
            self._call(step)

    def _call(self, step: CallStep) -> None:
        given = [self._text(argument) for argument in step.args]
        given += [_keyword(name, self._text(value)) for name, value in step.keywords.items()]
        target = step.target
        if self._first and step.names:
            target = _looking_at(step)
        line = f"{_name(step.output)} = {self._constant(target)}({', '.join(given)})"
        if not step.place:
            self._line(f"    {line}")
            return
        self._line("    try:")
        self._line(f"        {line}")
        self._line("    except Exception as error:")
        self._line(f"        {self._constant(_note)}(error, {step.place!r})")
        self._line("        raise")
        self._look(step, step.expected)

    def _look(self, step: CallStep | ItemStep, expected: Expected | None) -> None:
        if expected is None or not (self._first or expected.always):
            return
        name = _name(step.output)
        strides = f" or {name}.stride() != {expected.strides!r}" if expected.strides else ""
        dtype = self._constant(expected.dtype)
        look = f"type({name}) is not {self._constant(torch.Tensor)} or {name}.shape != {expected.sizes!r}{strides}"
        self._line(f"    if {look} or {name}.dtype is not {dtype}:")
        mend = f"{self._constant(_mended)}({name}, {self._constant(expected)}, {step.place!r})"
        self._line(f"        {name} = {mend}")


def _reads(step: Step) -> list[str]:
    if isinstance(step, ProgramStep):
        return list(step.inputs)
    if isinstance(step, ItemStep):
        return [step.source]
    return [leaf.name for leaf in tree_leaves((step.args, dict(step.keywords))) if isinstance(leaf, Value)]


def _gives(step: Step) -> tuple[str, ...]:
    return step.outputs if isinstance(step, ProgramStep) else (step.output,)


def _name(name: str) -> str:
    return f"v_{name}"


def _keyword(name: str, text: str) -> str:
    is_plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={text}" if is_plain else f"**{{{name!r}: {text}}}"


def _row(texts: Any) -> str:
    inside = ", ".join(texts)
    return f"({inside},)" if inside else "()"


def _note(error: Exception, place: str) -> None:
    error.add_note(f"In an operator that runs between programs of the backend flagos, at {place}.")


def _mended(value: Any, expected: Expected, place: str) -> torch.Tensor:
    """The result as it was traced, if it differs only in strides that say nothing, or may be copied."""
    if not isinstance(value, torch.Tensor):
        raise UnexpectedResult(traced=_described(expected), given=f"a {type(value).__name__}", place=place)
    alike = (value.shape, value.dtype, value.device) == (expected.sizes, expected.dtype, expected.device)
    pairs = zip(value.shape, value.stride(), expected.strides, strict=False)
    if alike and (not value.numel() or all(a == b for size, a, b in pairs if size != 1)):
        return value
    if not alike or not expected.moves:
        given = Expected(value.dtype, value.device, tuple(value.shape), value.stride(), False, False)
        raise UnexpectedResult(traced=_described(expected), given=_described(given), place=place)
    laid = torch.empty_strided(expected.sizes, expected.strides, dtype=expected.dtype, device=expected.device)
    return laid.copy_(value)


def _described(tensor: Expected) -> str:
    return f"{tensor.dtype} of sizes {list(tensor.sizes)} and strides {list(tensor.strides)} on {tensor.device}"


def _looking_at(step: CallStep) -> Callable[..., Any]:
    """The operator, refused where it did what its schema does not say."""

    def call(*args: Any, **keywords: Any) -> Any:
        given = dict(zip(step.names, args, strict=False)) | keywords
        tensors = {name: row for name, value in given.items() if (row := _tensors(value))}
        written = {_memory(t) for name in step.writes for t in tensors.get(name, ())}
        kept = {name: row for name, row in tensors.items() if not any(_memory(t) in written for t in row)}
        before = {name: [_digest(t) for t in row] for name, row in kept.items()}
        result = step.target(*args, **keywords)
        for name, digests in before.items():
            if [_digest(t) for t in kept[name]] != digests:
                raise UndeclaredWrite(argument=name, place=step.place)
        for value in _tensors(result):
            for name, row in tensors.items():
                if value.numel() and any(_memory(t) == _memory(value) for t in row):
                    beside = f"memory of its argument {name}"
                    raise UnexpectedResult(traced="a tensor of its own", given=beside, place=step.place)
        return result

    return call


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: torch.Tensor) -> int:
    """A number that changes with what the tensor holds: PyTorch counts no versions of what an operator writes."""
    if not tensor.numel():
        return 0
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return int(plain.contiguous().view(_WORDS[plain.element_size()]).sum(dtype=torch.int64))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
