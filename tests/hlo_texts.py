"""Programs as HLO text, for instructions that JAX seldom or never emits: a name, the text and its argument specs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxlib import _hlo

from programs import make_argument


@dataclass(frozen=True)
class HloText:
    """``runs``: jaxlib's CPU client can run it (through StableHLO) on one device."""

    name: str
    body: str
    specs: tuple[str, ...] = ()
    runs: bool = True
    num_replicas: int = 1
    num_partitions: int = 1

    def hlo(self) -> bytes:
        module = _hlo.hlo_module_from_text(f"HloModule {self.name}\n{self.body}")
        return module.as_serialized_hlo_module_proto()

    def arguments(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        return tuple(make_argument(spec, rng) for spec in self.specs)


HLO_TEXTS: dict[str, HloText] = {}


def _text(name: str, body: str, *specs: str, runs: bool = True, replicas: int = 1, partitions: int = 1) -> None:
    HLO_TEXTS[name] = HloText(name, body, specs, runs, replicas, partitions)


_ADD = "add_f32 {\n x = f32[] parameter(0)\n y = f32[] parameter(1)\n ROOT sum = f32[] add(x, y)\n}\n"

for _opcode in ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh", "erf", "logistic", "tan", "cbrt"):
    _kind = ":positive" if _opcode == "acosh" else ":unit"
    _text(
        _opcode,
        f"ENTRY main {{\n x = f32[7] parameter(0)\n ROOT y = f32[7] {_opcode}(x)\n}}",
        f"f32[7]{_kind}",
        runs=_opcode in ("logistic", "tan", "cbrt", "erf"),
    )

_text(
    "erfc",
    'ENTRY main {\n x = f32[7] parameter(0)\n ROOT y = f32[7] custom-call(x), custom_call_target="flagos.erfc"\n}',
    "f32[7]",
    runs=False,
)
_text(
    "copysign",
    "ENTRY main {\n x = f32[7] parameter(0)\n y = f32[7] parameter(1)\n"
    ' ROOT z = f32[7] custom-call(x, y), custom_call_target="flagos.copysign"\n}',
    "f32[7]",
    "f32[7]",
    runs=False,
)
_text(
    "batch_norm_training",
    """ENTRY main {
 x = f32[4,3,2] parameter(0)
 s = f32[3] parameter(1)
 o = f32[3] parameter(2)
 ROOT y = (f32[4,3,2], f32[3], f32[3]) batch-norm-training(x, s, o), epsilon=0.001, feature_index=1
}""",
    *("f32[4,3,2]", "f32[3]", "f32[3]"),
)
_text(
    "batch_norm_inference",
    """ENTRY main {
 x = f32[4,3] parameter(0)
 s = f32[3] parameter(1)
 o = f32[3] parameter(2)
 m = f32[3] parameter(3)
 v = f32[3] parameter(4)
 ROOT y = f32[4,3] batch-norm-inference(x, s, o, m, v), epsilon=0.01, feature_index=1
}""",
    *("f32[4,3]", "f32[3]", "f32[3]", "f32[3]", "f32[3]:positive"),
)
_text(
    "batch_norm_grad",
    """ENTRY main {
 x = f32[4,3] parameter(0)
 s = f32[3] parameter(1)
 m = f32[3] parameter(2)
 v = f32[3] parameter(3)
 g = f32[4,3] parameter(4)
 ROOT y = (f32[4,3], f32[3], f32[3]) batch-norm-grad(x, s, m, v, g), epsilon=0.01, feature_index=1
}""",
    *("f32[4,3]", "f32[3]", "f32[3]", "f32[3]:positive", "f32[4,3]"),
)
_text(
    "map",
    """multiply_add {
 a = f32[] parameter(0)
 b = f32[] parameter(1)
 c = f32[] multiply(a, b)
 ROOT d = f32[] add(c, a)
}
ENTRY main {
 x = f32[3,4] parameter(0)
 y = f32[3,4] parameter(1)
 ROOT z = f32[3,4] map(x, y), dimensions={0,1}, to_apply=multiply_add
}""",
    *("f32[3,4]", "f32[3,4]"),
)
_text(
    "rng_uniform_integer",
    """ENTRY main {
 low = s32[] constant(2)
 high = s32[] constant(9)
 ROOT y = s32[50] rng(low, high), distribution=rng_uniform
}""",
    runs=False,
)
_text(
    "stochastic_convert",
    """ENTRY main {
 x = f32[8] parameter(0)
 r = u32[8] parameter(1)
 ROOT y = bf16[8] stochastic-convert(x, r)
}""",
    *("f32[8]", "u32[8]"),
    runs=False,
)
_text(
    "tokens",
    """ENTRY main {
 x = f32[3] parameter(0)
 t = token[] after-all()
 u = token[] after-all(t, t)
 y = f32[3] add-dependency(x, u)
 ROOT z = f32[3] negate(y)
}""",
    "f32[3]",
)
_text(
    "get_dimension_size",
    """ENTRY main {
 x = f32[3,5] parameter(0)
 ROOT n = s32[] get-dimension-size(x), dimensions={1}
}""",
    "f32[3,5]",
)
_text(
    "replica_and_partition_id",
    """ENTRY main {
 r = u32[] replica-id()
 p = u32[] partition-id()
 ROOT t = (u32[], u32[]) tuple(r, p)
}""",
)
_text(
    "copy_and_bitcast",
    """ENTRY main {
 x = f32[2,3] parameter(0)
 c = f32[2,3] copy(x)
 flat = f32[6] bitcast(c)
 ROOT bits = s32[6] bitcast(flat)
}""",
    "f32[2,3]",
    runs=False,
)
_text(
    "fusion",
    """fused {
 a = f32[4] parameter(0)
 b = f32[4] parameter(1)
 ROOT c = f32[4] multiply(a, b)
}
ENTRY main {
 x = f32[4] parameter(0)
 ROOT y = f32[4] fusion(x, x), kind=kLoop, calls=fused
}""",
    "f32[4]",
)
_text(
    "tuple_constant",
    """ENTRY main {
 t = (f32[], (s32[2], pred[])) constant((1.5, ({2, -3}, true)))
 ROOT n = (s32[2], pred[]) get-tuple-element(t), index=1
}""",
    runs=False,
)
_text(
    "column_major_constant",
    """ENTRY main {
 ROOT c = s32[2,3]{0,1} constant({{1, 2, 3}, {4, 5, 6}})
}""",
)
_text(
    "nested_tuples_through_while",
    """condition {
 p = (s32[], (f32[2], f32[2])) parameter(0)
 i = s32[] get-tuple-element(p), index=0
 n = s32[] constant(5)
 ROOT lt = pred[] compare(i, n), direction=LT
}
body {
 p = (s32[], (f32[2], f32[2])) parameter(0)
 i = s32[] get-tuple-element(p), index=0
 one = s32[] constant(1)
 j = s32[] add(i, one)
 v = (f32[2], f32[2]) get-tuple-element(p), index=1
 a = f32[2] get-tuple-element(v), index=0
 b = f32[2] get-tuple-element(v), index=1
 w = (f32[2], f32[2]) tuple(b, a)
 ROOT r = (s32[], (f32[2], f32[2])) tuple(j, w)
}
ENTRY main {
 zero = s32[] constant(0)
 x = f32[2] parameter(0)
 y = f32[2] parameter(1)
 v = (f32[2], f32[2]) tuple(x, y)
 init = (s32[], (f32[2], f32[2])) tuple(zero, v)
 loop = (s32[], (f32[2], f32[2])) while(init), condition=condition, body=body
 out = (f32[2], f32[2]) get-tuple-element(loop), index=1
 ROOT first = f32[2] get-tuple-element(out), index=0
}""",
    *("f32[2]", "f32[2]"),
)
_text(
    "convolution_reversed_window",
    """ENTRY main {
 x = f32[1,6,2] parameter(0)
 k = f32[3,2,2] parameter(1)
 ROOT y = f32[1,6,2] convolution(x, k), window={size=3 pad=1_1 rhs_reversal=1}, dim_labels=b0f_0io->b0f
}""",
    *("f32[1,6,2]", "f32[3,2,2]"),
)
_text(
    "custom_call_with_everything",
    """ENTRY main {
 x = f32[2,3]{0,1} parameter(0)
 y = s32[4] parameter(1)
 ROOT c = (f32[2,3]{0,1}, s32[4]{0}) custom-call(x, y), custom_call_target="my.target",
   operand_layout_constraints={f32[2,3]{0,1}, s32[4]{0}}, custom_call_has_side_effect=true,
   output_to_operand_aliasing={{1}: (1, {})}, api_version=API_VERSION_TYPED_FFI, backend_config={"k": 1}
}""".replace("x = f32[2,3]{0,1} parameter", "x = f32[2,3] parameter"),
    *("f32[2,3]", "s32[4]"),
    runs=False,
)
_COLLECTIVES = {
    "all_reduce": "f32[4,2] all-reduce(x), replica_groups={{0,1},{2,3}}, to_apply=add_f32",
    "all_reduce_global_ids": "f32[4,2] all-reduce(x), channel_id=1, replica_groups={{0,2},{1,3}}, "
    "use_global_device_ids=true, to_apply=add_f32",
    "all_reduce_variadic": "(f32[4,2], f32[4,2]) all-reduce(x, x), replica_groups={}, to_apply=add_f32",
    "all_reduce_iota_groups": "f32[4,2] all-reduce(x), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), "
    "use_global_device_ids=true, to_apply=add_f32",
    "all_gather": "f32[8,2] all-gather(x), replica_groups={{0,1},{2,3}}, dimensions={0}",
    "reduce_scatter": "f32[2,2] reduce-scatter(x), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=add_f32",
    "all_to_all": "f32[4,2] all-to-all(x), replica_groups={{0,1},{2,3}}, dimensions={0}",
    "all_to_all_tuple": "(f32[4,2], f32[4,2]) all-to-all(x, x), replica_groups={{0,1},{2,3}}",
    "collective_permute": "f32[4,2] collective-permute(x), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3}}",
    "collective_broadcast": "f32[4,2] collective-broadcast(x), replica_groups={{0,1},{2,3}}",
}
for _name, _line in _COLLECTIVES.items():
    _text(
        _name,
        f"{_ADD}ENTRY main {{\n x = f32[4,2] parameter(0)\n ROOT y = {_line}\n}}",
        "f32[4,2]",
        runs=False,
        replicas=4,
    )
_text(
    "ragged_all_to_all",
    """ENTRY main {
 x = f32[8] parameter(0)
 out = f32[8] parameter(1)
 a = s32[2] parameter(2)
 b = s32[2] parameter(3)
 c = s32[2] parameter(4)
 d = s32[2] parameter(5)
 ROOT y = f32[8] ragged-all-to-all(x, out, a, b, c, d), replica_groups={{0,1}}
}""",
    *("f32[8]", "f32[8]", "s32[2]", "s32[2]", "s32[2]", "s32[2]"),
    runs=False,
    replicas=2,
)
_text(
    "ragged_dot_modes",
    """ENTRY main {
 x = f32[11,5] parameter(0)
 y = f32[3,5,7] parameter(1)
 z = f32[11,7] parameter(2)
 g = s32[3] constant({4, 5, 2})
 a = f32[11,7] ragged-dot(x, y, g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0},
   rhs_group_dims={0}
 b = f32[3,5,7] ragged-dot(x, z, g), lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}
 ROOT t = (f32[11,7], f32[3,5,7]) tuple(a, b)
}""",
    *("f32[11,5]", "f32[3,5,7]", "f32[11,7]"),
    runs=False,
)
_text(
    "top_k_smallest",
    """ENTRY main {
 x = f32[2,6] parameter(0)
 ROOT y = (f32[2,3], s32[2,3]) topk(x), k=3, largest=false
}""",
    "f32[2,6]",
    runs=False,
)

_text(
    "multiply_high",
    "ENTRY main {\n x = s32[4] parameter(0)\n y = s32[4] parameter(1)\n ROOT z = s32[4] mulhi(x, y)\n}",
    "s32[4]",
    "s32[4]",
    runs=False,
)
