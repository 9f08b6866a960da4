"""Programs that an accelerator replays: straight, with a loop, with known trip counts."""

from __future__ import annotations

# A fused region with two results, a library call, and a concatenation that two regions fill.
PROGRAM = """
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT sum = f32[] add(a, b) }
ENTRY main {
  x = f32[8,16] parameter(0)
  y = f32[16,8] parameter(1)
  zero = f32[] constant(0)
  exp = f32[8,16] exponential(x)
  product = f32[8,8] dot(exp, y), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    operand_precision={highest,highest}
  sums = f32[8] reduce(product, zero), dimensions={1}, to_apply=add
  spread = f32[8,8] broadcast(sums), dimensions={0}
  part = f32[8,8] divide(product, spread)
  ROOT joined = f32[8,24] concatenate(part, exp), dimensions={1}
}"""
LOOP = """
body {
  state = (s32[], f32[5]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[5] get-tuple-element(state), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  two = f32[] constant(2)
  twos = f32[5] broadcast(two), dimensions={}
  doubled = f32[5] multiply(x, twos)
  ROOT result = (s32[], f32[5]) tuple(next, doubled)
}
condition {
  state = (s32[], f32[5]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  LIMIT
  ROOT more = pred[] compare(i, limit), direction=LT
}
ENTRY main {
  x = f32[5] parameter(0)
  zero = s32[] constant(0)
  state = (s32[], f32[5]) tuple(zero, x)
  final = (s32[], f32[5]) while(state), condition=condition, body=body
  ROOT y = f32[5] get-tuple-element(final), index=1
}"""
KNOWN = "limit = s32[] constant(7)"
