"""What two modules of LightX2V get once they are imported: its blocks compile with this backend, and its list of
quantized schemes has ours. LightX2V has no option for either."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from flagos_backend.frontends.lightx2v import knobs
from flagos_backend.frontends.torch.tracing import when_loaded

#: What ``dit_quant_scheme`` may say beside LightX2V's own schemes.
SCHEMES: Final = ("flagos", "flagos-fp8", "flagos-int8")
_PLATFORMS = ("flagos", "fl")

logger = logging.getLogger("flagos.lightx2v")


def install() -> None:
    """Arranges for both; a module that is there already gets its own at once."""
    for name, action in _ACTIONS.items():
        when_loaded(name, action)


def _without_failing(action: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """An import never fails by ``action``."""

    def act(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:
            logger.warning("%s is not as expected, and stays as it is: %s", module.__name__, error)

    return act


def compile_blocks(module: ModuleType) -> None:
    """``use_compile`` means this backend where the platform is flagos and LIGHTX2V_FL_COMPILE does not say 0."""
    base = module.BaseTransformerInfer
    stock = base.get_compiled_block
    if getattr(stock, "of_flagos", False):
        return

    def get_compiled_block(self: Any, block_idx: Any, block: Any) -> Callable[..., Any]:
        if not _compiles_here():
            own: Callable[..., Any] = stock(self, block_idx, block)
            return own
        kept = self.compiled_blocks.setdefault(self.get_compile_block_key(block_idx, block), (block, None))
        if kept[0] is not block or kept[1] is None:
            kept = (block, compiled(lambda *arguments: self.infer_block(block, *arguments)))
            self.compiled_blocks[self.get_compile_block_key(block_idx, block)] = kept
        found: Callable[..., Any] = kept[1]
        return found

    get_compiled_block.of_flagos = True  # type: ignore[attr-defined]
    base.get_compiled_block = get_compiled_block


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A block compiled whole: what changes from one denoising step to the next are values of tensors."""
    import torch

    result: Callable[..., Any] = torch.compile(function, backend="flagos", dynamic=None)
    return result


def _compiles_here() -> bool:
    chosen = getattr(sys.modules.get("lightx2v_platform.base.global_var"), "PLATFORM", None)
    return chosen in _PLATFORMS and knobs.flag(knobs.COMPILE, default=True)


def accept_schemes(module: ModuleType) -> None:
    """A model may name our keys as ``dit_quant_scheme``."""
    (base,) = (c for c in vars(module).values() if isinstance(c, type) and "_check_dit_quantized" in vars(c))
    stock = base._check_dit_quantized  # type: ignore[attr-defined]
    if getattr(stock, "of_flagos", False):
        return

    def check(self: Any) -> Any:
        return None if self.config.get("dit_quant_scheme") in SCHEMES else stock(self)

    check.of_flagos = True  # type: ignore[attr-defined]
    base._check_dit_quantized = check  # type: ignore[attr-defined]


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "lightx2v.common.transformer_infer.transformer_infer": _without_failing(compile_blocks),
    "lightx2v.models.networks.base_model": _without_failing(accept_schemes),
}
