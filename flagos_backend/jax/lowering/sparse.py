"""Products and solves with sparse matrices in CSR and COO form: flagos.csr_*, flagos.coo_* and flagos.spsolve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flagos_backend.jax.lowering.rule import LoweringRule, custom_call

_LOWERINGS: Final = "jax.experimental.sparse._lowerings"


def _product(target: str) -> Callable[..., list[Any]]:
    def rule(ctx: Any, *operands: Any, shape: tuple[int, int], transpose: bool) -> list[Any]:
        config = {"shape": [int(extent) for extent in shape], "transpose": bool(transpose)}
        return custom_call(ctx, target, operands, config)

    return rule


def _spsolve(ctx: Any, *operands: Any, **_: Any) -> list[Any]:
    # tol and reorder steer cuSOLVER's algorithm; a direct solve has no use for them.
    return custom_call(ctx, "flagos.spsolve", operands)


RULES: Final = (
    LoweringRule(_LOWERINGS, "csr_spmv_p", _product("flagos.csr_spmv")),
    LoweringRule(_LOWERINGS, "csr_spmm_p", _product("flagos.csr_spmm")),
    LoweringRule(_LOWERINGS, "coo_spmv_p", _product("flagos.coo_spmv")),
    LoweringRule(_LOWERINGS, "coo_spmm_p", _product("flagos.coo_spmm")),
    LoweringRule("jax.experimental.sparse.linalg", "spsolve_p", _spsolve),
)
