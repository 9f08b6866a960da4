"""What the tests of passes/match share: programs before and after the match, run on the reference kernels, and how
close they are to the truth."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.pass_manager import PipelineResult
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, from_storage, to_storage
from support.passes import SIMULATED, matched_attention, run_until

TOKENS = 24  # queries, and keys; no other array has two dimensions of that


def matched(function, *args) -> tuple[Module, PipelineResult]:
    """The program as the matching of attention gets it, and what it makes of it."""
    module = run_until("unhoist_masks", import_module(hlo_bytes(function, *args)), SIMULATED)
    return module, matched_attention(module)


def targets(module: Module) -> list[str]:
    instructions = [i for c in module.computations() for i in c.instructions]
    return [i.attributes.target for i in instructions if isinstance(i.attributes, CustomCallAttributes)]


def weights_like(module: Module) -> list[str]:
    """Float arrays over queries and keys."""
    return [
        str(instruction.shape)
        for computation in module.computations()
        for instruction in computation.instructions
        for leaf in leaves(instruction.shape)
        if leaf.dims.count(TOKENS) == 2 and leaf.element_type.is_float
    ]


def run(module: Module, args) -> list[np.ndarray]:
    tensors = [to_storage(np.asarray(a), p.shape) for a, p in zip(args, module.entry.parameters, strict=True)]
    plan = build_plan(module.entry)
    return [from_storage(t, s) for t, s in zip(plan.run(Run(), tensors), plan.result_shapes, strict=True)]


def check(function, *args, calls, tolerance, biased=False) -> None:
    """The call computes what stock XLA computes of the function as it was written."""
    _, result = matched(function, *args)
    assert targets(result.module) == calls, result.notes
    assert biased or not weights_like(result.module)
    assert len(result.notes) == sum(call is FORWARD for call in calls)
    for ours, theirs in zip(run(result.module, args), run_on_xla(hlo_bytes(function, *args), args), strict=True):
        assert_same(ours, theirs, tolerance)


def gradient(function, arguments=(0, 1, 2)):
    """The function's result, and the gradients of a sum that is made of it: of thousands of both signs, which is right
    to its last digits by chance."""

    def loss(*args):
        out = function(*args).astype(jnp.float32)
        return jnp.sum(out * jnp.cos(out)), out

    def differentiated(*args):
        gradients, out = jax.grad(loss, argnums=arguments, has_aux=True)(*args)
        return out, gradients

    return differentiated


def exact(function, args) -> list[np.ndarray]:
    """In float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(a).astype(np.float64) for a in args]
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*wide))]


def errors(ours, true, least: Sequence[float] = ()) -> list[float]:
    """Relative to the greatest magnitude of each array, to one, or to ``least`` of it, whichever is the greatest."""
    least = least[: len(true)]
    scales = [max(1.0, float(np.abs(y).max()), size) for y, size in zip_longest(true, least, fillvalue=0.0)]
    return [
        float(np.abs(x.astype(np.float64) - y).max()) / scale for x, y, scale in zip(ours, true, scales, strict=True)
    ]


def root_mean_square_error(ours, true) -> float:
    """Relative to the greatest magnitude, or to one if that is greater."""
    scale = max(1.0, float(np.abs(true).max()))
    return float(np.sqrt(np.mean((ours.astype(np.float64) - true) ** 2))) / scale


def assert_as_close(ours, program, true) -> None:
    """In half types programs round weights and products where the calls do not. Which element is furthest off, and how
    far, is chance: the greatest errors are compared loosely, those of all elements together closely."""
    for x, y, z in zip(ours, program, true, strict=True):
        eps = float(jnp.finfo(x.dtype).eps)
        (greatest,), (before,) = errors([x], [z]), errors([y], [z])
        assert greatest <= 3 * before + 3 * eps
        chance = 4 / math.sqrt(z.size)  # a gradient of four sinks says less than one of all queries
        close = (1.25 + chance) * root_mean_square_error(y, z) + (0.125 + chance / 2) * eps
        assert root_mean_square_error(x, z) <= close


def assert_as_close_as_the_program(function, args, module: Module, result: PipelineResult) -> None:
    """Called, forward and backward, and as right as what was written."""
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), exact(function, args))


def assert_near_miss(function, args, reason: str) -> None:
    """The program stays as it is, and one note says why."""
    module, result = matched(function, *args)
    assert result.module is module
    assert len(result.notes) == 1
    assert re.search(reason, result.notes[0]), result.notes
