"""Worker of the OpInfo suite: runs each case on flagos and on the CPU eagerly, and compares. Started by opinfo.py.

The oracle is the CPU's eager PyTorch. Where that of the accelerator that is compiled for does not agree with it, on
random numbers first of all, which each generator gives otherwise, or where the CPU refuses, it is the accelerator's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from flagos_backend.frontends.torch.compile.backend import flagos
from tools.conformance import tensors
from tools.conformance.device import FLAGOS
from tools.conformance.opinfo import Case, Direction, Mode
from tools.conformance.records import HOST, Status
from tools.conformance.worker import evenly, serve

# What they return is whatever was in the memory: sizes and types are all there is to compare.
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_UNINITIALIZED = frozenset((*_EMPTY, "resize_", "resize_as_"))
_MESSAGE = 1500
_HOST = torch.device(HOST.kind)

# Runs an operator on a sample's inputs: makes of the operator what is called in its place.
_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class NoGraph(Exception):
    """PyTorch found nothing to compile."""


@dataclass(frozen=True)
class _Trial:
    """One sample of one case."""

    op: OpInfo
    sample: SampleInput
    direction: Direction
    seed: int

    def run(self, wrap: _Wrap = lambda call: call, place: Callable[[Any], Any] = lambda value: value) -> Any:
        """Results, and gradients in the backward direction. ``place`` maps each leaf of the inputs."""
        inputs = tree_map(place, (self.sample.input, self.sample.args, self.sample.kwargs))
        first, args, kwargs = tree_map(_fresh, inputs)
        torch.manual_seed(self.seed)
        results = wrap(self.op.op)(first, *args, **kwargs)
        results = self.sample.output_process_fn_grad(results)
        if self.direction is Direction.FORWARD:
            return results
        wanted = [x for x in tree_leaves((first, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        outputs = [y for y in tree_leaves(results) if isinstance(y, torch.Tensor) and y.requires_grad]
        if not wanted or not outputs:
            return results
        torch.manual_seed(self.seed + 1)
        # The same cotangents on every device and in every precision.
        cotangents = [torch.randn(y.shape, dtype=_drawn(y.dtype)).to(y.device, y.dtype) for y in outputs]
        return results, torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)

    def eager(self, device: torch.device) -> Any:
        """A reference: uncompiled, on ``device``."""
        return self.run(place=functools.partial(_placed, device))

    def truth(self, device: torch.device) -> Any:
        """The reference in wide types."""
        return tensors.truth_of(lambda widened: self.run(place=lambda value: widened(_placed(device, value))))


@dataclass(frozen=True)
class _Raised:
    """In place of results."""

    text: str


class _NoGraph:
    """In place of results: PyTorch found nothing to compile."""


def _fresh(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _placed(device: torch.device, value: Any) -> Any:
    """A leaf of the inputs, or of results, on ``device``."""
    if isinstance(value, torch.Tensor):
        return _moved(value, device).requires_grad_(value.requires_grad)
    return device if _names_a_device(value) else value


def _names_a_device(value: Any) -> bool:
    """Any but the host."""
    with contextlib.suppress(RuntimeError):  # most texts name none
        return isinstance(value, str | torch.device) and torch.device(value) != _HOST
    return False


def _hosted(value: Any) -> Any:
    """A leaf of results, to be compared."""
    is_there = isinstance(value, torch.Tensor) and value.device == _HOST
    return value if is_there else _placed(_HOST, value)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With the memory around it, where operators that take strides may look."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device)
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    there = tensor.as_strided((count,), (1,), 0).to(device)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _compiled(backend: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` through torch.compile. Raises NoGraph where nothing of it was compiled."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(graph, inputs)

    def plain(*args: Any, **kwargs: Any) -> Any:  # an object of its own: nothing compiled before is found for it
        return call(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.reset()
        result = torch.compile(plain, backend=counting, dynamic=False)(*args, **kwargs)
        if not graphs:
            raise NoGraph
        return result

    return run


class _Runner:
    """``device``: the type of the tensors that operators are given."""

    def __init__(self, mode: Mode, samples: int, device: str) -> None:
        self._mode, self._samples, self._device = mode, samples, device
        self._operators = {op.full_name: op for op in op_db}
        # Which of PyTorch's own devices computes for it.
        self._own = _inner_device() if device == FLAGOS else torch.device(device)

    def __call__(self, name: str) -> tuple[Status, str]:
        case = Case.parse(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._run(case, self._operators[case.operator], zlib.crc32(name.encode()))

    def _run(self, case: Case, op: OpInfo, seed: int) -> tuple[Status, str]:
        torch.manual_seed(seed)
        backward = case.direction is Direction.BACKWARD
        try:
            # Made on the device, they say themselves which of their tensors belong there.
            samples = list(op.sample_inputs(self._device, getattr(torch, case.dtype), requires_grad=backward))
        except Exception as error:
            return Status.FAILED, f"the samples on {self._device}: {type(error).__name__}: {error}"[:_MESSAGE]
        outcomes = []
        for number in evenly(len(samples), self._samples):
            status, message = self._sample(_Trial(op, samples[number], case.direction, seed))
            if status is Status.FAILED:
                return status, f"sample {number}: {message}"[:_MESSAGE]
            outcomes.append((status, message))
        if not outcomes:
            return Status.NOT_APPLICABLE, "the database has no inputs"
        # One input that applies is enough to say that it passed.
        return min(outcomes, key=lambda outcome: outcome[0] is not Status.PASSED)

    def _sample(self, trial: _Trial) -> tuple[Status, str]:
        oracle = _Oracle(trial, _attempt(lambda: trial.eager(_HOST)), _HOST)
        if oracle.has_failed:
            if self._own != _HOST:
                oracle = _Oracle(trial, _attempt(lambda: trial.eager(self._own)), self._own)
            if oracle.has_failed:  # what PyTorch refuses says nothing
                return Status.NOT_APPLICABLE, f"eager on {oracle.device.type}: {oracle.reference.text}"[:300]
        ours = _attempt(lambda: self._ours(trial))
        if isinstance(ours, _NoGraph):
            return Status.NOT_APPLICABLE, "PyTorch traces no graph of it"
        difference = oracle.difference(ours)
        if difference and self._own != oracle.device:
            other = _Oracle(trial, _attempt(lambda: trial.eager(self._own)), self._own)
            if not other.has_failed and oracle.difference(other.reference):
                oracle, difference = other, other.difference(ours)
        if self._mode is Mode.DEVICE:
            return (Status.FAILED, difference) if difference else (Status.PASSED, oracle.remark)
        eager = _attempt(trial.run) if self._device != _HOST.type else ours
        difference = difference or _displaced(ours, eager)
        if not difference:
            return Status.PASSED, oracle.remark
        peer = _attempt(lambda: trial.run(wrap=_AOT_EAGER))
        theirs = "no graph" if isinstance(peer, _NoGraph) else oracle.difference(peer) or _displaced(peer, eager)
        if theirs:
            judged = f"aot_eager, {oracle.remark}" if oracle.remark else "aot_eager"
            return Status.NOT_APPLICABLE, f"{judged}: {theirs}"[:300]
        return Status.FAILED, difference

    def _ours(self, trial: _Trial) -> Any:
        return trial.run(wrap=functools.partial(_compiled, flagos)) if self._mode is Mode.COMPILE else trial.run()

    def probe(self) -> None:
        """Raises if the device computes no more."""
        (torch.ones(2, device=self._device) + 1).sum().item()


def _attempt(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except NoGraph:
        return _NoGraph()
    except Exception as error:  # whatever it raises is the result of the test
        return _Raised(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Oracle:
    """What eager PyTorch made of a trial, on ``device``."""

    trial: _Trial
    reference: Any
    device: torch.device

    @property
    def remark(self) -> str:
        """What is particular about a comparison with it."""
        return (
            "" if self.device == _HOST else f"judged by eager on {self.device.type}, since the CPU's is other or none"
        )

    @property
    def has_failed(self) -> bool:
        return isinstance(self.reference, _Raised)

    def difference(self, results: Any) -> str:
        if isinstance(results, _Raised):
            return results.text
        are_values_known = self.trial.op.name not in _UNINITIALIZED
        ours, reference = tree_map(_hosted, results), tree_map(_hosted, self.reference)
        return tensors.compare(ours, reference, self._truth, values=are_values_known, operands=self._operands)

    def _truth(self) -> Any:
        return tree_map(_hosted, self.trial.truth(self.device))

    def _operands(self) -> Any:
        sample = self.trial.sample
        return tree_map(_hosted, (sample.input, sample.args, sample.kwargs))


def _displaced(results: Any, eager: Any) -> str:
    """Which of the results are not on the device where eager leaves them. Where eager refuses what was computed, there
    is nothing to say."""
    if isinstance(eager, _Raised):
        return ""
    for number, (a, b) in enumerate(zip(tree_leaves(results), tree_leaves(eager), strict=True)):
        if isinstance(b, torch.Tensor) and a.device != b.device:
            return f"result {number} is on {a.device} instead of {b.device}"
    return ""


def _inner_device() -> torch.device:
    from flagos_backend.frontends.torch import autoload
    from flagos_backend.frontends.torch.device.runtime import runtime

    autoload.enable()  # beside another accelerator it is not there by itself

    return runtime().inner


_AOT_EAGER = functools.partial(_compiled, torch._dynamo.lookup_backend("aot_eager"))


if __name__ == "__main__":
    runner = _Runner(Mode(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    with tensors.exact_products():
        serve(runner, runner.probe)
