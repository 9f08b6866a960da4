"""From a serialized flagos.Program to a plan and what a host may ask about it. Called by bridge.py."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import flagos_backend
from flagos_backend.codegen.cpu.pipelines import cpu_emission_pipeline, cpu_loop_pipeline, native_pipeline
from flagos_backend.codegen.transforms.excess_precision import HALF
from flagos_backend.compile import machine_code
from flagos_backend.compile.native_part import NativePart, native_part
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.compile.stages import stage
from flagos_backend.devices import HOST, Target, discovery
from flagos_backend.errors import HostCallbackMissing, place_of
from flagos_backend.importer import Program, import_program, schema
from flagos_backend.importer.export import export_message
from flagos_backend.importer.options import allows_excess_precision
from flagos_backend.ir.attributes import CustomCallAttributes, WhileAttributes
from flagos_backend.ir.cost import Cost, cost_of, temporary_bytes
from flagos_backend.ir.effects import COLLECTIVES, HOST_CALLBACK
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, leaves
from flagos_backend.passes.pass_manager import (
    DISABLE_VARIABLE,
    PassContext,
    PassOptions,
    check_names,
    names,
    run_pipeline,
)
from flagos_backend.passes.pipelines import accelerator_pipeline, cpu_pipeline, pipeline_for
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.plan import Plan

logger = logging.getLogger("flagos_backend")

_COPIES = frozenset({Opcode.PARAMETER, Opcode.TUPLE, Opcode.COPY, Opcode.CONVERT, Opcode.RESHAPE})
# Beyond either a program takes longer than handing it to the device's thread.
_SMALL_STEPS = 24
_SMALL_SECONDS = 20e-6


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """``source`` is what was compiled; ``module`` what the passes made of it. Arguments and outputs are the arrays
    inside the entry computation's parameters and result, in order. ``excess_precision``: as in
    codegen/transforms/excess_precision.py."""

    source: bytes
    program: Program
    module: Module
    native: NativePart | None
    not_native: str
    fingerprint: str
    cost: Cost
    temporary_bytes: int
    target: Target = HOST
    excess_precision: bool = False
    notes: tuple[str, ...] = ()  # of the matching
    outcomes: dict[int, object] = field(default_factory=dict, repr=False)  # of capturing, by accelerator; as texts
    _plans: dict[torch.device, Plans] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def arguments(self) -> tuple[ArrayShape, ...]:
        return tuple(leaf for parameter in self.module.entry.parameters for leaf in leaves(parameter.shape))

    @functools.cached_property
    def outputs(self) -> tuple[ArrayShape, ...]:
        return tuple(leaves(self.module.entry.root.shape))

    @functools.cached_property
    def argument_aliases(self) -> tuple[int, ...]:
        """For each argument, the output that may take over its storage, or -1."""
        return _argument_aliases(self.module)

    @functools.cached_property
    def donors(self) -> tuple[int, ...]:
        """The arguments that a launch uses up."""
        return _donors(self.module)

    def plans(self, device: torch.device) -> Plans:
        """What runs the program on ``device`` where its native part does not."""
        plans = Plans(self.module, self.donors, device, self.target, self.excess_precision)
        return self._plans.setdefault(device, plans)

    @property
    def device(self) -> torch.device:
        """Where its first plan is made."""
        return torch.device("cpu") if self.target.is_host else discovery.opened(0).device

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether a run is short, and waits for nobody: it may take place in the thread that launches it."""
        if not self.target.is_host:
            return False
        waits = any(_may_wait(i) for computation in self.module.computations() for i in computation.instructions)
        return not waits and self.cost.steps <= _SMALL_STEPS and self.cost.seconds <= _SMALL_SECONDS

    @functools.cached_property
    def only_copies(self) -> bool:
        """Whether its results are its arguments, at most of another type or shape: it is how jnp.array copies."""
        return all(instruction.opcode in _COPIES for instruction in self.module.entry.instructions)

    @functools.cached_property
    def calls_host(self) -> bool:
        """Whether it has host callbacks."""
        return any(_calls_host(i) for computation in self.module.computations() for i in computation.instructions)

    @functools.cached_property
    def has_half_floats(self) -> bool:
        """Whether it computes 16-bit floats."""
        instructions = (i for computation in self.module.computations() for i in computation.instructions)
        return any(shape.element_type in HALF for i in instructions for shape in leaves(i.shape))

    @property
    def peak_bytes(self) -> int:
        arrays = sum(shape.num_bytes for shape in (*self.arguments, *self.outputs))
        reused = sum(s.num_bytes for s, alias in zip(self.arguments, self.argument_aliases, strict=True) if alias >= 0)
        return arrays - reused + self.temporary_bytes + self.library_bytes

    @property
    def library_bytes(self) -> int:
        """What library calls bring into a native program and it gives back, the most that lives at once."""
        return 0 if self.native is None else self.native.code.callee_allocated_bytes

    def optimized_program(self) -> bytes:
        """A serialized flagos.Program after the passes."""
        proto = schema.Program.FromString(self.source)
        proto.module.CopyFrom(export_message(self.module))
        return bytes(proto.SerializeToString())

    def explain(self) -> str:
        """What the program became, step by step."""
        cost = self.cost
        head = (
            f"{self.module.name}: {len(self.arguments)} arguments, {len(self.outputs)} outputs, "
            f"{self.program.num_replicas} replicas x {self.program.num_partitions} partitions\n"
            f"  {cost.flops:.4g} flops, {cost.transcendentals:.4g} transcendentals, {cost.bytes_accessed:.4g} bytes "
            f"accessed, {self.temporary_bytes} bytes of temporaries\n"
            f"  runs {'in the launching thread' if self.is_small else 'on the thread of its device'}\n"
        )
        if self.has_half_floats:
            digits = "keep float32's digits within a kernel" if self.excess_precision else "are rounded one by one"
            head += f"  16-bit results {digits}\n"
        if self.native is None:
            plan = self.plans(self.device).donating
            # Of accelerators.
            from flagos_backend.runtime.accelerator.segments import outline

            captures = [f"device {ordinal}: {outcome}" for ordinal, outcome in sorted(self.outcomes.items())]
            if not captures and not self.target.is_host:
                captures = [f"where graphs have conditional nodes, collectives, and can be patched: {outline(plan)}"]
            matched = "".join(f"  {note}\n" for note in (*self.notes, *captures))
            return f"{head}  runs as Python steps: {self.not_native}\n{matched}{plan.explain()}\n"
        calls = len(self.native.calls)
        return f"{head}  runs as native tiles with {calls} library calls\n" + "\n".join(self.native.code.steps) + "\n"


