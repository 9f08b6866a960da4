"""Conversion of JAX's programs: the envelope, both formats, partitioning, and what malformed input gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import _hlo

from flagos_backend.errors import StatusCode
from flagos_backend.frontends.jax.convert import convert
from flagos_backend.frontends.jax.errors import (
    InvalidCompileOption,
    MalformedCompileOptions,
    MalformedGraph,
    PartitioningFailed,
    UnknownCompileOption,
    UnknownProgramFormat,
    UnsupportedArrayLayout,
    UnsupportedPartitioning,
)
from flagos_backend.importer import schema
from unit.jax.artifacts import artifact, compile_options, instructions, opcodes, program

P = PartitionSpec
Lower = Callable[..., Any]
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def on(mesh: Mesh, *spec: Any, shape: tuple[int, ...] = (8, 16), **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec), **options))


# ---- One device ----------------------------------------------------------------------------------------------------


def test_envelope_of_a_program_for_one_device(lower: Lower) -> None:
    options = compile_options(ids=[[5]])
    envelope = schema.Program.FromString(convert("mlir", artifact(lower(jnp.sin, X)), options))
    assert envelope.schema_version == 1
    assert envelope.producer == f"jax {jax.__version__}"
    assert envelope.compile_options == options
    assert (envelope.num_replicas, envelope.num_partitions) == (1, 1)
    assert list(envelope.device_assignment) == [5]
    assert not envelope.argument_shardings
    assert not envelope.output_shardings
    assert not envelope.argument_memory_kinds
    assert envelope.module.name == "jit_sin"
    assert "sine" in opcodes(envelope)


def test_text_and_artifact_and_hlo_give_the_same_module(lower: Lower) -> None:
    lowered = lower(lambda x: jnp.tanh(x) @ x.T, X)
    from_artifact = program(lowered).module
    text = convert("mlir", lowered.as_text().encode(), compile_options())
    assert opcodes(schema.Program.FromString(text)) == opcodes(program(lowered))
    again = convert("hlo", from_artifact.SerializeToString(), compile_options())
    assert schema.Program.FromString(again).module == from_artifact


def test_the_module_is_one_that_xla_accepts(lower: Lower) -> None:
    module = program(lower(lambda x: jax.lax.cumsum(jnp.sort(x)), X)).module
    assert _hlo.HloModule.from_serialized_hlo_module_proto(module.SerializeToString()).name == module.name


def test_donated_arguments_alias_outputs(lower: Lower) -> None:
    module = program(lower(lambda x: x + 1, X, donate_argnums=0)).module
    (entry,) = module.input_output_alias.entries
    assert (entry.parameter_number, list(entry.output_shape_index)) == (0, [])


def test_sharding_constructs_of_a_program_for_one_device_are_taken_out(lower: Lower) -> None:
    one = Mesh(np.array(jax.devices()[:1]), ("a",), axis_types=(AxisType.Auto,))

    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(one, P("a")))
        return jax.shard_map(lambda y: jax.lax.psum(y, "a"), mesh=one, in_specs=P("a"), out_specs=P())(x)

    envelope = program(lower(function, X))
    assert {i.custom_call_target for i in instructions(envelope)} == {""}
    assert not envelope.output_shardings


def test_memory_kinds_reach_the_envelope(lower: Lower) -> None:
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
    device = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    given = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=device)
    lowered = jax.jit(lambda x, y: (x + y, y * 2), out_shardings=(device, host)).trace(given, given)
    envelope = program(lowered.lower(lowering_platforms=("flagos",)), arguments=2, outputs=2)
    assert list(envelope.argument_memory_kinds) == ["pinned_host", "pinned_host"]
    assert envelope.output_memory_kinds[0] == "pinned_host"


# ---- Several devices -----------------------------------------------------------------------------------------------


def test_a_sharded_matrix_product_becomes_one_device_s_share_and_an_all_reduce(lower: Lower, mesh: Mesh) -> None:
    lowered = lower(jnp.matmul, on(mesh, "a", "b"), on(mesh, "b", None, shape=(16, 32)))
    envelope = program(lowered, partitions=8, arguments=2)
    assert envelope.num_partitions == 8
    assert list(envelope.device_assignment) == list(range(8))
    parameters = [i for i in instructions(envelope) if i.opcode == "parameter" and i.HasField("sharding")]
    assert sorted(tuple(i.shape.dimensions) for i in parameters) == [(4, 4), (4, 32)]
    assert "all-reduce" in opcodes(envelope)
    assert len(envelope.argument_shardings) == 2
    (output,) = (schema.OpSharding.FromString(sharding) for sharding in envelope.output_shardings)
    assert list(output.tile_assignment_dimensions) == [2, 1, 4]
    assert envelope.module.name == "jit_matmul"


def test_each_output_has_its_sharding(lower: Lower, mesh: Mesh) -> None:
    out = NamedSharding(mesh, P())
    lowered = lower(lambda x: (x * 2, x.sum(0)), on(mesh, "a"), out_shardings=(None, out))
    envelope = program(lowered, partitions=8, outputs=2)
    tiled, replicated = (schema.OpSharding.FromString(sharding) for sharding in envelope.output_shardings)
    assert list(tiled.tile_assignment_dimensions) == [2, 1, 4]
    assert replicated.type == schema.OpSharding.REPLICATED


def test_device_assignment_is_the_program_s_own(lower: Lower, mesh: Mesh) -> None:
    ids = [[7, 6, 5, 4, 3, 2, 1, 0]]
    assert list(program(lower(jnp.sin, on(mesh, "a")), partitions=8, ids=ids).device_assignment) == ids[0]


def test_replicas_need_no_partitioner(lower: Lower) -> None:
    envelope = program(lower(jnp.sin, X), replicas=2, ids=[[1], [0]])
    assert (envelope.num_replicas, envelope.num_partitions) == (2, 1)
    assert list(envelope.device_assignment) == [1, 0]
    assert not envelope.argument_shardings


@pytest.mark.parametrize("propagated", [False, True], ids=["aliased output", "donor"])
def test_donation_survives_partitioning(lower: Lower, mesh: Mesh, propagated: bool) -> None:
    options = {} if propagated else {"out_shardings": NamedSharding(mesh, P("a", "b"))}
    module = program(lower(lambda x: x + 1, on(mesh, "a", "b"), donate_argnums=0, **options), partitions=8).module
    aliases, donors = module.input_output_alias.entries, module.buffer_donor.entries
    assert [entry.parameter_number for entry in (donors if propagated else aliases)] == [0]


def test_shard_map_keeps_its_collectives(lower: Lower, mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.psum(x, "a"), "b") + jax.lax.axis_index("b").astype(x.dtype)

    lowered = lower(
        jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P(None, None, "b"), check_vma=False),
        on(mesh, "a", "b"),
    )
    assert opcodes(program(lowered, partitions=8)) >= {"all-reduce", "all-gather", "partition-id"}


def test_a_callback_keeps_its_name_in_a_partitioned_program(lower: Lower, mesh: Mesh) -> None:
    def function(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return x + 1

    calls = [i for i in instructions(program(lower(function, on(mesh, "a")), partitions=8)) if i.custom_call_target]
    assert [i.custom_call_target for i in calls] == ["flagos.host_callback"]


def test_decompositions_are_split_along_their_batch(lower: Lower, mesh: Mesh) -> None:
    a = on(mesh, "a", shape=(8, 4, 4))
    calls = [i for i in instructions(program(lower(jnp.linalg.eigvalsh, a), partitions=8)) if i.custom_call_target]
    assert [list(i.shape.tuple_shapes[0].dimensions) for i in calls] == [[4, 4, 4]]


def test_a_program_s_memory_placement_survives_partitioning(lower: Lower, mesh: Mesh) -> None:
    host = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    envelope = program(lower(lambda x: x * 2, on(mesh, "a"), out_shardings=host), partitions=8)
    assert list(envelope.output_memory_kinds) == ["pinned_host"]


def test_several_threads_partition_at_once(lower: Lower, mesh: Mesh) -> None:
    lowered = [lower(lambda x, n=n: x.sum(n % 2) * n, on(mesh, "a", "b")) for n in range(8)]
    options = compile_options(partitions=8)
    expected = [convert("mlir", artifact(one), options) for one in lowered]
    with ThreadPoolExecutor(4) as pool:
        ours = [pool.submit(convert, "mlir", artifact(one), options) for one in lowered]
        others = [pool.submit(jax.jit(lambda x, n=n: x * n), np.arange(4.0)) for n in range(8)]
    for future, reference in zip(ours, expected, strict=True):
        assert opcodes(schema.Program.FromString(future.result())) == opcodes(schema.Program.FromString(reference))
    for n, future in enumerate(others):
        np.testing.assert_array_equal(future.result(), np.arange(4.0, dtype=np.float32) * n)


# ---- Bad input -----------------------------------------------------------------------------------------------------


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(UnknownProgramFormat, match="Unknown program format 'onnx'") as caught:
        convert("onnx", b"", compile_options())
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "code",
    [b"", b"ML\xefRjunk", b"not mlir", b"\xff" * 64, b"module { func.func @other() { return } }"],
    ids=["empty", "bytecode", "text", "bytes", "no main"],
)
def test_malformed_stablehlo_is_refused(code: bytes) -> None:
    with pytest.raises(MalformedGraph, match="not valid StableHLO") as caught:
        convert("mlir", code, compile_options())
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_every_truncation_of_an_artifact_is_refused(lower: Lower) -> None:
    code = artifact(lower(jnp.sin, X))
    for size in range(0, len(code) - 1, 97):
        with pytest.raises(MalformedGraph):
            convert("mlir", code[:size], compile_options())


@pytest.mark.parametrize("code", [b"", b"\xff" * 64, b"\x0a\x03foo"], ids=["empty", "bytes", "a name only"])
def test_malformed_hlo_is_refused(code: bytes) -> None:
    with pytest.raises(MalformedGraph, match="not valid HLO"):
        convert("hlo", code, compile_options())


@pytest.mark.parametrize("options", [b"\xff\xff", b"\x1a\x7fshort"], ids=["bytes", "truncated"])
def test_malformed_compile_options_are_refused(lower: Lower, options: bytes) -> None:
    with pytest.raises(MalformedCompileOptions, match="failed to deserialize CompileOptionsProto"):
        convert("mlir", artifact(lower(jnp.sin, X)), options)


def test_a_device_assignment_of_another_size_is_refused(lower: Lower) -> None:
    with pytest.raises(MalformedCompileOptions, match="device_assignment is for 2 replicas of 1 partitions"):
        convert("mlir", artifact(lower(jnp.sin, X)), compile_options(replicas=1, ids=[[0], [1]]))


def test_too_many_partitions_are_refused(lower: Lower) -> None:
    options = schema.CompileOptionsProto()
    options.executable_build_options.num_replicas = 1
    options.executable_build_options.num_partitions = 1 << 20
    with pytest.raises(UnsupportedPartitioning, match="8192 is the limit"):
        convert("mlir", artifact(lower(jnp.sin, X)), options.SerializeToString())


def test_what_the_partitioner_refuses_is_refused_in_its_words(lower: Lower, mesh: Mesh) -> None:
    text = lower(jnp.sin, on(mesh, "a")).as_text().replace('[{"a"}, {}]', '[{"nowhere"}, {}]')
    with pytest.raises((PartitioningFailed, MalformedGraph), match="nowhere"):
        convert("mlir", text.encode(), compile_options(partitions=8))


def test_an_unknown_compile_option_is_named(lower: Lower) -> None:
    with pytest.raises(UnknownCompileOption, match="No such compile option: 'fastest'"):
        program(lower(jnp.sin, X), overrides={"fastest": True})


def test_an_unknown_option_of_xla_is_named(lower: Lower) -> None:
    with pytest.raises(InvalidCompileOption, match="No such compile option: 'xla_fastest'"):
        program(lower(jnp.sin, X), overrides={"xla_fastest": True})


def test_a_wrong_value_for_an_option_of_xla_is_named(lower: Lower) -> None:
    with pytest.raises(InvalidCompileOption, match="'maybe' is not a valid bool value"):
        program(lower(jnp.sin, X), overrides={"xla_embed_ir_in_executable": "maybe"})


def test_options_of_xla_are_accepted_and_left_out(lower: Lower) -> None:
    assert not program(lower(jnp.sin, X), overrides={"xla_embed_ir_in_executable": True}).options


@pytest.mark.parametrize(("value", "option"), [(True, "1"), ("True", "1"), (False, "0"), ("False", "0")])
def test_excess_precision_is_followed(lower: Lower, value: object, option: str) -> None:
    overrides = {"xla_allow_excess_precision": value, "xla_embed_ir_in_executable": True}
    assert dict(program(lower(jnp.sin, X), overrides=overrides).options) == {"excess_precision": option}


@pytest.mark.parametrize(("layout", "refused"), [("{1,0}", False), ("{0,1}", True), ("default", False)])
def test_only_row_major_layouts_are_accepted(lower: Lower, layout: str, refused: bool) -> None:
    text = lower(jnp.sin, X).as_text()
    text = text.replace("%arg0: tensor<8x16xf32>", f'%arg0: tensor<8x16xf32> {{mhlo.layout_mode = "{layout}"}}', 1)
    assert "layout_mode" in text
    if not refused:
        convert("mlir", text.encode(), compile_options())
        return
    with pytest.raises(UnsupportedArrayLayout, match=r"The layout \{0,1\}.*argument 0"):
        convert("mlir", text.encode(), compile_options())
