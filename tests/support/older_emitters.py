"""XLA's CPU is the oracle of most tests, and compiling takes most of its time. Its older emitters, without MLIR, take a
third of that and compute the same, but for what is named here. From 0.11 on jaxlib has none."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

# The text is that of HLO or StableHLO. Some conversions of floats of eight bits and less are wrong; a negative padding
# is refused where the simplifier, which takes it away, is off; powers of integers by negative numbers are others, cube
# roots are off by 75 units in the last place at the ends of their types, functions of 16-bit floats by one; complex
# numbers cannot be clamped.
_WRONG_OR_REFUSED = re.compile(
    r"\bf[48]e\d|[x<]f[48]E\d|padding=[\dx_]*-|\b[su][124]\[|[x<]u?i[24]>|\bcbrt\b|f16\b"
    r"|[su]\d+\[[\d,]*\]\S* power\(|\.power\b.*[x<]u?i\d+>|c(?:64|128)\[[\d,]*\]\S* clamp\(|\.clamp\b.*complex<"
)


def overrides(text: str) -> list[tuple[str, bool]]:
    """The options that have XLA's CPU compile the program with this text in less time, if there are any."""
    import jax

    if not jax.__version__.startswith("0.10.") or _WRONG_OR_REFUSED.search(text):
        return []
    return [("xla_cpu_use_fusion_emitters", False)]


def install() -> None:
    """What ``jax.jit`` compiles for JAX's own CPU, too, if JAX is there; again is harmless."""
    compiler: Any = sys.modules.get("jax._src.compiler")
    if compiler is None or hasattr(compiler, "flagos_tests_compile"):
        return
    compiler.flagos_tests_compile = compiler.backend_compile_and_load

    def compile_and_load(backend: Any, module: Any, devices: Any, options: Any, *rest: Any) -> Any:
        if backend.platform == "cpu":
            given: Sequence[tuple[str, Any]] = options.env_option_overrides
            text = module.operation.get_asm(large_elements_limit=16)
            options.env_option_overrides = [*overrides(text), *given]
        return compiler.flagos_tests_compile(backend, module, devices, options, *rest)

    compiler.backend_compile_and_load = compile_and_load
