"""Automatic mixed precision: which operators run in the lower precision, in float32, or in the widest type given.

The lists are PyTorch's own for accelerators, also on the host; kernels here cast and dispatch again, below autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.plan import overload

KEY: Final = "AutocastPrivateUse1"

_LOWER: Final = (
    *("_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"),
    *("conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul"),
    *("einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    "scaled_dot_product_attention",
)
_FLOAT32: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
#: Given dtype=float32 where the caller names none.
_FLOAT32_RESULT: Final = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)
_WIDEST: Final = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
)
_REFUSED: Final = "binary_cross_entropy"
_HALF_FLOATS: Final = (torch.float16, torch.bfloat16)
#: PyTorch's own for such devices, then what was set here.
_expected = torch.float16
_BELOW: Final = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))


def expect(host_memory: bool) -> None:
    """What torch.autocast("flagos") computes in where it is not told: bfloat16 on the host, as PyTorch does there, and
    float16 on accelerators. A type that the program has set stays."""
    global _expected
    if torch.get_autocast_dtype(DEVICE_TYPE) is _expected:
        _expected = torch.bfloat16 if host_memory else torch.float16
        torch.set_autocast_dtype(DEVICE_TYPE, _expected)


def registrations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names, without aten::, and autocast kernels."""
    for names, make in ((_LOWER, _lower), (_FLOAT32, _float32), (_FLOAT32_RESULT, _float32_result), (_WIDEST, _widest)):
        for name in names:
            yield name, make(overload(f"aten::{name}"))
    yield _REFUSED, _refuse_binary_cross_entropy


def _is_castable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == DEVICE_TYPE
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    return value.to(dtype) if _is_castable(value) and value.dtype is not dtype else value


def _call(op: OpOverload, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        if dtype is None:
            return op(*args, **kwargs)
        return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _lower(op: OpOverload) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(op, torch.get_autocast_dtype(DEVICE_TYPE), args, kwargs)


def _float32(op: OpOverload) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(op, torch.float32, args, kwargs)


def _float32_result(op: OpOverload) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and _is_castable(args[0]) and args[0].dtype in _HALF_FLOATS:
            args = args[:position]
            kwargs = {**kwargs, "dtype": torch.float32}
        return _call(op, None, args, kwargs)

    return kernel


def _widest(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        wide = any(_is_castable(leaf) and leaf.dtype is torch.float32 for leaf in leaves)
        halves = {leaf.dtype for leaf in leaves if _is_castable(leaf) and leaf.dtype in _HALF_FLOATS}
        return _call(op, torch.float32 if wide or len(halves) > 1 else None, args, kwargs)

    return kernel


def _refuse_binary_cross_entropy(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe to autocast, or disable autocast here."
    )
