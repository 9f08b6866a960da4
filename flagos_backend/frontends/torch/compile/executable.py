"""A compiled program that takes and returns tensors without copying them: the launch path of torch.compile.

What a launch costs is what a small graph costs, so the launch itself is native: see torch/native/launcher.cc.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from flagos_backend.frontends.torch.compile import _launcher, placement, profiling
from flagos_backend.frontends.torch.compile.device_contexts import DeviceContext
from flagos_backend.frontends.torch.compile.dtypes import STORED_TYPE
from flagos_backend.frontends.torch.compile.layout import Strided
from flagos_backend.frontends.torch.compile.program import BuiltProgram, InputSpec, ResultSpec
from flagos_backend.frontends.torch.compile.rng_selection import rng_of_flagos
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Executable

# Runs a program on the inputs of its graph.
Launch = Callable[[list[Any]], list[torch.Tensor]]


def launcher_of(program: BuiltProgram, producers: Mapping[int, str] | None = None) -> Launch:
    """Compiles the program; gives what runs it on the inputs of its graph. ``producers``: the operator that gave an
    input, by position, where PyTorch ran one before the program.

    On the host the outputs are there when it returns; on an accelerator they are in the order of PyTorch's current
    stream. May be called from several threads at once; raises what the program's operators raise, and StridesDiffer
    before anything ran.
    """
    device_context = program.device_context
    assert program.serialized is not None and device_context is not None
    opened = device_context.context
    executable = Executable.compile(opened, program.serialized)
    memory = device_context.device.default_memory
    table, ffi = opened.api.backend.api, opened.api.ffi

    def address(handle: Any) -> int:
        return int(ffi.cast("uintptr_t", handle))

    specs = tuple(spec for _, spec in program.inputs)
    launcher = _launcher.Launcher(
        (address(table), address(opened.pointer), address(memory.pointer), address(executable.pointer)),
        # A program that names no device goes to the first.
        0 if device_context.is_first else address(device_context.device.pointer),
        _prototype(torch.uint8, device_context.torch_device),
        tuple((source, *_described_input(spec, device_context)) for source, spec in program.inputs),
        tuple(_described_result(spec) for spec in program.results),
        functools.partial(_moved, tuple(spec.device for spec in program.results)),
        functools.partial(_laid_out, specs, _origins(program, producers or {}), device_context),
        functools.partial(_fail, executable),
        profiling.Observer(executable),
    )
    launch = _rng_of_flagos(launcher.run) if program.uses_rng_of_flagos else launcher.run
    if not device_context.is_host:
        launch = _in_stream_order(launch, device_context)
    spread = {n: spec.strides for n, spec in enumerate(program.results) if spec.strides != spec.layout.strides}
    return _spreading(launch, spread) if spread else launch


def _rng_of_flagos(launch: Launch) -> Launch:
    def run(inputs: list[Any]) -> list[torch.Tensor]:
        with rng_of_flagos():
            return launch(inputs)

    return run


def _in_stream_order(launch: Launch, device_context: DeviceContext) -> Launch:
    """The launch for callers on other streams than the one that programs run on."""

    def run(inputs: list[Any]) -> list[torch.Tensor]:
        streams = device_context.streams()
        if streams is None:
            return launch(inputs)
        current, compute = streams
        compute.wait_stream(current)
        outputs = launch(inputs)
        current.wait_stream(compute)
        # Their memory belongs to the other stream, which would use it again while the caller's still reads it.
        outputs = [None if output is None else output.clone() for output in outputs]
        compute.wait_stream(current)
        return outputs

    return run


def _spreading(launch: Launch, strides: Mapping[int, tuple[int, ...]]) -> Launch:
    """The launch of a program with results that are not dense, by their numbers. A program fills its memory."""

    def run(inputs: list[Any]) -> list[torch.Tensor]:
        outputs = launch(inputs)
        for number, lies in strides.items():
            outputs[number] = _spread(outputs[number], lies)
        return outputs

    return run


def _spread(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values in memory of the strides; along a dimension of stride 0 they are all one."""
    spread = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    spread[once] = tensor[once]
    return spread


class StridesDiffer(Exception):
    """An input has other strides than the program takes, and its values cannot be copied into memory of those."""


def _described_input(
    spec: InputSpec, device_context: DeviceContext
) -> tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    layout = spec.layout
    prototype = _prototype(spec.dtype, _device_at(device_context, spec))
    return prototype, int(STORED_TYPE[spec.dtype]), layout.physical, layout.sizes, layout.strides


def _described_result(spec: ResultSpec) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]:
    return _prototype(spec.dtype, spec.device), spec.layout.sizes, spec.layout.strides, spec.target


def _device_at(device_context: DeviceContext, spec: InputSpec) -> torch.device:
    """Where the program takes an input: where it is if that is memory of the device context, else there."""
    return spec.device if placement.lies_at(spec.device, device_context) else device_context.torch_device


@functools.cache
def _prototype(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _moved(devices: Sequence[torch.device], number: int, tensor: torch.Tensor) -> torch.Tensor:
    """A result on the device on which it was traced."""
    return placement.move(tensor, devices[number])


def _origins(program: BuiltProgram, producers: Mapping[int, str]) -> tuple[str, ...]:
    """What each input of the program is to the user."""
    described = {number: f"the result of {place}" for number, place in producers.items()}
    return tuple(
        described.get(source, f"input {number} of the compiled graph") if isinstance(source, int) else "a constant"
        for number, (source, _) in enumerate(program.inputs)
    )


def _laid_out(
    specs: Sequence[InputSpec], origins: Sequence[str], device_context: DeviceContext, number: int, tensor: torch.Tensor
) -> torch.Tensor:
    """The same values in the memory and the layout that the program takes. Raises StridesDiffer where that repeats
    elements."""
    spec = specs[number]
    traced = f"a {spec.dtype} tensor of sizes {list(spec.layout.sizes)} on {spec.device}"
    given = _described(tensor)
    if given != traced:
        raise RuntimeError(f"Expected {origins[number]} to be {traced}, but got {given}")
    layout = spec.layout
    if isinstance(layout, Strided) and layout.overlaps:
        raise StridesDiffer
    device = _device_at(device_context, spec)
    return torch.empty_strided(layout.sizes, layout.strides, dtype=spec.dtype, device=device).copy_(tensor)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.dtype} tensor of sizes {list(value.shape)} on {value.device}"


def _fail(executable: Executable, error: int) -> NoReturn:
    """Raises what a launch raises: PyTorch's exception where there was one."""
    api = executable.api
    raise _translated(api.take_error(api.ffi.cast("FlagosError*", error)))


def _translated(status: FlagosStatusError) -> Exception:
    name = status.payloads.get("flagos.exception", b"").decode()
    kind = getattr(builtins, name, None) or getattr(torch._C, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(status.payloads["flagos.message"].decode())
    return RuntimeError(str(status))
