"""vLLM on flagos: a compiler of its pieces, and the opt-in that has vLLM ask for it. Entry point vllm.general_plugins.

vLLM calls ``register`` in each of its processes, wanted or not: nothing else is imported before it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flagos_backend.frontends.vllm.registration import register

if TYPE_CHECKING:
    from flagos_backend.frontends.vllm.compiler import FlagosCompiler

__all__ = ["FlagosCompiler", "register"]


def __getattr__(name: str) -> Any:
    """The compiler, which imports vLLM, at its first use."""
    if name == "FlagosCompiler":
        from flagos_backend.frontends.vllm.compiler import FlagosCompiler

        return FlagosCompiler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
