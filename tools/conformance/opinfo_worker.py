"""Worker of the OpInfo suite: runs each case on flagos and on the CPU eagerly, and compares. Started by opinfo.py."""

from __future__ import annotations

import functools
import itertools
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

from tools.conformance import tensors
from tools.conformance.opinfo import Case, Direction, Mode
from tools.conformance.results import Status
from tools.conformance.worker import serve

# What they return is whatever was in the memory: sizes and types are all there is to compare.
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_UNINITIALIZED = frozenset((*_EMPTY, "resize_", "resize_as_"))
_MESSAGE = 1500

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

    def on_host(self) -> Any:
        """The reference."""
        return self.run(place=_on_host)

    def truth(self) -> Any:
        """The reference in wide types."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.run(place=lambda value: _widened(_on_host(value)))
        finally:
            torch.set_default_dtype(default)


def _fresh(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return tensors.WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in tensors.WIDER:
        return value.detach().to(tensors.WIDER[value.dtype]).requires_grad_(value.requires_grad)
    return value


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved_to_host(value).requires_grad_(value.requires_grad)
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("flagos"))
    return torch.device("cpu") if is_device else value


def _moved_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """With the memory around it, where operators that take strides may look."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.cpu()
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0).cpu().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _compiled(backend: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` through torch.compile. Raises NoGraph where nothing of it was compiled."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

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
    def __init__(self, mode: Mode, samples: int) -> None:
        self._mode, self._samples = mode, samples
        self._operators = {op.full_name: op for op in op_db}

    def __call__(self, name: str) -> tuple[Status, str]:
        case = Case.parse(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._run(case, self._operators[case.operator], zlib.crc32(name.encode()))

    def _run(self, case: Case, op: OpInfo, seed: int) -> tuple[Status, str]:
        torch.manual_seed(seed)
        backward = case.direction is Direction.BACKWARD
        # Made on the device, they say themselves which of their tensors belong there.
        device = "cpu" if self._mode is Mode.COMPILE else "flagos"
        try:
            samples = list(op.sample_inputs(device, getattr(torch, case.dtype), requires_grad=backward))
        except Exception as error:
            return Status.FAILED, f"the samples on {device}: {type(error).__name__}: {error}"[:_MESSAGE]
        outcomes = []
        for number in _spread(len(samples), self._samples):
            status, message = self._sample(_Trial(op, samples[number], case.direction, seed))
            if status is Status.FAILED:
                return status, f"sample {number}: {message}"[:_MESSAGE]
            outcomes.append((status, message))
        if not outcomes:
            return Status.NOT_APPLICABLE, "the database has no inputs"
        # One input that applies is enough to say that it passed.
        return min(outcomes, key=lambda outcome: outcome[0] is not Status.PASSED)

    def _sample(self, trial: _Trial) -> tuple[Status, str]:
        try:
            reference = trial.on_host()
        except Exception as error:  # whatever it refuses, it refuses it on the CPU too
            return Status.NOT_APPLICABLE, f"eager: {type(error).__name__}: {error}"[:300]
        difference = self._difference(trial, reference, self._ours)
        if difference is None:
            return Status.NOT_APPLICABLE, "PyTorch traces no graph of it"
        if not difference:
            return Status.PASSED, ""
        if self._mode is Mode.COMPILE:
            peer = self._difference(trial, reference, functools.partial(_Trial.run, wrap=_AOT_EAGER))
            if peer is None or peer:
                return Status.NOT_APPLICABLE, f"aot_eager: {peer or 'no graph'}"[:300]
        return Status.FAILED, difference

    def _ours(self, trial: _Trial) -> Any:
        if self._mode is Mode.COMPILE:
            return trial.run(wrap=functools.partial(_compiled, "flagos"))
        return tree_map(_on_host, trial.run())

    def _difference(self, trial: _Trial, reference: Any, run: Callable[[_Trial], Any]) -> str | None:
        """None where there was no graph."""
        try:
            ours = run(trial)
        except NoGraph:
            return None
        except Exception as error:  # whatever it raises is the result of the test
            return f"{type(error).__name__}: {error}"
        return tensors.compare(ours, reference, trial.truth, values=trial.op.name not in _UNINITIALIZED)


_AOT_EAGER = functools.partial(_compiled, "aot_eager")


def _spread(count: int, wanted: int) -> list[int]:
    """Up to ``wanted`` of the numbers below ``count``, evenly spread, the first among them."""
    step = max(count / wanted, 1)
    return [int(number * step) for number in itertools.takewhile(lambda n: n * step < count, range(wanted))]


if __name__ == "__main__":
    serve(_Runner(Mode(sys.argv[1]), int(sys.argv[2])))
