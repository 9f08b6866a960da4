"""Schemas of operators as plans of native kernels."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.torch.device.plan import (
    AS_IS,
    FRESH,
    KernelFlag,
    name_of,
    overload,
    plan_kernel,
    returns_view,
)


@pytest.mark.parametrize("name", ["aten::add.Tensor", "aten::mm", "aten::max.dim_max"])
def test_names_of_the_dispatcher(name: str) -> None:
    assert name_of(overload(name)) == name


def test_a_function() -> None:
    plan = plan_kernel(torch.ops.aten.addmm.default)
    assert (plan.tensor_positions, plan.written, plan.returns) == (0b111, (), (FRESH,))
    assert plan.flags is KernelFlag.NONE


def test_a_method_in_place_returns_its_argument() -> None:
    plan = plan_kernel(torch.ops.aten.add_.Tensor)
    assert (plan.written, plan.returns, plan.flags) == (((0, "self"),), (0,), KernelFlag.NONE)


def test_outputs_may_be_resized_and_are_returned_in_order() -> None:
    plan = plan_kernel(torch.ops.aten.max.dim_max)
    assert (plan.written, plan.returns) == (((-1, "max"), (-1, "max_values")), (0, 1))
    assert plan.flags is KernelFlag.RESIZES


def test_lists_are_written_and_not_returned() -> None:
    plan = plan_kernel(torch.ops.aten._foreach_add_.List)
    assert (plan.written, plan.returns) == (((0, "self"),), ())


def test_the_generator_is_found() -> None:
    assert plan_kernel(torch.ops.aten.normal_.default).generator == (-1, "generator")
    plan = plan_kernel(torch.ops.aten.rrelu_with_noise.default)
    assert (plan.generator, plan.flags) == ((5, "generator"), KernelFlag.RANDOM)


def test_results_may_stay_where_they_are() -> None:
    plan = plan_kernel(torch.ops.aten._pack_padded_sequence.default, as_is=frozenset({1}))
    assert plan.returns == (FRESH, AS_IS)


@pytest.mark.parametrize(("name", "elsewhere"), [("aten::add.Tensor", False), ("aten::remainder.Tensor", True)])
def test_numbers_in_the_place_of_tensors(name: str, elsewhere: bool) -> None:
    assert plan_kernel(overload(name)).numbers_elsewhere is elsewhere


def test_views() -> None:
    assert returns_view(torch.ops.aten.view.default) and returns_view(torch.ops.aten.split.Tensor)
    assert not returns_view(torch.ops.aten.add_.Tensor) and not returns_view(torch.ops.aten.clone.default)
