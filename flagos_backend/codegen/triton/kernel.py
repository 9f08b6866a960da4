"""A region as a kernel that can be launched. The end of codegen for accelerators; runtime/accelerator calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from flagos_backend.codegen.loop_pass_manager import run_loop_pipeline
from flagos_backend.codegen.triton import sources
from flagos_backend.codegen.triton.elements import Dialect
from flagos_backend.codegen.triton.loop_pipeline import triton_loop_pipeline
from flagos_backend.codegen.triton.split import Split, partial_size, split
from flagos_backend.codegen.triton.tiling import Tiling, Walk, choose
from flagos_backend.codegen.triton.writer import Partial, write_kernel
from flagos_backend.devices.target import Target
from flagos_backend.errors import KernelBuildFailed, KernelLaunchFailed
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import launching
from flagos_backend.loop_ir.region import Apply, Load, Region
from flagos_backend.process.torch_loading import torch

# Up to how many points a kernel lets the next one start as soon as all its own programs have. That one waits on the
# multiprocessors, which costs a longer kernel more than the start of the next one takes.
_SHORT = 1 << 18
# What a program may have, of every vendor's chips.
_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel function of a source. ``arguments``: buffers by number, inputs then outputs then workspaces.
    ``starts_early``: it may be launched while the kernel ahead of it ends, for which it waits itself."""

    function: str
    grid: int
    warps: int
    arguments: tuple[int, ...]
    starts_early: bool = False

    @property
    def flags(self) -> dict[str, Any]:
        """For Triton's launch."""
        return {"num_warps": self.warps, **({"launch_pdl": True} if self.starts_early else {})}


