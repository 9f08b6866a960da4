"""Constants and iotas that a loop only carries are computed in its body; everything else stays in its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import leaves
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.attention.sink_invariants import sink_invariants
from programs import hlo_bytes
from support.against_xla import from_storage, hlo_of_text, run_on_backend, to_storage
from support.passes import simplified

N = 5


def sunk(hlo):
    before = simplified(import_module(hlo))
    after = sink_invariants(before)
    verify(after)
    return before, after


def state_bytes(module):
    loops = [i for c in module.computations() for i in c.instructions if i.opcode is Opcode.WHILE]
    return sum(leaf.num_bytes for loop in loops for leaf in leaves(loop.shape))


def run(module, args):
    tensors = [to_storage(a, p.shape) for a, p in zip(args, module.entry.parameters, strict=True)]
    plan = build_plan(module.entry)
    return [from_storage(t, s) for t, s in zip(plan.run(Run(), tensors), plan.result_shapes, strict=True)]


def masked(x):
    """The mask is known before the loop, so JAX's differentiation hoists it out of the loop's body."""

    def step(x, _):
        mask = jnp.arange(N)[:, None] >= jnp.arange(N)[None, :]
        return jnp.where(mask, x @ x, -1.0), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, None, length=3)[0])


def test_a_mask_is_computed_in_the_body(rng):
    x = rng.standard_normal((N, N)).astype(np.float32) / 3
    hlo = hlo_bytes(jax.grad(masked), x)
    before, after = sunk(hlo)
    assert state_bytes(after) < state_bytes(before)
    np.testing.assert_array_equal(run(after, [x])[0], run(before, [x])[0])
    np.testing.assert_array_equal(run(after, [x])[0], run_on_backend(hlo, [x])[0])


LOOP = """
condition {{
  s = (s32[], f32[4], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  {condition}
}}
body {{
  s = (s32[], f32[4], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[4] get-tuple-element(s), index=1
  c = f32[4] get-tuple-element(s), index=2
  sum = f32[4] add(x, c)
  ROOT r = (s32[], f32[4], f32[4]) tuple(next, sum, {carried})
}}
ENTRY e {{
  x = f32[4] parameter(0)
  zero = s32[] constant(0)
  c = f32[4] {initial}
  t = (s32[], f32[4], f32[4]) tuple(zero, x, c)
  w = (s32[], f32[4], f32[4]) while(t), condition=condition, body=body
  a = f32[4] get-tuple-element(w), index=1
  b = f32[4] get-tuple-element(w), index=2
  ROOT r = (f32[4], f32[4]) tuple(a, b)
}}"""
COUNTS = "three = s32[] constant(3)\n  ROOT p = pred[] compare(i, three), direction=LT"
READS = """c = f32[4] get-tuple-element(s), index=2
  first = f32[1] slice(c), slice={[0:1]}
  f = f32[] reshape(first)
  three = f32[] constant(3)
  k = s32[] constant(3)
  p = pred[] compare(i, k), direction=LT
  q = pred[] compare(f, three), direction=LT
  ROOT both = pred[] and(p, q)"""


def loop(condition=COUNTS, carried="c", initial="constant({1, 2, 3, 4})"):
    return hlo_of_text(LOOP.format(condition=condition, carried=carried, initial=initial))


def test_the_value_after_the_loop_is_the_one_before_it(rng):
    x = rng.standard_normal(4).astype(np.float32)
    before, after = sunk(loop())
    assert state_bytes(after) < state_bytes(before)
    for ours, theirs in zip(run(after, [x]), run(before, [x]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "hlo",
    [
        loop(initial="add(x, x)"),
        loop(carried="sum"),
        loop(carried="x"),
        loop(condition=READS),
    ],
    ids=["not constant", "changes", "trades places", "the condition reads it"],
)
def test_other_state_stays(hlo, rng):
    before, after = sunk(hlo)
    assert state_bytes(after) == state_bytes(before)
    assert after is before
