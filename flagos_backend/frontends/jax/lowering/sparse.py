"""Products and solves with sparse matrices in CSR and COO form: flagos.csr_*, flagos.coo_* and flagos.spsolve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flagos_backend.frontends.jax.lowering.rule import LoweringRule, custom_call

_LOWERINGS: Final = "jax.experimental.sparse._lowerings"


_PRODUCTS: Final = ("csr_spmv", "csr_spmm", "coo_spmv", "coo_spmm")


def _product(target: str) -> Callable[..., list[Any]]:
    def rule(ctx: Any, *operands: Any, shape: tuple[int, int], transpose: bool) -> list[Any]:
        config = {"shape": [int(extent) for extent in shape], "transpose": bool(transpose)}
        return custom_call(ctx, target, operands, config)

    return rule


def _spsolve(ctx: Any, *operands: Any, **_: Any) -> list[Any]:
    # tol and reorder steer cuSOLVER's algorithm; a direct solve has no use for them.
    return custom_call(ctx, "flagos.spsolve", operands)


RULES: Final = (
    *(LoweringRule(_LOWERINGS, f"{name}_p", _product(f"flagos.{name}")) for name in _PRODUCTS),
    LoweringRule("jax.experimental.sparse.linalg", "spsolve_p", _spsolve),
)

#: What the rules above call.
TARGETS: Final = (*(f"flagos.{name}" for name in _PRODUCTS), "flagos.spsolve")
