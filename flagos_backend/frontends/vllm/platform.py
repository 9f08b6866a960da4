"""What of a vLLM platform is ours: the compiler, and the configuration that goes with it. Imports no vLLM."""

from __future__ import annotations

import logging
from typing import Any, Final

#: How vLLM finds the compiler of mode 3, and Dynamo the backend of modes 1 and 2.
COMPILER: Final = "flagos_backend.frontends.vllm.FlagosCompiler"
DYNAMO_BACKEND: Final = "flagos"
PASS_MANAGER: Final = "flagos_backend.frontends.vllm.platform.NoInductorPasses"

# vLLM's CompilationMode: 0 compiles nothing, 1 and 2 take a Dynamo backend, 3 a compiler of pieces.
_NONE, _PIECEWISE = 0, 3
#: Backends by which vLLM says "the platform's".
_DEFAULTS = ("", "inductor", DYNAMO_BACKEND, COMPILER)

logger = logging.getLogger("flagos.vllm")


class CompilesWithFlagos:
    """Mixed into the class of vLLM's platform, in front of it. Worker, attention, memory and collectives stay those of
    the platform; a mode that it replaces because its own compiler cannot do it, as the CPU's does with mode 3, is
    given back."""

    @classmethod
    def get_compile_backend(cls) -> str:
        return COMPILER

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return PASS_MANAGER

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Operators of vLLM are written out, for us to fuse, where the user did not say otherwise."""
        super().apply_config_platform_defaults(vllm_config)  # type: ignore[misc]
        config = vllm_config.compilation_config
        if config.mode == _NONE or config.backend not in _DEFAULTS:
            return
        if not {"all", "none"} & set(config.custom_ops):
            config.custom_ops.append("none")
        if config.ir_enable_torch_wrap is None:
            config.ir_enable_torch_wrap = False  # passes of Inductor's, which does not run, would take the wrappers off

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        config = vllm_config.compilation_config
        mode, backend = config.mode, config.backend
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if backend not in _DEFAULTS or _NONE in (mode, config.mode):
            return
        config.mode = mode
        config.backend = COMPILER if mode == _PIECEWISE else DYNAMO_BACKEND
        config.ir_enable_torch_wrap = False
        if mode == _PIECEWISE:
            config.use_inductor_graph_partition = False  # it is Inductor that would cut
            if config.compile_sizes is None:
                config.compile_sizes = []  # vLLM fills it in for graphs of a GPU only, and looks no range up without


class NoInductorPasses:
    """Takes the place of vLLM's passes over Inductor's graphs: Inductor does not run."""

    def configure(self, config: Any) -> None:
        self.pass_config = config.compilation_config.pass_config

    def add(self, added: Any) -> None:
        logger.warning("the pass %s runs inside Inductor, which flagos takes the place of: it is left out", added)

    def __call__(self, graph: Any) -> None:
        raise AssertionError("Inductor runs inside a compile of the backend flagos")

    def uuid(self) -> str:
        return "flagos: no passes of Inductor's"
