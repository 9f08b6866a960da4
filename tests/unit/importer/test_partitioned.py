"""Programs that XLA's SPMD partitioner has split: imported, exported, accepted by XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _hlo, _jax, xla_client

from flagos_backend.importer import export_module, import_module
from flagos_backend.ir.opcode import Opcode
from support.passes import simplified

PASSES = "shardy-xla,spmd-partitioning,spmd-prepare,sharding-propagation,collective-permute-motion,tuple-simplifier,dce"
MESH = AbstractMesh((2, 2), ("x", "y"))


def partitioned(function, specs, *shapes):
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(MESH, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("flagos",))
    client = xla_client.make_cpu_client(num_devices=4)
    options = xla_client.CompileOptions()
    options.num_partitions, options.num_replicas = 4, 1
    build = options.executable_build_options
    build.num_partitions, build.num_replicas = 4, 1
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(4).reshape(1, 4))
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.debug_options.xla_enable_hlo_passes_only = PASSES
    devices = _jax.DeviceList(tuple(client.devices()))
    executable = client.compile_and_load(str(lowered.compiler_ir("stablehlo")), devices, options)
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def softmax_of_product(x, w):
    return jax.nn.softmax(x @ w)


SPLIT = P("x")


def manual(function, in_specs=SPLIT, out_specs=SPLIT):
    return jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)


PROGRAMS = {
    "all-reduce": (softmax_of_product, (P("x", "y"), P("y", None)), (8, 16), (16, 4)),
    "psum": (manual(partial(lax.psum, axis_name="x"), out_specs=P()), (P("x"),), (8, 4)),
    "all-gather": (manual(partial(lax.all_gather, axis_name="x", tiled=True), out_specs=P()), (P("x"),), (8, 4)),
    "reduce-scatter": (manual(partial(lax.psum_scatter, axis_name="x", tiled=True)), (P("x"),), (8, 4)),
    "all-to-all": (
        manual(partial(lax.all_to_all, axis_name="x", split_axis=1, concat_axis=0, tiled=True)),
        (P("x"),),
        (8, 4),
    ),
    "collective-permute": (manual(partial(lax.ppermute, axis_name="x", perm=[(0, 1), (1, 0)])), (P("x"),), (8, 4)),
    "partition-id": (manual(lambda v: v * lax.axis_index("y").astype(jnp.float32)), (P("x"),), (8, 4)),
    "gradient": (
        jax.grad(lambda w, x: (softmax_of_product(x, w) ** 2).sum()),
        (P("y", None), P("x", "y")),
        (16, 4),
        (8, 16),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_partitioned_program(name):
    function, specs, *shapes = PROGRAMS[name]
    module = import_module(partitioned(function, specs, *shapes), num_partitions=4)
    optimized = simplified(module)
    opcodes = {i.opcode for c in optimized.computations() for i in c.instructions}
    expected = {"psum": "all-reduce", "gradient": "all-reduce"}.get(name, name)
    assert Opcode(expected) in opcodes
    for version in (module, optimized):
        exported = export_module(version)
        assert export_module(import_module(exported, num_partitions=4)) == exported
        _hlo.HloModule.from_serialized_hlo_module_proto(exported)
