"""Replays without a device: a plan is run again where its graph would be launched, and what it allocated is filled with
garbage before and afterwards, as the memory of a graph's own is by whatever is launched next."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.accelerator.capture import run_into
from flagos_backend.runtime.plan import Plan

_GARBAGE = 0xA5


class _Allocations(TorchDispatchMode):
    """The storages that operators allocate, by address; each stays, so that no two have the same. A tensor may be given
    another storage later, and so says little."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, torch.UntypedStorage] = {}
        self.made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.made:
                self._before[storage._cdata] = storage
        outcome = operator(*args, **(kwargs or {}))
        for storage in _storages(outcome):
            if storage._cdata not in self._before:
                self.made[storage._cdata] = storage
        return outcome


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class PoisonedReplay:
    """Launches one after another, as a stream does, from whichever thread."""

    _stream = threading.RLock()

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run
        shapes = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
        with torch.inference_mode():
            self.overwritten = run_into(plan, run, [_zeros(shape) for shape in shapes])

    def launch(self, arrays: Sequence[Any]) -> None:
        count = len(self._plan.parameters)
        with self._stream:
            self._check(arrays)
            for output, argument in zip(arrays[count:], self.overwritten, strict=True):
                if argument < 0 and isinstance(output, torch.Tensor):
                    output.untyped_storage().fill_(_GARBAGE)
            with _Allocations() as allocations:
                results = self._plan.run(self._run, list(arrays[:count]), arrays[count:])
                for result, output, argument in zip(results, arrays[count:], self.overwritten, strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != output.data_ptr():
                        # A copy was recorded, wherever the arrays lie this time: several may be one.
                        assert argument < 0
                        output.copy_(result)
            outside = {storage._cdata for storage in _storages(list(arrays))}
            for address, storage in allocations.made.items():
                assert address not in outside
                storage.fill_(_GARBAGE)

    def _check(self, arrays: Sequence[Any]) -> None:
        """Arrays are as they were when they were recorded: of these shapes, row major, aligned."""
        shapes = (*self._plan.shapes_of(self._plan.parameters), *self._plan.result_shapes)
        for array, shape in zip(arrays, shapes, strict=True):
            if shape.element_type is ElementType.TOKEN:
                assert array == ()
                continue
            assert array.dtype == dtype_of(shape.element_type) and tuple(array.shape) == shape.dims
            assert array.is_contiguous()

    def __str__(self) -> str:
        return "a poisoned replay"


def breaking_anywhere(seed: int, record: Callable[[Plan], PoisonedReplay]) -> Callable[[Plan], PoisonedReplay]:
    """``record``, but that it breaks in any step, or without saying where, so that plans are divided anywhere."""
    choices = random.Random(seed)

    def attempt(plan: Plan) -> PoisonedReplay:
        if len(plan.steps) > 1 and choices.random() < 0.6:
            refusal = CaptureRefused(reason="at random")
            refusal.step = choices.choice([None, choices.randrange(len(plan.steps))])
            raise refusal
        return record(plan)

    return attempt


def _zeros(shape: ArrayShape) -> Any:
    if shape.element_type is ElementType.TOKEN:
        return ()
    return torch.zeros(shape.dims, dtype=dtype_of(shape.element_type))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, note: str) -> None:
    """Equal, but that the functions of a processor round a view otherwise than the dense copy that a replay takes."""
    tolerance = 1e-2 if ours.dtype.itemsize <= 2 else 1e-5
    exact = not (ours.is_floating_point() or ours.is_complex())
    torch.testing.assert_close(
        ours, theirs, rtol=0 if exact else tolerance, atol=0, equal_nan=True, msg=lambda text: f"{note}\n{text}"
    )