@dataclass(eq=False)
class RegionKernel:
    """Computes ``region`` on the current stream of the current device: ``kernel(inputs, outputs)``.

    Arrays are given in the order of ``inputs`` and ``outputs``, dense and row major in their storage type, aligned to
    16 bytes. Compiles at the first call, which any thread may make. Raises KernelBuildFailed and KernelLaunchFailed.
    ``tiling`` is that of its first function. ``text`` says what it is; ``choice`` why it was taken of several, if so.
    """

    region: Region = field(repr=False)
    tiling: Tiling = field(repr=False)
    inputs: tuple[Instruction, ...]
    outputs: tuple[Instruction, ...]
    source: str = field(repr=False)
    launches: tuple[Launch, ...]
    workspaces: tuple[ArrayShape, ...]
    options: dict[str, Any]
    text: str
    walks: int
    choice: str = field(default="", init=False)
    _functions: list[Callable[..., Any]] = field(default_factory=list, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        functions = self._functions or self._build()
        buffers = [_as_pointer(tensor) for tensor in (*inputs, *outputs)]
        for shape in self.workspaces:
            buffers.append(torch.empty(shape.dims, dtype=dtype_of(shape.element_type), device=outputs[0].device))
        try:
            for function, launch in zip(functions, self.launches, strict=True):
                arguments = [buffers[number] for number in launch.arguments]
                launching.launch(function, (launch.grid, 1, 1), *arguments, **launch.flags, **self.options)
        except Exception as error:  # the vendor's compiler and driver raise what they like
            raise KernelLaunchFailed(
                kernel=self.text, source=sources.path_of(self.source), reason=_reason(error)
            ) from error

    def compile(self) -> None:
        """Compiles for the current device, and loads, without running. Raises KernelBuildFailed."""
        for launch in self.launches:
            self.compile_for(launch)

    def compile_for(self, launch: Launch) -> None:
        """As ``compile``, of one of ``launches`` alone."""
        functions = self._functions or self._build()
        function = functions[self.launches.index(launch)]
        try:
            launching.compile_only(function, (launch.grid, 1, 1), self._dtypes(launch), launch.flags | self.options)
        except Exception as error:  # the vendor's compiler raises what it likes
            raise self._build_failed(error) from error

    def compiled_from(self, launch: Launch) -> tuple[object, ...]:
        """What the binary of a launch is made of: equal for those that share one."""
        flags, options = tuple(launch.flags.items()), tuple(self.options.items())
        return self.source, launch.function, tuple(self._dtypes(launch)), flags, options

    def _dtypes(self, launch: Launch) -> list[torch.dtype]:
        buffers = [array_of(buffer) for buffer in (*self.inputs, *self.outputs)] + list(self.workspaces)
        dtypes = [dtype_of(buffers[number].element_type) for number in launch.arguments]
        return [torch.int64 if dtype.is_complex else dtype for dtype in dtypes]

    def may_overwrite(self, output: Instruction, source: Instruction) -> bool:
        """Whether ``output`` may lie where ``source`` does: each of its elements is read only at the point that then
        writes it, by the thread that does, once. What has one element for a whole row, all threads of a program read,
        and the first to be done would write."""
        loads = [e for e in self.region.expressions() if isinstance(e, Load) and e.source is source]
        stores = [s for s in self.region.stores if s.target is output]
        if self.workspaces or self.walks > 1 or len(stores) != 1 or not loads:
            return False
        (store,) = stores
        same_width = {e.element_type.bytes for e in loads} == {store.value.element_type.bytes}
        one_for_each_point = all(store.index.coefficients[d] for d, size in enumerate(self.region.dims) if size > 1)
        return same_width and one_for_each_point and all(load.index == store.index for load in loads)

    def _build(self) -> list[Callable[..., Any]]:
        with self._lock:
            if not self._functions:
                try:
                    module = sources.load(self.source)
                    # At once: who finds some of them takes them for all.
                    self._functions[:] = [getattr(module, launch.function) for launch in self.launches]
                except Exception as error:  # whatever importing Triton or running the source raises
                    raise self._build_failed(error) from error
        return self._functions

    def _build_failed(self, error: Exception) -> KernelBuildFailed:
        return KernelBuildFailed(kernel=self.text, source=sources.path_of(self.source), reason=_reason(error))


def prepare(region: Region, target: Target, walk: Walk = Walk.ALONE, *, excess_precision: bool = False) -> RegionKernel:
    """The kernel of ``region`` on ``target``; ``walk`` as of ``choose``, ``excess_precision`` as in
    codegen/transforms/excess_precision.py. Cheap: nothing is compiled yet."""
    dialect = Dialect.LIBDEVICE if target.facts.math_library else Dialect.PLAIN
    (region,) = run_loop_pipeline(triton_loop_pipeline(target, excess_precision), region)
    tiling = choose(region, target, walk=walk)
    inputs = tuple(dict.fromkeys(e.source for e in region.expressions() if isinstance(e, Load)))
    outputs = tuple(dict.fromkeys(store.target for store in region.stores))
    names = {buffer: f"in{n}" for n, buffer in enumerate(inputs)}
    names |= {buffer: f"out{n}" for n, buffer in enumerate(outputs)}
    halves = split(region, tiling)
    numbers = {buffer: n for n, buffer in enumerate((*inputs, *outputs, *(halves.buffers.values() if halves else ())))}
    kernels = _Kernels(dialect, names, numbers, target)
    if halves is None:
        kernels.add("kernel", region, tiling)
    else:
        kernels.add_halves(region, tiling, halves)
    text = describe(region, tiling)
    workspaces = tuple(array_of(buffer) for buffer in halves.buffers.values()) if halves else ()
    options = dict(target.facts.launch_options)
    functions = "\n\n".join(["", *kernels.functions])
    source = _head(dialect, _work(region), functions) + functions
    launches = tuple(kernels.launches)
    return RegionKernel(region, tiling, inputs, outputs, source, launches, workspaces, options, text, kernels.walks)


class _Kernels:
    """The functions of one source, and how to launch them."""

    def __init__(
        self, dialect: Dialect, names: dict[Instruction, str], numbers: dict[Instruction, int], target: Target
    ) -> None:
        self.dialect, self.names, self.numbers, self.target = dialect, names, numbers, target
        self.functions: list[str] = []
        self.launches: list[Launch] = []
        self.walks = 0

    def add(self, name: str, region: Region, tiling: Tiling, halves: Split | None = None) -> None:
        buffers = [e.source for e in region.expressions() if isinstance(e, Load)]
        buffers += [store.target for store in region.stores]
        used = {buffer: self.names[buffer] for buffer in buffers}
        partials = {f: Partial(b.name, partial_size(b)) for f, b in halves.buffers.items()} if halves else {}
        early = self.target.launches_early and not tiling.fills_device
        first = ["nv.wait_for_previous()"] if early else []
        if early and prod(region.dims) <= _SHORT:
            first.append("nv.start_next()")
        written = write_kernel(name, region, tiling, self.dialect, used, partials, first)
        self.functions.append(written.source)
        self.walks = max(self.walks, written.walks)
        arguments = [self.numbers[buffer] for buffer in used]
        arguments += [self.numbers[buffer] for buffer in (halves.buffers.values() if halves else ())]
        warps = min(tiling.warps, _MAX_THREADS // self.target.warp_size)
        self.launches.append(Launch(name, tiling.grid, warps, tuple(arguments), early))

    def add_halves(self, region: Region, tiling: Tiling, halves: Split) -> None:
        self.names |= {buffer: buffer.name for buffer in halves.buffers.values()}
        self.add("kernel", region, tiling, halves)
        self.add("finish", halves.rest, choose(halves.rest, self.target, splits=False))


def array_of(instruction: Instruction) -> ArrayShape:
    """The shape of a buffer."""
    assert isinstance(instruction.shape, ArrayShape), instruction
    return instruction.shape


def _head(dialect: Dialect, text: str, functions: str) -> str:
    lines = [f'"""A region: {text}."""', "", "import triton", "import triton.language as tl"]
    if dialect is Dialect.LIBDEVICE:
        lines.append("from triton.language.extra import libdevice")
    lines.append("")
    if "cf." in functions:
        lines.append("from flagos_backend.codegen.triton import complex_formulas as cf")
    lines.append("from flagos_backend.codegen.triton import formulas as fm")
    if "nv." in functions:
        lines.append("from flagos_backend.codegen.triton import nvidia_formulas as nv")
    return "\n".join([*lines, ""])


def describe(region: Region, tiling: Tiling) -> str:
    """One line for explain."""
    names = ", ".join(dict.fromkeys(store.target.name for store in region.stores))
    shape = "x".join(map(str, region.dims)) or "scalar"
    blocks = "x".join(str(axis.block) for axis in tiling.axes)
    parts = f", {tiling.parts} parts" if tiling.parts > 1 else ""
    return f"triton {names} over {shape} in blocks of {blocks}{parts}: {_work(region)}"


def _work(region: Region) -> str:
    """What a source says of itself: no names, so that equal layers of a model share one."""
    operations = [str(e.opcode) for e in region.expressions() if isinstance(e, Apply)]
    reductions = [f"reduce-{f.combine}" for f in region.reductions]
    return " ".join([*reductions, *operations[:12], *(["..."] if len(operations) > 12 else [])]) or "copy"


def _as_pointer(tensor: torch.Tensor) -> torch.Tensor:
    """Complex elements go as integers of their width, as kernels hold them."""
    return tensor.view(torch.int64) if tensor.is_complex() else tensor


def _reason(error: BaseException) -> str:
    """What happened, down to the first cause: a compiler's message names only the line."""
    causes = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "; because ".join(causes)


__all__ = ["Launch", "RegionKernel", "prepare"]
