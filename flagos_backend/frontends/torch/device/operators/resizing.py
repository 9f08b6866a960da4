"""Tensors that get another size: resize_, and outputs that do not fit what is written to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device.memory import can_exchange_storages, unwrap, wrap
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.operators.views import adopt
from flagos_backend.frontends.torch.device.plan import KernelFlag
from flagos_backend.frontends.torch.device.runtime import runtime
from flagos_backend.frontends.torch.device.sharing import is_shared

aten = torch.ops.aten
#: What PyTorch says where memory that it did not allocate is too small.
_NOT_RESIZABLE = "resize storage that is not resizable"


def resize_(self: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """aten::resize_. What does not fit into the storage has it resized, for all that share it; where PyTorch cannot
    (see resize_storage), the tensor moves to memory of its own."""
    inner = unwrap(self)
    room = self.untyped_storage().nbytes() // self.element_size() - self.storage_offset()
    wanted = torch.empty(size, dtype=self.dtype, device="meta")
    if memory_format is not None:
        wanted = torch.empty(size, dtype=self.dtype, device="meta", memory_format=memory_format)
    if tuple(self.shape) == tuple(size) and memory_format is None:
        return self
    storage = self.untyped_storage()
    if wanted.numel() > room and can_exchange_storages():
        resize_storage(storage, int(self.storage_offset() + wanted.numel()) * self.element_size())
        room = wanted.numel()
    if wanted.numel() <= room:
        set_ = aten.set_.source_Storage_storage_offset
        with torch.no_grad():
            set_(self, storage, self.storage_offset(), wanted.shape, wanted.stride())
        return self
    grown = torch.empty_strided(wanted.shape, wanted.stride(), dtype=self.dtype, device=inner.device)
    kept = torch.as_strided(inner, (room,), (1,)) if room > 0 else inner.reshape(-1)
    torch.as_strided(grown, (kept.numel(),), (1,)).copy_(kept)
    return adopt(self, grown)


def resize_storage(storage: torch.UntypedStorage, size: int) -> None:
    """UntypedStorage.resize_: ``size`` bytes, those at the front as before, for every tensor that shares the storage.

    Raises RuntimeError for a negative size and for shared memory, NotImplementedError where PyTorch has no means.
    """
    if size < 0:
        raise RuntimeError(f"UntypedStorage.resize_: the size cannot be negative, but is {size}")
    if size == storage.nbytes():
        return
    if is_shared(storage):
        raise RuntimeError("Trying to resize storage that is not resizable")  # PyTorch's words
    if not can_exchange_storages():
        raise NotImplementedError(
            f"UntypedStorage.resize_ on device '{DEVICE_TYPE}' takes PyTorch 2.13 or later, and this is "
            f"{torch.__version__}. Update PyTorch, or make a new tensor."
        )
    grown = torch.empty(size, dtype=torch.uint8, device=storage.device)
    kept = min(size, storage.nbytes())
    if kept:
        with torch.no_grad():
            grown[:kept] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:kept]
    # PyTorch exchanges the memories of two sizes only where one is 0.
    for memory in (torch.empty(0, dtype=torch.uint8, device=storage.device), grown):
        storage._swap_data_ptr_(memory.untyped_storage())  # type: ignore[attr-defined]  # missing in PyTorch's stubs


def resize_storage_bytes_(variable: Tensor, new_size: int) -> None:
    """inductor::resize_storage_bytes_: what compiled programs call for UntypedStorage.resize_."""
    resize_storage(variable.untyped_storage(), new_size)


def resize_output_(self: Tensor, size: Sequence[int], device: torch.device) -> Tensor:
    """aten::_resize_output_: as resize_, with PyTorch's warning where that loses what is there."""
    if tuple(self.shape) != tuple(size):
        warn_resized(self, size)
        resize_(self, size)
    return self


def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    """aten::_copy_from_and_resize."""
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    unwrap(dst).copy_(unwrap(self))
    return dst


def warn_resized(output: Tensor, size: Sequence[int]) -> None:
    """PyTorch's warning for an output that has elements and not this size."""
    if output.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(output.shape)}, which does not "
            f"match the required output shape {list(size)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=2,
        )


