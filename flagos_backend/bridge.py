"""What libflagos_backend.so calls: compile, load, and the callables that run one device's share of a launch.

The other side is native/python_program.cc. Only plain values, DLPack capsules and tensors cross.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import WeakValueDictionary

from flagos_backend.codegen.cpu.lapack import lapack_addresses
from flagos_backend.collectives import InProcessCommunicator
from flagos_backend.compile import compiler, stages
from flagos_backend.compile.compiler import CompiledProgram
from flagos_backend.devices import HOST, discovery
from flagos_backend.errors import FlagosBackendError, Interrupted, StatusCode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, leaves
from flagos_backend.kernels.own_calls import OwnCalls
from flagos_backend.kernels.reference.registry import HostCallback, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process import defects, known_programs, logs, progress, torch_loading
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime import serialization
from flagos_backend.runtime.accelerator.recordings import Recordings

if TYPE_CHECKING:
    from flagos_backend.collectives.context_peers import ContextPeers
    from flagos_backend.collectives.multi_process import MultiProcessCommunicator
    from flagos_backend.compile.explanation import Explanation
    from flagos_backend.devices.accelerator import Accelerator
    from flagos_backend.runtime.accelerator.conditional import NativeClose, NativeOpen, NativePrepare
    from flagos_backend.runtime.accelerator.graphs import NativeCompare, NativeDrop, NativeLaunch, NativeMake
    from flagos_backend.runtime.accelerator.segments import Recorder
    from flagos_backend.runtime.plan import Plan

    LaunchCommunicator = InProcessCommunicator | MultiProcessCommunicator

__all__ = [
    "attach",
    "compile_program",
    "describe_exception",
    "explanation",
    "from_dlpack",
    "load_program",
    "open_peers",
    "to_dlpack",
]

# (build id, address of the native context, whether the host can be called back, whether its devices are accelerators,
# what reaches the other processes)
Facts = tuple[str, int, int, int, "ContextPeers | None"]
# (address, element type, dims): a host array as the native side takes it
HostArray = tuple[int, int, tuple[int, ...]]
NativeHostCallback = Callable[[int, int, tuple[HostArray, ...], tuple[HostArray, ...]], tuple[int, str] | None]
# (address of the native context, key, timeout in ms) -> value or status code; (context, key, value) -> status code
NativeGet = Callable[[int, str, int], bytes | int]
NativePut = Callable[[int, str, bytes], int]
# (category, name, begin, end, number of the step or -1); times in nanoseconds of the monotonic clock
Span = tuple[str, str, int, int, int]
# (address of the native context) -> whether a profiler listens; (context, device or -1, fingerprint or "", spans)
NativeRecording = Callable[[int], int]
NativeRecord = Callable[[int, int, str, tuple[Span, ...]], None]
Payloads = tuple[tuple[str, bytes], ...]
# execute(arguments, in place, launch): empties the list of tensors and returns the list of results.
Execute = Callable[[list[Any], int, "LaunchCommunicator | None"], list[Any]]
# call(number, operands, results, launch): library call ``number`` of the native program. Fills ``results`` and returns
# those for which it has None; empties ``operands``.
CallLibrary = Callable[[int, list[torch.Tensor], list[torch.Tensor | None], "LaunchCommunicator | None"], list[Any]]

# What runs, by fingerprint, for whoever explains it.
_programs: WeakValueDictionary[str, CompiledProgram] = WeakValueDictionary()
_native_host_callback: NativeHostCallback | None = None
_native_store: tuple[NativeGet, NativePut] | None = None
_native_replays: tuple[NativeCompare, NativeMake, NativeLaunch, NativeDrop] | None = None
_native_conditionals: tuple[NativePrepare, NativeOpen, NativeClose] | None = None
_native_profiler: tuple[NativeRecording, NativeRecord] | None = None


# What torch.utils.dlpack and torch.inference_mode wrap; those wrappers alone cost more than running a small program.
def from_dlpack(capsule: Any) -> torch.Tensor:
    return torch._C._from_dlpack(capsule)


def to_dlpack(tensor: torch.Tensor) -> Any:
    return torch._C._to_dlpack(tensor)


def _inference_mode() -> Any:
    return torch._C._InferenceMode(True)


class Artifact(enum.IntEnum):
    """FLAGOS_ARTIFACT_* of the plugin ABI."""

    SERIALIZED = 0
    OPTIMIZED_PROGRAM = 1
    EXPLANATION = 2
    COMPILE_OPTIONS = 3


class HostError(Exception):
    """What the host's callback reported; passed on as it is."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def attach(
    host_callback: NativeHostCallback,
    key_value_get: NativeGet,
    key_value_put: NativePut,
    compare_captures: NativeCompare,
    make_replay: NativeMake,
    launch_replay: NativeLaunch,
    drop_replay: NativeDrop,
    prepare_conditionals: NativePrepare,
    open_conditional: NativeOpen,
    close_conditional: NativeClose,
    recording: NativeRecording,
    record: NativeRecord,
) -> None:
    """Called once by the native side, before anything else."""
    global _native_host_callback, _native_store, _native_replays, _native_conditionals, _native_profiler
    logs.follow(os.environ.get(logs.VARIABLE, ""))
    _native_host_callback = host_callback
    _native_store = key_value_get, key_value_put
    _native_replays = compare_captures, make_replay, launch_replay, drop_replay
    _native_conditionals = prepare_conditionals, open_conditional, close_conditional
    _native_profiler = recording, record


