"""Collective kernels on eight devices of this process, against stock XLA on as many and against NumPy."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flagos_backend.collectives import InProcessCommunicator
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import CollectiveGroupMismatch
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from support.against_xla import hlo_of_text, run_on_backend
from support.devices import on_each, run_on_devices
from support.seeds import fresh

DEVICES = 8

SUM = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}
first {
  a = f32[] parameter(0)
  ROOT r = f32[] parameter(1)
}"""

# Programs of f32[8,4] on eight partitions that stock XLA's CPU runs too.
PROGRAMS = {
    "all-reduce": "ROOT r = f32[8,4] all-reduce(x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}},"
    " use_global_device_ids=true, to_apply=sum",
    "all-reduce in groups": "ROOT r = f32[8,4] all-reduce(x), channel_id=1, replica_groups={{5,0},{1,2,7},{3,4,6}},"
    " use_global_device_ids=true, to_apply=sum",
    "all-gather": "ROOT r = f32[8,16] all-gather(x), channel_id=1, replica_groups={{0,2,4,6},{7,5,3,1}},"
    " dimensions={1}, use_global_device_ids=true",
    "reduce-scatter": "ROOT r = f32[2,4] reduce-scatter(x), channel_id=1, replica_groups={{0,2,4,6},{7,5,3,1}},"
    " dimensions={0}, use_global_device_ids=true, to_apply=sum",
    "all-to-all": "ROOT r = f32[8,4] all-to-all(x), channel_id=1, replica_groups={{0,3},{2,1},{4,5},{7,6}},"
    " dimensions={1}",
    "all-to-all of parts": """a = f32[4,4] slice(x), slice={[0:4], [0:4]}
  b = f32[4,4] slice(x), slice={[4:8], [0:4]}
  ROOT r = (f32[4,4], f32[4,4]) all-to-all(a, b), channel_id=1, replica_groups={{0,3},{2,1},{4,5},{7,6}}""",
    "collective-permute": "ROOT r = f32[8,4] collective-permute(x), channel_id=1,"
    " source_target_pairs={{0,1},{1,2},{2,0},{3,5},{6,6}}",
    "in a loop": """zero = s32[] constant(0)
  start = (s32[], f32[8,4]) tuple(zero, x)
  end = (s32[], f32[8,4]) while(start), condition=below, body=iteration
  ROOT r = f32[8,4] get-tuple-element(end), index=1""",
}
LOOP = """
below {
  p = (s32[], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(5)
  ROOT r = pred[] compare(i, n), direction=LT
}
iteration {
  p = (s32[], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[8,4] get-tuple-element(p), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  moved = f32[8,4] collective-permute(x), channel_id=1,
    source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  total = f32[8,4] all-reduce(moved), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}},
    use_global_device_ids=true, to_apply=sum
  small = f32[] constant(0.25)
  scale = f32[8,4] broadcast(small), dimensions={}
  y = f32[8,4] multiply(total, scale)
  ROOT r = (s32[], f32[8,4]) tuple(next, y)
}"""


def program(body: str) -> str:
    return f"{SUM}\n{LOOP if 'while' in body else ''}\nENTRY e {{\n  x = f32[8,4] parameter(0)\n  {body}\n}}"


_CHILD = """
import pickle, sys
import jax, numpy as np
from jaxlib import _jax, _hlo
texts, arguments = pickle.load(sys.stdin.buffer)
client = jax.devices()[0].client
devices = client.local_devices()
results = {}
for name, text in texts.items():
    proto = _hlo.hlo_module_from_text("HloModule test, num_partitions=8\\n" + text).as_serialized_hlo_module_proto()
    options = _jax.CompileOptions()
    options.num_partitions = len(devices)
    options.executable_build_options.num_partitions = len(devices)
    options.executable_build_options.use_spmd_partitioning = True
    options.device_assignment = _jax.DeviceAssignment.create(np.arange(len(devices))[None, :])
    options.executable_build_options.device_assignment = options.device_assignment
    executable = client.compile_and_load(_jax.mlir.hlo_to_stablehlo(proto), _jax.DeviceList(tuple(devices)), options)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    argument = jax.make_array_from_single_device_arrays(
        (arguments.shape[0] * arguments.shape[1], *arguments.shape[2:]), sharding,
        [jax.device_put(a, d) for a, d in zip(arguments, jax.devices())])
    outputs = executable.execute_sharded([argument]).disassemble_into_single_device_arrays()
    results[name] = [[np.asarray(part) for part in column] for column in outputs]
sys.stdout.buffer.write(pickle.dumps(results))
"""


