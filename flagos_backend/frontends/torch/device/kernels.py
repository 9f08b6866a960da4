"""Registers the device's operators with PyTorch's dispatcher: one native Kernel for each overload that the host has.

Runs once, when the device is used for the first time; see registration.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload

from flagos_backend.frontends.torch.device import _native
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.operators import (
    attention,
    copies,
    counting,
    dropout,
    factories,
    overlaps,
    pinning,
    recurrent,
    refusals,
    resizing,
    views,
)
from flagos_backend.frontends.torch.device.plan import (
    KernelFlag,
    KernelPlan,
    name_of,
    overload,
    plan_kernel,
    returns_view,
)
from flagos_backend.frontends.torch.device.runtime import Runtime
from flagos_backend.frontends.torch.recurrent import CELLS

KEY: Final = "PrivateUse1"
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_has_schema = torch._C._dispatch_has_kernel

#: Operators in Python. The rest are native kernels.
_SPECIAL: Final[Mapping[str, Callable[..., Any]]] = {
    "_efficientzerotensor": factories.zeros,
    "_copy_from": copies.copy_from,
    "_copy_from_and_resize": resizing.copy_from_and_resize,
    "_foreach_copy_": copies.foreach_copy_,
    "_resize_output_": resizing.resize_output_,
    "copy_": copies.copy_,
    "_nested_tensor_from_mask_left_aligned": refusals.no_nested_tensor,
    "histc": counting.histc,
    "native_dropout": dropout.native_dropout,
    "record_stream": copies.record_stream,
    "resize_": resizing.resize_,
    "set_": views.set_to_nothing,
    **{name_of(cell).removeprefix("aten::"): recurrent.on_device(function) for cell, function in CELLS.items()},
}

#: Native kernels, and what stands around them.
_AROUND: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {"zeros_like": factories.zeros_like}

#: Their operands may be on other devices, as on CUDA: indices, and lengths that the host reads.
_ANY_DEVICE: Final = frozenset(
    {
        "_index_put_impl_",
        "_pack_padded_sequence",
        "_unsafe_index.Tensor",
        "_unsafe_index_put",
        "index.Tensor",
        "index.Tensor_out",
        "index_put",
        "index_put_",
    }
)

#: Their results may be conjugated lazily.
_CONJUGATES: Final = frozenset({"linalg_lu_solve", "vdot"})

#: Results that the host reads, and that stay there.
_AS_IS: Final[Mapping[str, frozenset[int]]] = {"_pack_padded_sequence": frozenset({1})}

#: Left to what they are made of: those look at the storage of their arguments, or share it, or look at devices;
#: narrow_copy refuses in other words on the host than on any accelerator.
_COMPOSED: Final = frozenset(
    {
        "_has_same_storage_numel",
        "_lazy_clone",
        "_pin_memory",
        "_print",
        "_unsafe_view",
        "as_strided_",
        "as_strided_copy",
        "as_strided_copy.out",
        "as_strided_scatter",
        "as_strided_scatter.out",
        "is_pinned",
        "lift",
        "lift_fresh_copy",
        "narrow_copy",
        "resize_as_",
    }
)

#: Of layouts that the device has not, by the beginning of their names.
_FOREIGN_LAYOUTS: Final = (
    "_coalesce",
    "_convert_indices",
    "_mkldnn",
    "_nested",
    "_sparse",
    "_to_dense",
    "_to_sparse",
    "coalesce",
    "copy_sparse",
    "mkldnn",
    "quantize",
    "sparse_",
    "to_mkldnn",
    "to_sparse",
)
#: Makers of tensors in compressed sparse layouts, which PyTorch has for any device.
_MAKE_COMPRESSED: Final = (
    "_sparse_compressed_tensor_unsafe",
    "_sparse_compressed_tensor_with_dims",
    "sparse_compressed_tensor.comp_plain_value",
    "sparse_compressed_tensor.comp_plain_value_size",
)
_SPARSE: Final = "sparse, nested, quantized and MKLDNN tensors are not on it. Move the tensor to the cpu first."


def registrations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names, without aten::, and kernels of all operators of the device."""
    yield from ((name, _special(function)) for name, function in _SPECIAL.items())
    for view in views.VIEWS:
        yield name_of(view).removeprefix("aten::"), views.view_kernel(view)
    known = set(_SPECIAL) | {name_of(view).removeprefix("aten::") for view in views.VIEWS}
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or name in known or name in _COMPOSED or _has_kernel(full, KEY):
            continue
        kernel = _host_kernel(full, name)
        if kernel is not None:
            yield name, kernel


def _host_kernel(full: str, name: str) -> Callable[..., Any] | None:
    """A kernel over the host's own; None where the operator is made of others or the host has none."""
    if _has_kernel(full, "CompositeImplicitAutograd"):
        return None
    on_host = _has_kernel(full, "CPU")
    if not on_host and not _has_kernel(full, "CompositeExplicitAutograd"):
        return None
    op = overload(full)
    if returns_view(op):
        return None
    if torch.Tag.inplace_view in op.tags or (_draws_unasked(op) and not on_host):
        return None
    if name.startswith(_FOREIGN_LAYOUTS):
        # Of strided tensors PyTorch itself would make nested ones, and ends the process where those need a gradient.
        return refusals.refuse_operator(full, _SPARSE) if on_host or name.startswith("_nested") else None
    flags = KernelFlag.ANY_DEVICE if name in _ANY_DEVICE else KernelFlag.NONE
    if name in _CONJUGATES or _has_kernel(full, "Conjugate") or _has_kernel(full, "Negative"):
        flags |= KernelFlag.SEES_LAZY
    kernel = native_kernel(op, plan_kernel(op, flags, _AS_IS.get(name, frozenset())))
    return _AROUND[name](kernel) if name in _AROUND else kernel