def open_peers(context: int, device_processes: tuple[int, ...], accelerated: int) -> ContextPeers:
    """What the devices of a native context reach each other through, where they do not share memory:
    ``device_processes`` has the process of each of them."""
    # torch.distributed is imported for those who use it.
    from flagos_backend.collectives.context_peers import ContextPeers

    assert _native_store is not None
    get, put = _native_store
    device_type = discovery.opened(0).device.type if accelerated else "cpu"
    reads, writes = functools.partial(get, context), functools.partial(put, context)
    return ContextPeers(device_processes, reads, writes, device_type, bool(accelerated))


def compile_program(source: bytes, facts: Facts) -> tuple[tuple[Any, ...], Runner, int]:
    """The description that python_program.cc reads, in its order, the runner, and whether devices may meet in what it
    records. Raises what compiler does."""
    build_id, context, can_call_host, accelerated, peers = facts
    target = HOST
    if accelerated:
        # The host does without.
        from flagos_backend.runtime.accelerator.early import load_beside

        target = discovery.opened(0).target
        load_beside(discovery.opened(0))
    with stages.listen() as heard:
        try:
            with OwnCalls(), progress.shown():  # kernels are measured
                compiled = compiler.compile_program(source, build_id, bool(can_call_host), target)
        finally:
            _record(context, -1, "", tuple(("compile stage", s.name, s.begin, s.end, -1) for s in heard))
    _programs[compiled.fingerprint] = compiled
    runner = Runner(compiled, build_id, context, bool(can_call_host), peers)
    return _describe(compiled), runner, int(runner.records_rendezvous)


def _record(context: int, device: int, fingerprint: str, spans: tuple[Span, ...]) -> None:
    """Where a profiler listens."""
    assert _native_profiler is not None
    _native_profiler[1](context, device, fingerprint, spans)


def explanation(fingerprint: str) -> Explanation | None:
    """Of an executable of this backend in this process; None of any other."""
    compiled = _programs.get(fingerprint)
    if compiled is None:
        return None
    # Few programs are asked about.
    from flagos_backend.compile.explanation import explanation_of

    return explanation_of(compiled)


known_programs.answered_by(explanation)


def load_program(serialized: bytes, device_ids: Sequence[int], facts: Facts) -> tuple[tuple[Any, ...], Runner, int]:
    """The executable that ``Artifact.SERIALIZED`` gave, for other devices unless ``device_ids`` is empty. Raises what
    serialization.deserialize does."""
    source = serialization.deserialize(serialized, facts[0])
    if device_ids:
        source = serialization.reassign(source, device_ids)
    return compile_program(source, facts)