class Plans:
    """The plans of one program on one device, each made once, when it is first asked for."""

    def __init__(
        self,
        module: Module,
        donors: tuple[int, ...],
        device: torch.device,
        target: Target,
        excess_precision: bool = False,
    ) -> None:
        self._module = module
        self._excess_precision = excess_precision
        self._donors = donors
        self._device = device
        self._target = target
        self._made: dict[tuple[int, ...], Plan] = {}  # by what it writes over
        # Of this program alone: functools.cached_property has other programs wait (CPython 3.11), or makes two of one.
        self._lock = threading.Lock()

    def choose(self, in_place: bool) -> Plan:
        """``in_place``: whether nobody else holds the arguments that the launch gives up."""
        return self.donating if in_place or not self._donors else self.keeping

    @property
    def donating(self) -> Plan:
        """Writes over donated arguments."""
        return self._of(self._donors)

    @property
    def keeping(self) -> Plan:
        """For launches whose donated arguments somebody else still holds."""
        return self._of(())

    def _of(self, donors: tuple[int, ...]) -> Plan:
        plan = self._made.get(donors)
        if plan is None:
            with self._lock:
                plan = self._made.get(donors)
                if plan is None:
                    plan = self._made[donors] = self._build(donors)
        return plan

    def _build(self, donors: tuple[int, ...]) -> Plan:
        # Kernels prepare tables, which belong where they compute, and on an accelerator in the order of its compute
        # stream: whoever compiles may have another one.
        if self._target.is_host:
            with torch.inference_mode(), self._device:
                return build_plan(self._module.entry, donors, self._device)
        # Imports Triton, which the host does without.
        from flagos_backend.compile import accelerator_plan as plan

        with torch.inference_mode(), discovery.opened(self._device.index or 0).guard(), self._device:
            return plan.build(self._module.entry, donors, self._device, self._target, self._excess_precision)


