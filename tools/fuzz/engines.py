"""The two that run a program: flagos through the plugin ABI, and stock XLA's CPU client as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib import _jax

from flagos_backend.importer import schema
from flagos_backend.importer.export import export_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import ElementType, leaves
from plugin_abi import loader
from plugin_abi.host import Context, Executable
from plugin_abi.host import ElementType as AbiElementType
from tools.fuzz.oracle import as_written
from tools.fuzz.scope import NUMPY_DTYPE

Array = np.ndarray[Any, Any]


class ArgumentChanged(Exception):
    """A program wrote over what its caller did not give away."""


class Flagos:
    """The accepted backend, with one context for all programs."""

    def __init__(self) -> None:
        backend = loader.load().accepted
        if backend is None:
            raise RuntimeError(loader.no_such_device_message())
        self._context = Context(backend)

    def run(self, module: Module, arguments: Sequence[Array]) -> list[Array]:
        """The flat outputs. Raises FlagosStatusError when the program is refused or fails, and ArgumentChanged."""
        message = schema.Program(schema_version=1, producer="tools.fuzz")
        message.module.MergeFromString(export_module(module))
        memory = self._context.devices[0].default_memory
        shapes = [shape for parameter in module.entry.parameters for shape in leaves(parameter.shape)]
        with Executable.compile(self._context, message.SerializeToString()) as executable:
            buffers = [
                memory.from_host(np.ascontiguousarray(a).tobytes(), s.dims, AbiElementType(s.element_type))
                for a, s in zip(arguments, shapes, strict=True)
            ]
            given = [buffer.to_host() for buffer in buffers]
            outputs, events = executable.execute([buffers])
            for event in events:
                event.wait()
            results = [np.frombuffer(o.to_host(), _dtype(o.element_type)).reshape(o.dims) for o in outputs[0]]
            changed = [number for number, buffer in enumerate(buffers) if buffer.to_host() != given[number]]
            for handle in (*buffers, *outputs[0], *events):
                handle.close()
        if changed:
            raise ArgumentChanged(f"arguments {changed} are not what they were")
        return results


class Xla:
    """jaxlib's CPU client. Nothing is optimized that only makes code faster: programs run once."""

    def __init__(self) -> None:
        self._device = jax.local_devices(backend="cpu")[0]
        options = _jax.CompileOptions()
        debug = options.executable_build_options.debug_options
        debug.xla_backend_optimization_level = 0
        debug.xla_cpu_enable_fast_math = False
        self._options = options

    def run(self, module: Module, arguments: Sequence[Array]) -> list[Array]:
        """The flat outputs. Raises whatever jaxlib raises for a program that it does not take."""
        stablehlo = _jax.mlir.hlo_to_stablehlo(export_module(as_written(module)))
        devices = _jax.DeviceList((self._device,))
        executable = self._device.client.compile_and_load(stablehlo, devices, self._options)
        with jax.enable_x64(True):
            outputs = executable.execute([jax.device_put(argument, self._device) for argument in arguments])
            return [np.asarray(output) for output in outputs]


def _dtype(element_type: AbiElementType) -> np.dtype[Any]:
    return NUMPY_DTYPE[ElementType(element_type)]