def _draws_unasked(op: OpOverload) -> bool:
    """Whether an operator draws random numbers and takes no generator. What it is made of takes the device's."""
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    return seeded and all(argument.name != "generator" for argument in op._schema.arguments)


def native_kernel(op: OpOverload, plan: KernelPlan) -> _native.Kernel:
    """The native kernel of an overload."""
    elsewhere = op.overloadpacket._op if plan.numbers_elsewhere else None
    return _native.Kernel(
        plan.name,
        op._op,
        elsewhere,
        plan.tensor_positions,
        plan.generator,
        int(plan.flags),
        plan.written,
        plan.returns,
    )


def above_autograd() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Names, dispatch keys and functions of operators that PyTorch would take apart before autograd."""
    for key in (KEY, f"Autograd{KEY}"):
        yield "scaled_dot_product_attention", key, attention.scaled_dot_product_attention


def of_other_layouts() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Names, dispatch keys and refusals of operators that would make what the fallbacks then refuse."""
    for name in _MAKE_COMPRESSED:
        yield name, f"SparseCsr{KEY}", refusals.refuse_operator(f"aten::{name}", _SPARSE)


def of_compiled_programs() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names and functions of operators in the namespace ``inductor`` that storages' methods are compiled to."""
    if _has_schema("inductor::resize_storage_bytes_"):
        yield "resize_storage_bytes_", resizing.resize_storage_bytes_


def of_the_host() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names and functions of operators on tensors of the host that ask for the accelerator."""
    yield "is_pinned", pinning.is_pinned
    yield "_pin_memory", pinning.pin_memory


def fallbacks() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Dispatch keys of what is refused whole, and what refuses it."""
    for layout in ("Sparse", "SparseCsr", "Quantized", "NestedTensor"):
        yield f"{layout}{KEY}", refusals.refuse_layout(layout.lower())


# ---- What kernels call back ----------------------------------------------------------------------------------------


def _refuse(kernel: _native.Kernel, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Operands on several devices."""
    names = [argument.name for argument in overload(kernel.name)._schema.arguments]
    refusals.refuse_devices(kernel.name, names, args, kwargs or {})


def _resize(kernel: _native.Kernel, args: Sequence[Any], kwargs: Mapping[str, Any] | None, error: BaseException) -> Any:
    """An operator with outputs failed: because they are too small, or for a reason of its own."""
    if not resizing.may_resize(error):
        raise error
    return resizing.call_resizing(kernel, overload(kernel.name)._schema, args, kwargs or {})


def _guarded(inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """A call that the thread's modes do not see: they have seen the operator on the device."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_INNER_AUTOCAST):
        return inner(*args, **(kwargs or {}))


#: Autocast of the devices that can be an inner one.
_INNER_AUTOCAST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_MODE_CHECKS: Final = (torch._C._is_torch_function_mode_enabled, torch._C._is_any_autocast_enabled)


def _special(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in Python, which the thread's modes see no more of than of a native one."""

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(check() for check in _MODE_CHECKS):
            return _guarded(function, args, kwargs)
        return function(*args, **kwargs)

    return kernel


def _resolve(inner: torch.Tensor) -> torch.Tensor:
    """The same values, neither conjugated nor negated lazily."""
    return inner.resolve_conj().resolve_neg()


def configure(opened: Runtime) -> None:
    """Tells the native kernels what they work with."""
    _native.configure(
        device_type=torch.device,
        devices=(torch.device(DEVICE_TYPE, 0), torch.device(DEVICE_TYPE)),
        inner_device=opened.inner,
        is_conj="is_conj",
        is_neg="is_neg",
        conjugate=torch.ops.aten._conj.default._op,
        negate=torch.ops.aten._neg_view.default._op,
        resolve=_resolve,
        generator=opened.generator,
        is_guarded=_MODE_CHECKS,
        guarded=_guarded,
        refuse=_refuse,
        refuse_device=refusals.refuse_ordinal,
        check_generator=refusals.check_generator,
        adopt=views.adopt,
        share=_special(overlaps.share),
        resize=_resize,
    )


class Fallback:
    """Operators of other libraries: the host's kernel where there is one."""

    def __init__(self) -> None:
        self._kernels: dict[OpOverload, Callable[..., Any]] = {}

    def __call__(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        kernel = self._kernels.get(op)
        if kernel is None:
            kernel = self._kernels[op] = self._find(op)
        return kernel(*args, **kwargs)

    def _find(self, op: OpOverload) -> Callable[..., Any]:
        if _has_kernel(name_of(op), KEY):
            return op  # registered since the call was dispatched
        if name_of(op).startswith("aten::") or not _has_kernel(name_of(op), "CPU") or returns_view(op):
            return refusals.refuse_operator(name_of(op), "it has no kernel for this device, nor one that it could use.")
        return native_kernel(op, plan_kernel(op))
