"""Serialized programs: the random ones of the fuzzer, some of instructions that those have not, and both changed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Final

from flagos_backend.importer import schema
from flagos_backend.importer.export import export_module
from flagos_backend.kernels.reference.custom_calls import known_targets
from tools.fuzz.hostile.messages import change_message
from tools.fuzz.hostile.mutations import changed_bytes
from tools.fuzz.program import random_program

ADD: Final = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }\n"


def _quoted(config: object) -> str:
    return json.dumps(json.dumps(config))


def _call(target: str, result: str, config: dict[str, object], operand: str = "f32[2,3]") -> str:
    if target.startswith("aten"):
        config = {**config, "results": None}
    call = f'custom-call(x), custom_call_target="{target}", backend_config={_quoted(config)}'
    return f"ENTRY e {{ x = {operand} parameter(0) ROOT y = {result} {call} }}"


#: What random_program has not.
_TEXTS: Final = (
    ADD
    + "ENTRY e { x = f32[4,5] parameter(0) z = f32[] constant(0) "
    + "ROOT y = f32[3,9] reduce-window(x, z), window={size=2x1 stride=1x1 pad=0_0x0_0 lhs_dilate=1x2}, to_apply=add }",
    ADD
    + "ge { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=GE }\n"
    + "ENTRY e { x = f32[4,6] parameter(0) s = f32[2,3] parameter(1) z = f32[] constant(0) "
    + "ROOT y = f32[4,6] select-and-scatter(x, s, z), window={size=2x2 stride=2x2}, select=ge, scatter=add }",
    "ENTRY e { x = f32[2,5,5,3] parameter(0) k = f32[3,3,3,4] parameter(1) "
    + "ROOT y = f32[2,3,3,4] convolution(x, k), window={size=3x3 rhs_dilate=1x1}, dim_labels=b01f_01io->b01f }",
    "ENTRY e { x = f32[3,3] parameter(0) c = f32[3,3] cholesky(x), lower=true "
    + "ROOT y = f32[3,3] triangular-solve(c, x), left_side=true, lower=true, transpose_a=NO_TRANSPOSE }",
    "ENTRY e { x = f32[2,8] parameter(0) f = c64[2,5] fft(x), fft_type=RFFT, fft_length={8} "
    + "ROOT y = f32[2,8] fft(f), fft_type=IRFFT, fft_length={8} }",
    ADD + "ENTRY e { x = f32[4] parameter(0) ROOT y = f32[4] all-reduce(x), replica_groups={}, to_apply=add }",
    "ENTRY e { x = f32[4] parameter(0) g = f32[4] all-gather(x), dimensions={0}, replica_groups={{0}} "
    + "ROOT y = f32[4] collective-permute(g), source_target_pairs={{0,0}} }",
    "ENTRY e { x = f32[4,3,2] parameter(0) s = f32[3] parameter(1) "
    + "ROOT y = (f32[4,3,2], f32[3], f32[3]) batch-norm-training(x, s, s), epsilon=0.001, feature_index=1 }",
    "lt { a = f32[] parameter(0) b = f32[] parameter(1) c = s32[] parameter(2) d = s32[] parameter(3) "
    + "ROOT e = pred[] compare(a, b), direction=LT }\n"
    + "ENTRY e { x = f32[3,7] parameter(0) i = s32[3,7] iota(), iota_dimension=1 "
    + "ROOT y = (f32[3,7], s32[3,7]) sort(x, i), dimensions={1}, to_apply=lt }",
    "ENTRY e { s = u64[2] parameter(0) " + "ROOT y = (u64[2], u32[5]) rng-bit-generator(s), algorithm=rng_three_fry }",
    'ENTRY e { x = f32[2,6] parameter(0) ROOT y = (f32[2,3], s32[2,3]) custom-call(x), custom_call_target="TopK", '
    + "called_computations={} }",
    'ENTRY e { x = f32[6] parameter(0) ROOT y = f32[6] custom-call(x), custom_call_target="Sharding", '
    + 'sharding={replicated}, backend_config="{}" }',
    "c { p = (s32[], f32[3]) parameter(0) i = s32[] get-tuple-element(p), index=0 n = s32[] constant(5) "
    + "ROOT r = pred[] compare(i, n), direction=LT }\n"
    + "b { p = (s32[], f32[3]) parameter(0) i = s32[] get-tuple-element(p), index=0 o = s32[] constant(1) "
    + "j = s32[] add(i, o) x = f32[3] get-tuple-element(p), index=1 y = f32[3] sine(x) "
    + "ROOT r = (s32[], f32[3]) tuple(j, y) }\n"
    + "ENTRY e { z = s32[] constant(0) x = f32[3] parameter(0) t = (s32[], f32[3]) tuple(z, x) "
    + 'ROOT w = (s32[], f32[3]) while(t), condition=c, body=b, backend_config={"known_trip_count":{"n":"5"}} }',
    _call("aten::add.Tensor", "f32[2,3]", {"arguments": [{"tensor": 0}, {"tensor": 0}], "keywords": {"alpha": 2}}),
    _call("aten::sum.dim_IntList", "f32[2]", {"arguments": [{"tensor": 0}, [1]], "keywords": {"dtype": None}}),
    _call("flagos.strided_view", "f32[3,2]", {"strides": [4, 2], "offset": 1}, "f32[12]"),
    "ENTRY e { q = f32[1,2,4,8] parameter(0) "
    + 'ROOT y = f32[1,2,4,8] custom-call(q, q, q), custom_call_target="flagos.attention", backend_config='
    + _quoted({"query": "bhtd", "key": "bhsd", "value": "bhse", "output": "bhte", "upper": 0, "scale": 0.5})
    + " }",
)
_RANDOM: Final = 48


def wrapped(module: bytes) -> bytes:
    """A serialized flagos.Program around a serialized module."""
    program = schema.Program(schema_version=1, producer="tools.fuzz")
    program.module.MergeFromString(module)
    program.module.ClearField("id")  # counts the modules of the process that made it
    return bytes(program.SerializeToString())


def from_text(text: str) -> bytes:
    """A serialized flagos.Program of a module's computations in HLO text."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    return wrapped(_hlo.hlo_module_from_text(f"HloModule hostile\n{text}").as_serialized_hlo_module_proto())