def describe_exception(error: BaseException) -> tuple[int, str, Payloads]:
    """(status code, message, payloads) of any exception."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted()
    if isinstance(error, FlagosBackendError):
        return int(error.code), str(error), tuple(error.payloads.items())
    if isinstance(error, HostError):
        return error.code, str(error), ()
    library = torch_loading.loaded()
    if library is not None and isinstance(error, library.OutOfMemoryError):
        message = f"The device has no memory left: {error}. Free buffers, donate arguments, or run a smaller program."
        return int(StatusCode.RESOURCE_EXHAUSTED), message, ()
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        message = f"The host has no memory left: {error}. Free buffers, or run a smaller program."
        return int(StatusCode.RESOURCE_EXHAUSTED), message, ()
    return int(StatusCode.INTERNAL), defects.describe(error), ()


def _describe(compiled: CompiledProgram) -> tuple[Any, ...]:
    program, module = compiled.program, compiled.module
    parameter_sizes = [len(tuple(leaves(p.shape))) for p in module.entry.parameters]
    root = module.entry.root.shape
    output_sizes = [1] if isinstance(root, ArrayShape) else [len(tuple(leaves(e))) for e in root.elements]
    return (
        module.name,
        compiled.fingerprint,
        program.num_replicas,
        program.num_partitions,
        tuple(number for row in program.device_assignment for number in row),
        _shapes(compiled.arguments),
        _shapes(compiled.outputs),
        _spread(program.argument_memory_kinds, parameter_sizes) or ("",) * len(compiled.arguments),
        _spread(program.output_memory_kinds, output_sizes) or ("",) * len(compiled.outputs),
        _spread(program.argument_shardings, parameter_sizes),
        _spread(program.output_shardings, output_sizes),
        compiled.argument_aliases,
        compiled.donors,
        0,  # the steps are Python objects: there is no generated code
        compiled.temporary_bytes,
        compiled.peak_bytes,
        compiled.cost.properties(compiled.target.roofline),
        int(compiled.is_small),
        int(compiled.only_copies),
        int(compiled.calls_host),
        _native(compiled),
    )


def _native(compiled: CompiledProgram) -> tuple[Any, ...]:
    """The native program: bytecode, constants, for each library call the shapes of operands and results and what
    devices of one process do in its place, if they may, the addresses of its machine code, and those of LAPACK; or
    ()."""
    if compiled.native is None:
        return ()
    code = compiled.native.code
    collectives = (native and native.plain() for native in compiled.native.collectives)
    calls = tuple(
        (_shapes(call.operands), _shapes(call.results), plain or ())
        for call, plain in zip(code.calls, collectives, strict=True)
    )
    functions = compiled.native.machine_code
    addresses = () if functions is None else functions.addresses
    return code.bytecode, code.constants, calls, addresses, lapack_addresses()


def _shapes(shapes: Sequence[ArrayShape]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((int(shape.element_type), shape.dims) for shape in shapes)


def _spread(values: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, ...]:
    """What is said of a parameter or a result is said of each array in it."""
    return tuple(value for value, size in zip(values, sizes, strict=bool(values)) for _ in range(size))


class Runner:
    """Runs a compiled program. Kept by the native executable; every method may be called from several threads."""

    def __init__(
        self, compiled: CompiledProgram, build_id: str, context: int, can_call_host: bool, peers: ContextPeers | None
    ) -> None:
        self._compiled = compiled
        self._peers = peers
        self._devices = tuple(number for row in compiled.program.device_assignment for number in row)
        self._build_id = build_id
        self._context = context
        self._can_call_host = can_call_host
        # By local ordinal: each device's launches, as if there were no others.
        self._alone: dict[int, Run] = {}
        self._recordings = Recordings(compiled.module, compiled.donors, compiled.outcomes, peers)

    def _host_callback(self, device: torch.device) -> HostCallback | None:
        return _host_callback(self._context, device) if self._can_call_host else None

    def begin(self) -> LaunchCommunicator:
        """Where the devices of one launch meet."""
        if self._peers is None:
            return InProcessCommunicator()
        return self._peers.communicator(self._devices)

    def bind(
        self, device_ordinal: int, local_ordinal: int, replica_id: int, partition_id: int
    ) -> tuple[Execute, CallLibrary]:
        """The program on one device, as one participant: all of it as Python steps, and the library calls of its native
        form. ``local_ordinal`` counts this process's devices."""
        compiled = self._compiled
        program = compiled.program
        accelerator = None if compiled.target.is_host else discovery.opened(local_ordinal)
        guard = contextlib.nullcontext if accelerator is None else accelerator.guard

        @functools.cache
        def solo() -> Run:
            device = torch.device("cpu") if accelerator is None else accelerator.device
            callback = self._host_callback(device)
            run = self._solo(device_ordinal, replica_id, partition_id, device)
            return replace(run, host_callback=callback, asynchronous=accelerator is not None)

        if accelerator is not None or program.process_groups is not None:
            # A native program on the host does without torch until it calls a library.
            self._alone[local_ordinal] = solo()

        def run_of(launch: LaunchCommunicator | None) -> Run:
            if launch is None:
                return solo()
            replicas, partitions = program.num_replicas, program.num_partitions
            return replace(solo(), num_replicas=replicas, num_partitions=partitions, communicator=launch)

        def execute(arguments: list[Any], in_place: int, launch: LaunchCommunicator | None) -> list[Any]:
            run = run_of(launch)
            with _inference_mode(), OwnCalls(), guard():
                meets = None if self._peers is None else cast("MultiProcessCommunicator | None", launch)
                recorded = self._recordings.usable(local_ordinal, bool(in_place), run, meets)
                plan = recorded.plan if recorded else compiled.plans(run.device).choose(bool(in_place))
                return self._run(plan, run, arguments)

        def call(
            number: int,
            operands: list[torch.Tensor],
            results: list[torch.Tensor | None],
            launch: LaunchCommunicator | None,
        ) -> list[Any]:
            assert compiled.native is not None
            with _inference_mode():
                return compiled.native.calls[number](run_of(launch), operands, results)

        return execute, call

    def give_up(
        self, number: int, participant: int, missing: tuple[int, ...], launch: InProcessCommunicator
    ) -> NoReturn:
        """Raises why a collective of the native program failed on the native side: library call ``number``, which
        waited in vain for the participants ``missing``, or was told that another device failed."""
        assert self._compiled.native is not None
        launch.give_up(f"%{self._compiled.native.code.calls[number].instruction.name}", participant, missing)

    def _run(self, plan: Plan, run: Run, arguments: list[Any]) -> list[Any]:
        """Where a profiler listens, each step is a span: the host's time, which on an accelerator enqueues."""
        assert _native_profiler is not None
        if not _native_profiler[0](self._context):
            return plan.run(run, arguments)
        times: list[int] = []
        results = plan.run(run, arguments, times=times)
        # Other plans of the program have other steps than the one that is explained.
        numbered = plan is self._compiled.plans(run.device).donating
        spans = tuple(
            ("step", step.text, begin, end, number if numbered else -1)
            for number, (step, (begin, end)) in enumerate(zip(plan.steps, itertools.pairwise(times), strict=True))
            if step.enqueues
        )
        _record(self._context, run.device_ordinal, self._compiled.fingerprint, spans)
        return results

    def trace_notes(self) -> tuple[str, tuple[str, ...]]:
        """What a profiler says of the program: trace_notes.py."""
        # Few programs are traced.
        from flagos_backend.compile.trace_notes import trace_notes

        return trace_notes(self._compiled)

    def _solo(self, device_ordinal: int, replica_id: int, partition_id: int, device: torch.device) -> Run:
        """The launch of one device."""
        groups = self._compiled.program.process_groups
        if groups is None:
            # Alone, a collective meets only itself.
            return Run(device_ordinal, replica_id, partition_id, 1, 1, device, InProcessCommunicator())
        # torch.distributed is imported for those who use it.
        from flagos_backend.collectives.host_groups import HostGroups
        from flagos_backend.collectives.multi_process import MultiProcessCommunicator

        communicator = MultiProcessCommunicator(HostGroups(groups, device.type))
        return Run(device_ordinal, groups.rank, 0, groups.size, 1, device, communicator)

    @property
    def records_rendezvous(self) -> bool:
        """Whether devices may meet in what is recorded of the program."""
        return self._recordings.meet

    def capture(self, local_ordinal: int, accelerator: int) -> tuple[Any, ...]:
        """Has the program recorded on a device that it was bound to, at the address of its native accelerator.

        Returns what became of it, and if it can be replayed as a whole: what keeps the graph, its native replay, and
        for each output the argument that it is written over, or -1. If it can be in parts, it runs so from now on.
        """
        from flagos_backend.runtime.accelerator.graphs import GraphReplay

        opened = discovery.opened(local_ordinal)
        record = recorder_of(opened, accelerator, self._launched(local_ordinal))
        if record is None:
            outcome = "not replayed: this device has no graphs that can be patched"
            self.captured(local_ordinal, outcome)
            return (outcome,)
        with _inference_mode(), OwnCalls(), opened.guard():
            division = self._recordings.record(local_ordinal, self._compiled.plans(opened.device).donating, record)
        whole = division.whole
        if not isinstance(whole, GraphReplay):
            return (division.summary(),)
        return division.summary(), whole, whole.handle, whole.overwritten

    def launched(self, local_ordinal: int) -> float:
        """The device was given the whole program as it was recorded, in which it meets others. Returns for how many
        seconds nobody has to say so again."""
        assert self._peers is not None
        program = self._compiled.program
        run = self._alone[local_ordinal]
        run = replace(run, num_replicas=program.num_replicas, num_partitions=program.num_partitions)
        rendezvous = run.rendezvous(self._compiled.module.name)
        with discovery.opened(local_ordinal).guard():
            return self._peers.launched(rendezvous, self._devices)

    def _launched(self, local_ordinal: int) -> Run:
        """A launch as what is recorded of it may read it."""
        program = self._compiled.program
        run = self._alone[local_ordinal]
        if len(self._devices) == 1:
            return run
        communicator = self._peers.communicator(self._devices) if self._peers else run.communicator
        replicas, partitions = program.num_replicas, program.num_partitions
        return replace(run, num_replicas=replicas, num_partitions=partitions, communicator=communicator)

    def captured(self, local_ordinal: int, outcome: object) -> None:
        """What became of the capture, as text for explain."""
        self._recordings.note(local_ordinal, outcome)

    def artifact(self, kind: int) -> bytes:
        """The bytes of one of ``Artifact``."""
        compiled = self._compiled
        match Artifact(kind):
            case Artifact.SERIALIZED:
                return serialization.serialize(compiled.source, self._build_id)
            case Artifact.OPTIMIZED_PROGRAM:
                return compiled.optimized_program()
            case Artifact.EXPLANATION:
                return compiled.explain().encode()
            case Artifact.COMPILE_OPTIONS:
                return compiled.program.compile_options


