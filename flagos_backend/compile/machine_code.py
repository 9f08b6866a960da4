"""Has LLVM compile the functions of a native program. Used by native_part.py; llvmlite is imported for programs that
have any."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagos_backend.process import interrupts
from flagos_backend.process.cache import private_folder, replace

logger = logging.getLogger("flagos_backend")

VARIABLE = "FLAGOS_MACHINE_CODE"

# LLVM's contexts are not for several threads at once.
_lock = threading.Lock()


def is_available() -> bool:
    """Whether functions can be compiled: llvmlite is installed, and nobody switched them off."""
    return os.environ.get(VARIABLE, "1") != "0" and _is_installed()


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("llvmlite") is not None


class MachineCode:
    """Compiled functions, for as long as this object lives. ``addresses``: of each, by number; 0 where there is
    none."""

    def __init__(self, module: str, functions: Sequence[str | None]) -> None:
        # LLVM cannot be stopped.
        self._engine, self.addresses = interrupts.apart(lambda: _loaded(module, functions))


def _loaded(module: str, functions: Sequence[str | None]) -> tuple[Any, tuple[int, ...]]:
    with _lock:
        processor = _Processor.this()
        engine = processor.load(_kept(processor, module))
        return engine, tuple(engine.get_function_address(name) if name else 0 for name in functions)


class _Processor:
    """What compiles for this processor. ``description``: all that the result depends on, beside the module."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._llvm = llvm
        self._cpu, self._features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self.description = repr((llvm.llvm_version_info, self._cpu, self._features))

    @staticmethod
    @functools.cache
    def this() -> _Processor:
        return _Processor()

    def _machine(self) -> Any:
        target = self._llvm.Target.from_default_triple()
        return target.create_target_machine(
            cpu=self._cpu, features=self._features, opt=2, codemodel="jitdefault", jit=True
        )

    def compile(self, text: str) -> bytes:
        """The object file of a module."""
        llvm, machine = self._llvm, self._machine()
        module = llvm.parse_assembly(text)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = True
        options.slp_vectorization = True
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return bytes(machine.emit_object(module))

    def load(self, content: bytes) -> Any:
        """What holds the functions of an object file, and finds them by name."""
        engine = self._llvm.create_mcjit_compiler(self._llvm.parse_assembly(""), self._machine())
        engine.add_object_file(self._llvm.ObjectFileRef.from_data(content))
        engine.finalize_object()
        return engine


def _kept(processor: _Processor, module: str) -> bytes:
    """The object file of ``module``: of the folder where this user's are kept, or compiled and put there."""
    folder = private_folder("machine_code")
    if folder is None:
        return processor.compile(module)
    path = folder / hashlib.sha256(f"{processor.description}\n{module}".encode()).hexdigest()
    content = _read(path)
    if content is None:
        content = processor.compile(module)
        _write(path, content)
    return content


def _read(path: Path) -> bytes | None:
    """What is kept at ``path``; None where there is nothing, or something else than what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write(path: Path, content: bytes) -> None:
    try:
        replace(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.warning("machine code is not kept: %s", error)