@functools.cache
def valid_programs() -> tuple[bytes, ...]:
    texts = [from_text(text) for text in _TEXTS]
    return (*texts, *(wrapped(export_module(random_program(seed).module)) for seed in range(_RANDOM)))


def changed_program(rng: random.Random) -> bytes:
    """A program with one to three fields changed; sometimes its bytes instead."""
    programs = valid_programs()
    data = rng.choice(programs if rng.randrange(2) else programs[: len(_TEXTS)])
    if not rng.randrange(8):
        return changed_bytes(rng, data)
    program = schema.Program.FromString(data)
    for _ in range(1 + rng.randrange(3)):
        change_message(rng, program)
    return bytes(program.SerializeToString())


# ---- Custom calls of any shapes ----

_SHAPES: Final = (
    *(
        "f32[]",
        "f32[2,6]",
        "f32[2,3]",
        "f32[6,6]",
        "f32[0,0]",
        "f64[2,2,2]",
        "s32[2,3]",
        "s32[2]",
        "f32[2]",
        "c64[3,3]",
    ),
    *("pred[2,6]", "token[]", "(f32[2])", "()"),
)


def call_of(target: str, operands: Sequence[str], results: Sequence[str], config: str = "") -> bytes:
    """A program of one custom call; shapes are in HLO's text."""
    parameters = " ".join(f"p{number} = {shape} parameter({number})" for number, shape in enumerate(operands))
    names = ", ".join(f"p{number}" for number in range(len(operands)))
    shape = results[0] if len(results) == 1 else f"({', '.join(results)})"
    call = f'custom-call({names}), custom_call_target="{target}", backend_config={json.dumps(config)}'
    return from_text(f"ENTRY e {{ {parameters} ROOT y = {shape} {call} }}")


def random_call(rng: random.Random) -> bytes:
    """A call of a target that there is, with operands and results that it may not have."""
    target = rng.choice(known_targets()).replace("*", rng.choice(("relu.default", "add.Tensor", "no_such.default")))
    operands = rng.choices(_SHAPES, k=rng.randrange(4))
    results = rng.choices((*_SHAPES, *operands), k=rng.choice((0, 1, 1, 1, 2, 2, 3)))
    config = rng.choice(("", "{}", "[]", "null", '{"arguments": [{"tensor": 0}], "keywords": {}, "results": null}'))
    return call_of(target, operands, results, config)


def valid_calls() -> tuple[bytes, ...]:
    return (call_of("mhlo.tan", ("f32[2,6]",), ("f32[2,6]",)), call_of("Qr", ("f32[6,6]",), ("f32[6,6]", "f32[6]")))
