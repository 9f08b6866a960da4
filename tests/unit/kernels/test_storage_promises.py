"""Every kernel of the corpus keeps its word: it writes over no operand, and its results lie where it was registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage
from programs import PROGRAMS
from support.against_xla import to_storage


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
    else:
        for element in value:
            yield from tensors(element)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def watched(instruction: Instruction, kernel: Kernel) -> Kernel:
    """``kernel`` with its promises checked at each call."""
    kind = registry.storage_of(instruction)

    def call(run: Run, *operands: Any) -> Any:
        before = [(t, t._version) for t in tensors(operands)]
        result = kernel(run, *operands)
        assert all(t._version == version for t, version in before), f"{instruction} wrote over an operand"
        if kind is Storage.FRESH:
            places = [t.untyped_storage().data_ptr() for t in tensors(result)]
            taken = {t.untyped_storage().data_ptr() for t, _ in before}
            assert taken.isdisjoint(places), f"{instruction} is not fresh"
            assert len(set(places)) == len(places), f"{instruction}: two results share storage"
        if kind is Storage.FRESH or (kind is Storage.VIEW and not any(overlaps_itself(t) for t, _ in before)):
            assert not any(overlaps_itself(t) for t in tensors(result)), f"{instruction} overlaps itself"
        return result

    return call


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = registry.prepare

    def prepare_watched(instruction: Instruction) -> Kernel:
        kernel = prepare(instruction)
        return kernel if kernel is registry.identity else watched(instruction, kernel)

    monkeypatch.setattr(registry, "prepare", prepare_watched)
    program = PROGRAMS[name]
    module = import_module(program.hlo())
    plan = build_plan(module.entry)
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    with torch.no_grad():
        arguments = [to_storage(np.asarray(a), s) for a, s in zip(program.arguments(), shapes, strict=True)]
        results = plan.run(Run(), arguments)
    assert len(results) == len(plan.result_shapes)


def test_the_watch_sees_a_kernel_that_writes_over_its_operand() -> None:
    negate = next(i for i in import_module(PROGRAMS["unary_neg_f32"].hlo()).entry.instructions if i.opcode == "negate")
    with pytest.raises(AssertionError, match="wrote over an operand"):
        watched(negate, lambda run, x: x.neg_())(Run(), torch.ones(3))
    with pytest.raises(AssertionError, match="not fresh"):
        watched(negate, lambda run, x: x.view(3))(Run(), torch.ones(3))