def call_resizing(kernel: Any, schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator whose outputs do not fit with empty ones, and gives their sizes and memory to the outputs.

    Other arguments that it writes, such as the statistics of a batch norm, stay as they are.
    """
    arguments = enumerate(schema.arguments)
    written = [(-1 if a.kwarg_only else position, a.name) for position, a in arguments if a.is_out]
    _refuse_operands_as_outputs(kernel, written, args, kwargs)
    inner_args = [_unwrapped(value) for value in args]
    inner_kwargs = {name: _unwrapped(value) for name, value in kwargs.items()}
    outputs: list[tuple[Tensor, Tensor]] = []
    for position, name in written:
        holder: Any = inner_args if 0 <= position < len(args) else inner_kwargs
        key: Any = position if holder is inner_args else name
        outer = args[position] if holder is inner_args else kwargs.get(name)
        holder[key] = _emptied(outer, outputs)
    if kernel.flags & KernelFlag.RANDOM:
        _name_generator(schema, inner_args, inner_kwargs)
    kernel.inner(*inner_args, **inner_kwargs)
    for outer, inner in outputs:
        if outer.shape == inner.shape:
            outer.copy_(wrap(inner, counted=False))
        else:
            warn_resized(outer, inner.shape)
            adopt(outer, inner)
    if not schema.returns:
        return None
    results = [args[position] if 0 <= position < len(args) else kwargs[name] for position, name in written]
    return results[0] if len(results) == 1 else tuple(results)


def _name_generator(schema: torch.FunctionSchema, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Has an operator draw from the device's generator where the caller gave none."""
    position = next(number for number, argument in enumerate(schema.arguments) if argument.name == "generator")
    if position >= len(args):
        kwargs["generator"] = kwargs.get("generator") or runtime().generator
    elif args[position] is None:
        args[position] = runtime().generator


def _refuse_operands_as_outputs(
    kernel: Any, written: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises what PyTorch does where an output, once it has grown, meets an operand in its storage: calls the operator
    on copies whose storages can be made larger. Not one that draws random numbers, which it would do twice."""
    if kernel.flags & KernelFlag.RANDOM:
        return
    results = [args[position] if 0 <= position < len(args) else kwargs.get(name) for position, name in written]
    outputs, every = list(_tensors(results)), list(_tensors([*args, *kwargs.values()]))
    places = {output.untyped_storage()._cdata for output in outputs}
    if sum(tensor.untyped_storage()._cdata in places for tensor in every) == len(outputs):
        return
    copies = _copies(every)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come with the call itself
        kernel.inner(*_copied(args, copies), **dict(zip(kwargs, _copied(list(kwargs.values()), copies), strict=True)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of the device in a structure of arguments."""
    if isinstance(value, Tensor) and value.device.type == DEVICE_TYPE:
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _copies(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Inner tensors for each, in copies of their storages, which are PyTorch's own; what is one tensor stays one."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    for outer in tensors:
        storage = outer.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=outer.device).set_(storage)
            storages[storage._cdata] = unwrap(whole).clone().untyped_storage()
        inner = torch.empty(0, dtype=outer.dtype, device=unwrap(outer).device)
        inner.set_(storages[storage._cdata], outer.storage_offset(), outer.shape, outer.stride())
        inner = aten._conj.default(inner) if outer.is_conj() else inner
        copies[id(outer)] = aten._neg_view.default(inner) if outer.is_neg() else inner
    return copies


def _copied(value: Any, copies: Mapping[int, Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(one, copies) for one in value]
    return copies.get(id(value), value)


def _emptied(outer: Any, outputs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(outer, list | tuple):
        return [_emptied(one, outputs) for one in outer]
    if not isinstance(outer, Tensor):
        return outer
    inner = torch.empty(0, dtype=outer.dtype, device=unwrap(outer).device)
    outputs.append((outer, inner))
    return inner


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Tensor):
        return unwrap(value)
    if isinstance(value, list | tuple):
        return [_unwrapped(one) for one in value]
    return value


def may_resize(error: BaseException | None) -> bool:
    """Whether an operator failed because an output's memory is too small."""
    return isinstance(error, RuntimeError) and _NOT_RESIZABLE in str(error)