def recorder_of(opened: Accelerator, accelerator: int, run: Run) -> Recorder | None:
    """What records plans on a device; None when its graphs cannot be patched."""
    if not opened.handles()[0]:
        return None
    assert _native_replays is not None and _native_conditionals is not None
    from flagos_backend.runtime.accelerator.conditional import NativeConditionals
    from flagos_backend.runtime.accelerator.graphs import GraphRecorder, NativeReplays

    return GraphRecorder(NativeReplays(*_native_replays), NativeConditionals(accelerator, *_native_conditionals), run)


def _host_callback(context: int, device: torch.device) -> HostCallback:
    """``Run.host_callback`` for the programs of one native context on ``device``: its arrays come to the host first."""

    def call(
        identifier: int, arguments: Sequence[torch.Tensor], shapes: Sequence[Shape], results: Sequence[Shape]
    ) -> list[torch.Tensor]:
        assert _native_host_callback is not None
        inputs = [argument.cpu().contiguous() for argument in arguments]
        arrays = [_array(shape) for shape in results]
        outputs = [torch.empty(shape.dims, dtype=dtype_of(shape.element_type)) for shape in arrays]
        error = _native_host_callback(
            context,
            identifier,
            tuple(_host_array(tensor, _array(shape)) for tensor, shape in zip(inputs, shapes, strict=True)),
            tuple(_host_array(tensor, shape) for tensor, shape in zip(outputs, arrays, strict=True)),
        )
        if error is not None:
            raise HostError(*error)
        return [output.to(device) for output in outputs]

    return call


def _array(shape: Shape) -> ArrayShape:
    if not isinstance(shape, ArrayShape) or shape.element_type is ElementType.TOKEN:
        raise TypeError(f"a host callback takes and returns arrays, not {shape}")
    return shape


def _host_array(tensor: torch.Tensor, shape: ArrayShape) -> HostArray:
    return tensor.data_ptr(), int(shape.element_type), shape.dims