def compile_program(source: bytes, build_id: str, can_call_host: bool, target: Target = HOST) -> CompiledProgram:
    """Imports, checks, optimizes and plans ``source``, a serialized flagos.Program, for the devices of ``target``.

    Raises the errors of errors.py: for malformed bytes, for whatever is not supported, and HostCallbackMissing for a
    program with host callbacks when the host has none.
    """
    with stage("import"):
        program = import_program(source)
    excess = allows_excess_precision(program.options)
    if not can_call_host:
        _refuse_host_callbacks(program.module)
    # With process groups every process has a program of its own, which may differ, and its participants are others.
    pipeline = pipeline_for(target, own_participants=program.process_groups is None)
    options = PassOptions.from_environment()
    if options.disabled:
        check_names(_pass_names(target), options.disabled, DISABLE_VARIABLE)
    with stage("passes"):
        optimized = run_pipeline(pipeline, program.module, PassContext(target), options)
    module = optimized.module
    native, not_native = None, f"the device is {target.vendor} {target.architecture}"
    if target.is_host:
        with stage("passes of native programs"):
            lowered = run_pipeline(native_pipeline(), module, PassContext(target), options).module
        with stage("loop nests and code"):
            devices = program.num_replicas, program.num_partitions
            native, not_native = native_part(lowered, _argument_aliases(module), excess, *devices)
    cost = cost_of(module.entry)
    temporaries = temporary_bytes(module.entry) if native is None else native.code.arena_bytes
    compiled = CompiledProgram(
        source,
        program,
        module,
        native,
        not_native,
        _fingerprint(source, build_id, target, excess, options.disabled),
        cost,
        temporaries,
        target,
        excess,
        optimized.notes,
    )
    if native is None:
        # What cannot run is refused now, not at the first launch.
        with stage("plan and kernels"):
            plan = compiled.plans(compiled.device).donating
        if not target.is_host:
            compiled = replace(compiled, temporary_bytes=plan.temporary_bytes)
        logger.debug("planned %s: %d steps; not native: %s", module.name, len(plan.steps), not_native)
    else:
        logger.debug("emitted %s: %d native steps, %d calls", module.name, len(native.code.steps), len(native.calls))
    return compiled


def _pass_names(target: Target) -> set[str]:
    """Of all passes and transforms of loop nests that may be left out."""
    graphs = cpu_pipeline(), native_pipeline(), accelerator_pipeline(target)
    loops = [*cpu_loop_pipeline(), *cpu_emission_pipeline()]
    if not target.is_host:
        # Imports Triton, which the host does without.
        from flagos_backend.codegen.triton.loop_pipeline import triton_loop_pipeline

        loops += triton_loop_pipeline(target)
    return {name for pipeline in graphs for name in names(pipeline)} | {step.name for step in loops}


def _fingerprint(
    source: bytes, build_id: str, target: Target, excess_precision: bool, disabled: Collection[str]
) -> str:
    """Hex digest of program, options, backend, target and passes left out: equal in every process."""
    proto = schema.Program.FromString(source)
    proto.module.ClearField("id")  # counts the modules of the process that made it
    digest = hashlib.sha256()
    facts = (
        flagos_backend.__version__,
        build_id,
        repr(target),
        f"excess precision {excess_precision}",
        f"machine code {target.is_host and machine_code.is_available()}",
        *sorted(disabled),
    )
    for part in (*(fact.encode() for fact in facts), proto.SerializeToString(deterministic=True)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _refuse_host_callbacks(module: Module) -> None:
    for computation in module.computations():
        for instruction in computation.instructions:
            if _calls_host(instruction):
                raise HostCallbackMissing(place=place_of(instruction))


def _calls_host(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    return isinstance(attributes, CustomCallAttributes) and attributes.target == HOST_CALLBACK


def _may_wait(instruction: Instruction) -> bool:
    if instruction.opcode is Opcode.WHILE:
        return instruction.attributes_as(WhileAttributes).trip_count is None
    return instruction.opcode in COLLECTIVES or _calls_host(instruction)


def _first_leaves(module: Module) -> tuple[int, ...]:
    """For each parameter, the number of the first of its arrays."""
    starts, start = [], 0
    for parameter in module.entry.parameters:
        starts.append(start)
        start += len(tuple(leaves(parameter.shape)))
    return tuple(starts)


def _leaf_number(module: Module, index: tuple[int, ...], shape_of: Instruction) -> int:
    """Which of the arrays in an instruction's shape the tuple index ``index`` leads to."""
    number, shape = 0, shape_of.shape
    for position in index:
        assert not isinstance(shape, ArrayShape), f"{module.name}: an alias leads into an array"
        number += sum(len(tuple(leaves(element))) for element in shape.elements[:position])
        shape = shape.elements[position]
    return number


def _argument_of(module: Module, parameter: int, index: tuple[int, ...]) -> int:
    return _first_leaves(module)[parameter] + _leaf_number(module, index, module.entry.parameters[parameter])


def _argument_aliases(module: Module) -> tuple[int, ...]:
    count = sum(len(tuple(leaves(parameter.shape))) for parameter in module.entry.parameters)
    aliases = [-1] * count
    for alias in module.aliases:
        argument = _argument_of(module, alias.parameter_number, alias.parameter_index)
        aliases[argument] = _leaf_number(module, alias.output_index, module.entry.root)
    return tuple(aliases)


def _donors(module: Module) -> tuple[int, ...]:
    donors = {_argument_of(module, alias.parameter_number, alias.parameter_index) for alias in module.aliases}
    starts = _first_leaves(module)
    for number in module.donors:
        donors.update(starts[number] + i for i in range(len(tuple(leaves(module.entry.parameters[number].shape)))))
    return tuple(sorted(donors))