@pytest.fixture(scope="module")
def arguments() -> np.ndarray:
    return fresh(__name__).standard_normal((DEVICES, 8, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def on_xla(arguments: np.ndarray) -> dict[str, list[list[np.ndarray]]]:
    """Every program's results on eight devices of stock XLA: [result][device]."""
    texts = {name: program(body) for name, body in PROGRAMS.items()}
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_PLATFORMS": "cpu",
    }
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps((texts, arguments)),
        capture_output=True,
        env=environment,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    return pickle.loads(child.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
def test_against_stock_xla(name: str, arguments: np.ndarray, on_xla: dict[str, list[list[np.ndarray]]]) -> None:
    ours = run_on_devices(program(PROGRAMS[name]), [[a] for a in arguments], partitions=DEVICES)
    for number, column in enumerate(on_xla[name]):
        for device, expected in enumerate(column):
            np.testing.assert_allclose(ours[device][number], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["all-reduce", "all-gather"])
def test_members_of_a_group_get_the_same_bits(name: str, arguments: np.ndarray) -> None:
    ours = run_on_devices(program(PROGRAMS[name]), [[a] for a in arguments], partitions=DEVICES)
    groups = [range(8)] if name == "all-reduce" else [(0, 2, 4, 6), (7, 5, 3, 1)]
    for group in groups:
        assert len({ours[device][0].tobytes() for device in group}) == 1


def test_across_replicas_and_partitions(rng: np.random.Generator) -> None:
    """Two replicas of two partitions: each mode sums over its own devices."""
    text = """
sum {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT r = s32[] add(a, b)
}
ENTRY e {
  x = s32[3] parameter(0)
  replicas = s32[3] all-reduce(x), replica_groups={{0,1}}, to_apply=sum
  all = s32[3] all-reduce(x), channel_id=1, replica_groups={{0,1}}, to_apply=sum
  own = s32[3] all-reduce(x), channel_id=2, replica_groups={{0},{1}}, to_apply=sum
  everyone = s32[3] all-reduce(x), replica_groups={}, to_apply=sum
  ROOT r = (s32[3], s32[3], s32[3], s32[3]) tuple(replicas, all, own, everyone)
}"""
    x = rng.integers(-100, 100, (2, 2, 3)).astype(np.int32)
    ours = run_on_devices(text, [[x[d // 2, d % 2]] for d in range(4)], replicas=2, partitions=2)
    for device, (replicas, all_devices, own, everyone) in enumerate(ours):
        np.testing.assert_array_equal(replicas, x[:, device % 2].sum(0))
        np.testing.assert_array_equal(all_devices, x.sum((0, 1)))
        np.testing.assert_array_equal(own, x[device // 2].sum(0))
        np.testing.assert_array_equal(everyone, replicas)


def test_a_collective_takes_place_though_its_result_is_used_on_one_device_only() -> None:
    """Device 1 runs a program that does not look at the sum; device 0 gets it all the same."""
    texts = [
        program(f"total = f32[8,4] all-reduce(x), to_apply=sum\n  ROOT r = f32[8,4] {root}")
        for root in ("negate(total)", "negate(x)")
    ]
    plans = [build_plan(import_module(hlo_of_text(text), num_replicas=2).entry) for text in texts]
    communicator = InProcessCommunicator(timeout=10)
    ones = torch.ones(8, 4)
    outcomes = on_each(
        2, lambda d: plans[d].run(Run(d, replica_id=d, num_replicas=2, communicator=communicator), [ones])[0]
    )
    assert [float(outcome[0, 0]) for outcome in outcomes] == [-2.0, -1.0]


def test_any_reducer_reductions_in_the_order_of_ranks(arguments: np.ndarray) -> None:
    body = """ROOT r = f32[8,4] all-reduce(x), channel_id=1, replica_groups={{6,2,5,0,1,3,4,7}},
    use_global_device_ids=true, to_apply=first"""
    ours = run_on_devices(program(body), [[a] for a in arguments], partitions=DEVICES)
    for (result,) in ours:
        np.testing.assert_array_equal(result, arguments[7])


def test_several_arrays_in_one_all_reduce(arguments: np.ndarray) -> None:
    body = """y = f32[8,4] negate(x)
  ROOT r = (f32[8,4], f32[8,4]) all-reduce(x, y), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}},
    use_global_device_ids=true, to_apply=sum"""
    for first, second in run_on_devices(program(body), [[a] for a in arguments], partitions=DEVICES):
        np.testing.assert_allclose(first, arguments.sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(second, -first)


def test_collective_broadcast(arguments: np.ndarray) -> None:
    body = "ROOT r = f32[8,4] collective-broadcast(x), channel_id=1, replica_groups={{3,0,1},{6,7}}"
    ours = run_on_devices(program(body), [[a] for a in arguments], partitions=DEVICES)
    source = {3: 3, 0: 3, 1: 3, 6: 6, 7: 6}
    for device, (result,) in enumerate(ours):
        expected = arguments[source[device]] if device in source else np.zeros((8, 4), np.float32)
        np.testing.assert_array_equal(result, expected)


def test_ragged_all_to_all(rng: np.random.Generator) -> None:
    """Each of two devices sends a slice to each; what nobody covers keeps the output operand's values."""
    text = """
ENTRY e {
  input = f32[6,2] parameter(0)
  output = f32[8,2] parameter(1)
  input_offsets = s32[2] parameter(2)
  send_sizes = s32[2] parameter(3)
  output_offsets = s32[2] parameter(4)
  recv_sizes = s32[2] parameter(5)
  ROOT r = f32[8,2] ragged-all-to-all(input, output, input_offsets, send_sizes, output_offsets, recv_sizes),
    channel_id=1, replica_groups={{0,1}}
}"""
    inputs = rng.standard_normal((2, 6, 2)).astype(np.float32)
    outputs = rng.standard_normal((2, 8, 2)).astype(np.float32)
    offsets, sizes = np.array([[0, 2], [1, 4]], np.int32), np.array([[2, 3], [3, 1]], np.int32)
    targets = np.array([[0, 0], [4, 5]], np.int32)  # [sender][receiver]
    given = [[inputs[d], outputs[d], offsets[d], sizes[d], targets[d], sizes[:, d].copy()] for d in range(2)]
    ours = run_on_devices(text, given, partitions=2)
    for receiver in range(2):
        expected = outputs[receiver].copy()
        for sender in range(2):
            start, length, target = offsets[sender][receiver], sizes[sender][receiver], targets[sender][receiver]
            expected[target : target + length] = inputs[sender][start : start + length]
        np.testing.assert_array_equal(ours[receiver][0], expected)


def test_a_group_beyond_the_launch_is_named(arguments: np.ndarray) -> None:
    with pytest.raises(CollectiveGroupMismatch, match="all-reduce"):
        run_on_devices(program(PROGRAMS["all-reduce"]), [[a] for a in arguments[:2]], partitions=2)


def test_one_device_alone_needs_no_communicator(arguments: np.ndarray) -> None:
    body = "ROOT r = f32[8,4] all-reduce(x), replica_groups={}, to_apply=sum"
    (result,) = run_on_backend(hlo_of_text(program(body)), [arguments[0]])
    np.testing.assert_array_equal(result, arguments[0])
