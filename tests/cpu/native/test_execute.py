"""Executables: what they say of themselves, and launches with donation, failures, devices and host callbacks."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cpu.native.harness import ADD_ONE, add_one, compile, get, program, put, run
from flagos_backend.importer import schema
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Artifact, Buffer, Context, ElementType, Executable, HostArray, Memory
from plugin_abi.loader import Backend
from support.native_programs import ALL_REDUCE, CALLBACK

# 800 products of matrices of 256 x 256: long enough that nobody finishes it before the next line of a test.
LONG = """HloModule long
body {
  state = (s32[], f32[256,256]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  x = f32[256,256] get-tuple-element(state), index=1
  one = s32[] constant(1)
  next = s32[] add(count, one)
  product = f32[256,256] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  bounded = f32[256,256] tanh(product)
  ROOT result = (s32[], f32[256,256]) tuple(next, bounded)
}
condition {
  state = (s32[], f32[256,256]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  limit = s32[] constant(800)
  ROOT more = pred[] compare(count, limit), direction=LT
}
ENTRY main {
  x = f32[256,256] parameter(0)
  zero = s32[] constant(0)
  initial = (s32[], f32[256,256]) tuple(zero, x)
  final = (s32[], f32[256,256]) while(initial), condition=condition, body=body
  ROOT y = f32[256,256] get-tuple-element(final), index=1
}"""


def test_a_program_computes(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    executable = compile(context, ADD_ONE)
    array = rng.standard_normal((2, 3)).astype(np.float32)
    (result,) = run(executable, put(memory, array))
    np.testing.assert_array_equal(get(result), array + 1)


def test_an_executable_describes_itself(context: Context) -> None:
    options = schema.CompileOptionsProto().SerializeToString()
    executable = compile(
        context,
        "HloModule named, input_output_alias={ {0}: (1, {}, may-alias) }\n"
        "ENTRY main { a = f32[2] parameter(0)  b = s8[4,4] parameter(1)  c = s8[4,4] negate(b)  d = f32[2] sine(a)  "
        "ROOT r = (s8[4,4], f32[2], f32[2]) tuple(c, d, a) }",
        compile_options=options,
        device_assignment=[2],
        num_replicas=1,
        num_partitions=1,
        output_memory_kinds=["pinned_host", "device", ""],
    )
    description = executable.describe()
    assert description.name == "named"
    assert len(bytes.fromhex(description.fingerprint)) == 32
    assert (description.num_replicas, description.num_partitions, description.device_assignment) == (1, 1, (2,))
    assert [device.id for device in description.devices] == [2]
    assert [(o.dims, o.element_type, o.memory_kind) for o in description.outputs] == [
        ((4, 4), ElementType.S8, "pinned_host"),
        ((2,), ElementType.F32, "device"),
        ((2,), ElementType.F32, "device"),
    ]
    assert description.argument_memory_kinds == ("device", "device")
    assert description.argument_aliases == (-1, 0)
    assert (description.argument_bytes, description.output_bytes, description.alias_bytes) == (24, 32, 16)
    assert description.peak_bytes >= 24 + 32 - 16
    assert description.cost_analysis["transcendentals"] == 2
    assert description.cost_analysis["flops"] == 16
    assert executable.artifact(Artifact.COMPILE_OPTIONS) == options
    assert b"sine" in executable.artifact(Artifact.EXPLANATION)


def test_outputs_lie_in_the_memories_that_the_program_names(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(4), output_memory_kinds=["unpinned_host"])
    (result,) = run(executable, put(memory, np.zeros(4, np.float32)))
    assert result.memory.kind == "unpinned_host"
    with pytest.raises(FlagosStatusError, match="'hbm' memory"):
        compile(context, add_one(4), output_memory_kinds=["hbm"])


def test_the_fingerprint_follows_program_and_options(context: Context) -> None:
    prints = [
        compile(context, add_one(n), options=options).describe().fingerprint
        for n, options in [(4, {}), (4, {}), (5, {}), (4, {"explain": "1"})]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_the_fingerprint_follows_the_environment(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(value: str, **options: str) -> str:
        monkeypatch.setenv("FLAGOS_EXCESS_PRECISION", value)
        return compile(context, add_one(4), options=options).describe().fingerprint

    assert fingerprint("") == fingerprint("0") != fingerprint("1")
    assert fingerprint("1", excess_precision="0") == fingerprint("0", excess_precision="0")


def test_an_optimized_program_is_a_program(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(3))
    again = Executable.compile(context, executable.artifact(Artifact.OPTIMIZED_PROGRAM))
    (result,) = run(again, put(memory, np.arange(3, dtype=np.float32)))
    np.testing.assert_array_equal(get(result), [1, 2, 3])


def test_executables_survive_as_bytes(context: Context, memory: Memory) -> None:
    data = compile(context, add_one(3)).artifact(Artifact.SERIALIZED)
    loaded = Executable.load(context, data)
    (result,) = run(loaded, put(memory, np.arange(3, dtype=np.float32)))
    np.testing.assert_array_equal(get(result), [1, 2, 3])
    moved = Executable.load(context, data, [1])
    assert moved.describe().device_assignment == (1,)
    other = context.devices[1].default_memory
    np.testing.assert_array_equal(get(run(moved, put(other, np.zeros(3, np.float32)))[0]), [1, 1, 1])
    assert Executable.load(context, moved.artifact(Artifact.SERIALIZED)).describe().device_assignment == (1,)


def test_damaged_executables_are_refused(context: Context, rng: np.random.Generator) -> None:
    data = compile(context, add_one(3)).artifact(Artifact.SERIALIZED)
    with pytest.raises(FlagosStatusError, match="no serialized executable") as refused:
        Executable.load(context, b"x" + data)
    assert refused.value.code == StatusCode.INVALID_ARGUMENT
    for damaged in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(FlagosStatusError) as refused:
            Executable.load(context, damaged)
        assert refused.value.code == StatusCode.DATA_LOSS
    for _ in range(50):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        with pytest.raises(FlagosStatusError):
            Executable.load(context, bytes(changed))
    with pytest.raises(FlagosStatusError):
        Executable.load(context, data, [0, 1])


def test_malformed_programs_are_refused(context: Context, rng: np.random.Generator) -> None:
    with pytest.raises(FlagosStatusError) as refused:
        Executable.compile(context, b"no program")
    assert refused.value.code == StatusCode.INVALID_ARGUMENT
    assert refused.value.payloads["flagos.error"] == b"MalformedProgram"
    with pytest.raises(FlagosStatusError, match="the program is empty"):
        Executable.compile(context, b"")
    with pytest.raises(FlagosStatusError, match="device 9"):
        compile(context, ADD_ONE, device_assignment=[9])
    source = program(ADD_ONE)
    for _ in range(200):
        changed = bytearray(source)
        changed[rng.integers(len(source))] ^= 1 << int(rng.integers(8))
        try:
            Executable.compile(context, bytes(changed)).close()
        except FlagosStatusError as error:
            assert error.code not in (StatusCode.INTERNAL, StatusCode.UNKNOWN), error


# ---- Donation


def test_a_donated_argument_is_used_up(context: Context, memory: Memory) -> None:
    update = """HloModule update, input_output_alias={ {}: (0, {}, must-alias) }
ENTRY main { x = f32[1000] parameter(0)  u = f32[2] parameter(1)  i = s32[] constant(5)
  ROOT y = f32[1000] dynamic-update-slice(x, u, i) }"""
    executable = compile(context, update)
    u = put(memory, np.array([7, 8], np.float32))
    x = put(memory, np.zeros(1000, np.float32))
    for _ in range(3):
        (y,) = run(executable, x, u)
        assert x.is_deleted
        assert not u.is_deleted
        y.wait()
        x = y
    assert get(x)[4:8].tolist() == [0, 7, 8, 0]
    assert context.devices[0].memory_stats().bytes_in_use == 4008


def shared_by(sharing: str, x: Buffer, memory: Memory) -> object:
    match sharing:
        case "hold":
            x.hold(1)
            return None
        case "bitcast":
            return x.bitcast((1000,), ElementType.S32)
        case "promise":
            promise = memory.promise((1000,), ElementType.F32)
            promise.fulfill(x)
            return promise
    raise ValueError(sharing)


@pytest.mark.parametrize("sharing", ["hold", "bitcast", "promise"])
def test_shared_storage_is_not_written_over(context: Context, memory: Memory, sharing: str) -> None:
    executable = compile(context, add_one(1000))
    x = put(memory, np.zeros(1000, np.float32))
    address, _other = x.pointer_address(), shared_by(sharing, x, memory)
    view = memory.view(address, (1000,), ElementType.F32)
    (y,) = run(executable, x)
    assert x.is_deleted
    assert not get(view).any()
    assert y.pointer_address() != address
    np.testing.assert_array_equal(get(y), np.ones(1000))


def test_non_donatable_arguments_survive(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(10))
    x = put(memory, np.zeros(10, np.float32))
    (y,) = run(executable, x, non_donatable=[0])
    assert not x.is_deleted
    assert not get(x).any()
    assert get(y).all()
    with pytest.raises(FlagosStatusError, match=r"non_donatable\[0\] is 3"):
        run(executable, x, non_donatable=[3])


def test_a_donated_argument_is_passed_once(context: Context, memory: Memory) -> None:
    text = """HloModule sum, input_output_alias={ {}: (1, {}, may-alias) }
ENTRY main { a = f32[4] parameter(0)  b = f32[4] parameter(1)  ROOT c = f32[4] add(a, b) }"""
    executable = compile(context, text)
    x = put(memory, np.ones(4, np.float32))
    with pytest.raises(FlagosStatusError, match="arguments 0 and 1 of sum are the same buffer") as refused:
        run(executable, x, x)
    assert refused.value.code == StatusCode.INVALID_ARGUMENT
    assert not x.is_deleted
    assert get(run(executable, x, x, non_donatable=[1])[0]).tolist() == [2, 2, 2, 2]
    run(executable, put(memory, np.ones(4, np.float32)), x)
    with pytest.raises(FlagosStatusError, match="was donated to an execution"):
        run(executable, put(memory, np.ones(4, np.float32)), x)


# ---- Bad arguments


@pytest.mark.parametrize("fault", ["shape", "type", "deleted", "device", "context", "count", "devices", "placed"])
def test_arguments_that_do_not_fit_are_named(backend: Backend, context: Context, memory: Memory, fault: str) -> None:
    executable = compile(context, add_one(4))
    good = put(memory, np.zeros(4, np.float32))
    deleted = put(memory, np.zeros(4, np.float32))
    deleted.delete()
    other = Context(backend)
    arguments, options, message = {
        "shape": ([[memory.allocate((5,), ElementType.F32)]], {}, r"argument 0 of add_one is f32\[5\]"),
        "type": ([[memory.allocate((4,), ElementType.S32)]], {}, r"is s32\[4\], but was compiled as f32\[4\]"),
        "deleted": ([[deleted]], {}, "was deleted"),
        "device": ([[good.copy_to(context.devices[1].default_memory)]], {}, "is on flagos:1"),
        "context": ([[put(other.devices[0].default_memory, np.zeros(4, np.float32))]], {}, "another context"),
        "count": ([[good, good]], {}, "2 arguments are given, but add_one takes 1"),
        "devices": ([[good], [good]], {}, "arguments for 2 devices"),
        "placed": ([[good]], {"device": other.devices[0]}, "another context"),
    }[fault]
    with pytest.raises(FlagosStatusError, match=message) as refused:
        executable.execute(arguments, **options)
    assert refused.value.code == StatusCode.INVALID_ARGUMENT
    assert not good.is_deleted
    np.testing.assert_array_equal(get(run(executable, good)[0]), np.ones(4))
    other.close()


def test_failed_inputs_fail_the_outputs_and_nothing_runs(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(4))
    promise = memory.promise((4,), ElementType.F32)
    outputs, done = executable.execute([[promise]])
    (after,) = run(executable, outputs[0][0])
    assert not done[0].query()[0]
    promise.fulfill(None, FlagosStatusError(StatusCode.DATA_LOSS, "lost on the way"))
    for wait in (done[0].wait, after.wait, run(compile(context, ADD_ONE), failed(memory))[0].wait):
        with pytest.raises(FlagosStatusError, match="lost on the way"):
            wait()


def failed(memory: Memory) -> Buffer:
    return memory.promise((2, 3), ElementType.F32, FlagosStatusError(StatusCode.DATA_LOSS, "lost on the way"))


def test_a_program_waits_for_a_promise(context: Context, memory: Memory) -> None:
    executable = compile(context, add_one(4))
    promise = memory.promise((4,), ElementType.F32)
    (output,) = run(executable, promise)
    # Later work of the same device is not held up, and may even be what keeps the promise.
    (other,) = run(executable, put(memory, np.zeros(4, np.float32)))
    promise.fulfill(other)
    assert get(output).tolist() == [2, 2, 2, 2]


# ---- Asynchrony, devices, callbacks


def test_long_work_returns_before_it_is_done(context: Context, memory: Memory) -> None:
    executable = compile(context, LONG)
    outputs, done = executable.execute([[put(memory, np.eye(256, dtype=np.float32))]])
    assert not done[0].query()[0]
    assert not outputs[0][0].ready_event().query()[0]
    copy = outputs[0][0].copy_to(context.devices[1].default_memory)
    context.devices[0].synchronize()
    assert done[0].query() == (True, None)
    assert np.isfinite(get(copy)).all()


def test_a_one_device_program_runs_where_it_is_sent(context: Context) -> None:
    executable = compile(context, add_one(4))
    for device in context.devices:
        (result,) = run(executable, put(device.default_memory, np.zeros(4, np.float32)), device=device)
        assert result.device.id == device.id
        assert get(result).all()


def on_three_devices(context: Context) -> Executable:
    return compile(context, ALL_REDUCE, num_partitions=3, device_assignment=[2, 0, 1])


def test_devices_meet_in_collectives(context: Context, rng: np.random.Generator) -> None:
    executable = on_three_devices(context)
    assert [device.id for device in executable.describe().devices] == [2, 0, 1]
    for _ in range(20):
        arrays = rng.random((3, 4)).astype(np.float32)
        arguments = [[put(d.default_memory, a)] for d, a in zip(executable.describe().devices, arrays, strict=True)]
        outputs, _done = executable.execute(arguments)
        for (output,), device in zip(outputs, executable.describe().devices, strict=True):
            assert output.device.id == device.id
            np.testing.assert_allclose(get(output), np.sqrt(arrays).sum(0), rtol=1e-6)


def test_one_failing_device_fails_all_and_blocks_none(context: Context) -> None:
    executable = on_three_devices(context)
    devices = executable.describe().devices
    good = [[put(d.default_memory, np.ones(4, np.float32))] for d in devices]
    bad = devices[1].default_memory.promise((4,), ElementType.F32, FlagosStatusError(StatusCode.DATA_LOSS, "gone"))
    outputs, done = executable.execute([good[0], [bad], good[2]])
    for event, (output,) in zip(done, outputs, strict=True):
        with pytest.raises(FlagosStatusError, match="gone"):
            event.wait(60)
        with pytest.raises(FlagosStatusError, match="gone"):
            output.wait(60)
    outputs, _done = executable.execute(good)
    assert get(outputs[2][0]).tolist() == [3, 3, 3, 3]


def test_programs_call_the_host(backend: Backend, rng: np.random.Generator) -> None:
    seen: list[tuple[int, list[tuple[tuple[int, ...], ElementType]]]] = []

    def callback(identifier: int, arguments: Sequence[HostArray], results: Sequence[HostArray]) -> None:
        seen.append((identifier, [(a.dims, a.element_type) for a in (*arguments, *results)]))
        x, n = np.frombuffer(arguments[0].data, np.float32), int(arguments[1].data.tobytes()[0])
        np.frombuffer(results[0].data, np.float32)[:] = x * n
        np.frombuffer(results[1].data, np.int32)[:] = n

    with Context(backend, host_callback=callback) as context:
        memory = context.devices[0].default_memory
        array = rng.standard_normal(3).astype(np.float32)
        product, number = run(compile(context, CALLBACK), put(memory, array), put(memory, np.array(200, np.uint8)))
        np.testing.assert_array_equal(get(product), array * 200)
        assert get(number).tolist() == [200, 200]
    shapes = [((3,), ElementType.F32), ((), ElementType.U8), ((3,), ElementType.F32), ((2,), ElementType.S32)]
    assert seen == [(7, shapes)]


def test_a_host_callback_may_run_programs_on_its_own_device(backend: Backend) -> None:
    nested: list[np.ndarray] = []

    def callback(_identifier: int, arguments: Sequence[HostArray], results: Sequence[HostArray]) -> None:
        argument = put(context.devices[0].default_memory, np.frombuffer(arguments[0].data, np.float32))
        nested.append(get(run(inner, argument)[0]))
        results[0].data[:] = bytes(12)

    with Context(backend, host_callback=callback) as context:
        memory = context.devices[0].default_memory
        inner, outer = compile(context, add_one(3, donate=False)), compile(context, CALLBACK)
        arguments = put(memory, np.ones(3, np.float32)), put(memory, np.array(1, np.uint8))
        for product, _ in [run(outer, *arguments) for _ in range(5)]:
            product.wait(60)
    assert [array.tolist() for array in nested] == [[2, 2, 2]] * 5


def test_a_failing_host_callback_fails_the_program(backend: Backend) -> None:
    def callback(_identifier: int, _arguments: Sequence[HostArray], _results: Sequence[HostArray]) -> None:
        raise FlagosStatusError(StatusCode.OUT_OF_RANGE, "the host does not like it")

    with Context(backend, host_callback=callback) as context:
        memory = context.devices[0].default_memory
        arguments = put(memory, np.ones(3, np.float32)), put(memory, np.array(1, np.uint8))
        with pytest.raises(FlagosStatusError, match="the host does not like it") as failure:
            run(compile(context, CALLBACK), *arguments)
        assert failure.value.code == StatusCode.OUT_OF_RANGE


def test_without_a_callback_such_programs_are_refused(context: Context) -> None:
    with pytest.raises(FlagosStatusError, match="gave no host_callback") as refused:
        compile(context, CALLBACK)
    assert refused.value.code == StatusCode.FAILED_PRECONDITION


def test_threads_share_everything(context: Context, rng: np.random.Generator) -> None:
    executable = compile(context, add_one(1000))
    arrays = rng.standard_normal((8, 1000)).astype(np.float32)
    wrong: list[int] = []

    def work(number: int) -> None:
        memory = context.devices[number % 3].default_memory
        for _ in range(50):
            buffer = put(memory, arrays[number])
            for _ in range(3):
                (buffer,) = run(executable, buffer, device=context.devices[number % 3])
            if not np.array_equal(get(buffer), arrays[number] + 1 + 1 + 1):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [device.memory_stats().bytes_in_use for device in context.devices] == [0, 0, 0]


def test_a_profile_shows_what_ran(context: Context, memory: Memory) -> None:
    context.profiler_start()
    with pytest.raises(FlagosStatusError, match="runs already"):
        context.profiler_start()
    executable = compile(context, add_one(4))
    run(executable, put(memory, np.zeros(4, np.float32)))[0].to_host()
    trace = json.loads(context.profiler_stop())
    found = {(event["cat"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    expected = {("compile", "compile add_one"), ("execute", "add_one"), ("transfer", "buffer_from_host")}
    assert expected | {("transfer", "buffer_to_host")} <= found
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")
    [program] = [event["args"] for event in trace["traceEvents"] if event["name"] == "flagos_program"]
    [step] = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert program["facts"]["name"] == "add_one" and step["args"]["program"] == program["program"]
    assert str(step["args"]["step"]) in program["facts"]["steps"]
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"} == {"memory in use, device 0"}
    with pytest.raises(FlagosStatusError, match="does not run"):
        context.profiler_stop()


SINGULAR_VALUES = r"""
ENTRY main {
  x = f32[4,4] parameter(0)
  ROOT values = f32[4] custom-call(x), custom_call_target="flagos.svd", backend_config="{\"compute_uv\": false}"
}"""


def test_a_tensor_that_a_kernel_keeps_outlives_the_context(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    # Kernels leave tensors in reference cycles, which the garbage collector may find long after the host closed all.
    # That the memory's statistics are still there when the tensor goes is for a sanitizer to see.
    kept: list[torch.Tensor] = []
    original = torch.linalg.svdvals

    def keeping(a: torch.Tensor) -> torch.Tensor:
        kept.append(a)
        return original(a)

    monkeypatch.setattr(torch.linalg, "svdvals", keeping)
    # Without SciPy torch computes them.
    monkeypatch.setattr("flagos_backend.codegen.cpu.lower.decompositions.lapack_is_available", lambda: False)
    x = (np.eye(4) * rng.uniform(1, 2, 4)).astype(np.float32)
    with Context(backend) as context:
        (result,) = run(compile(context, SINGULAR_VALUES), put(context.addressable_devices[0].default_memory, x))
        np.testing.assert_allclose(get(result), -np.sort(-x.diagonal()), rtol=1e-6)
        result.close()
    np.testing.assert_array_equal(kept[0].squeeze(0).numpy(), x)
    kept.clear()
