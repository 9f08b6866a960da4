"""Tensors on the device and buffers of the plugin ABI, over the same memory: neither way copies.

For programs that use the ABI beside PyTorch. Buffers belong to the context of runtime().
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from flagos_backend.frontends.torch.compile.dtypes import ELEMENT_TYPE, TORCH_DTYPE
from flagos_backend.frontends.torch.device.api.devices import opened
from flagos_backend.frontends.torch.device.errors import BufferRefused
from flagos_backend.frontends.torch.device.memory import unwrap, wrap
from flagos_backend.ir.types import ElementType as IrElementType
from plugin_abi.finalizer import Finalizer
from plugin_abi.host import Buffer, ElementType


def buffer_of(tensor: Tensor) -> Buffer:
    """A buffer over the memory of a dense tensor on the device or of the host; it holds the tensor.

    Raises BufferRefused for other layouts and for dtypes that the ABI has not.
    """
    inner = unwrap(tensor.detach())
    if not inner.is_contiguous() or inner.is_conj() or inner.is_neg():
        raise BufferRefused(fact=f"strides {tuple(tensor.stride())}", cure="Call contiguous() first.")
    if inner.dtype not in ELEMENT_TYPE:
        raise BufferRefused(fact=f"the dtype {tensor.dtype}", cure="Convert it first.")
    kept = [inner]
    memory = opened().device.default_memory
    element_type = ElementType(int(ELEMENT_TYPE[inner.dtype]))
    return memory.view(inner.data_ptr(), inner.shape, element_type, release=kept.clear)


def tensor_of(buffer: Buffer) -> Tensor:
    """A tensor on the device over a buffer's memory, which lives as long as the tensor. Waits until it is filled.

    Raises BufferRefused where the host cannot reach that memory.
    """
    if not opened().device.is_host_memory:
        raise BufferRefused(fact="memory that the host cannot reach", cure="Copy the buffer to the host.")
    buffer.wait()
    dtype = TORCH_DTYPE[IrElementType(int(buffer.element_type))]
    if not math.prod(buffer.dims):
        return torch.empty(buffer.dims, dtype=dtype, device="flagos")
    # A handle of the tensor's own: the caller may close his.
    held = buffer.bitcast(buffer.dims, buffer.element_type)
    memory = (ctypes.c_char * held.size_bytes).from_address(held.pointer_address())
    Finalizer(memory, held.close)
    return wrap(torch.frombuffer(memory, dtype=dtype).reshape(buffer.dims), counted=False)
