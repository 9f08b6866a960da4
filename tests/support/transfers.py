"""The transfer manager of the PJRT plugin, called from Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu.pjrt.harness import Client
from support import pjrt
from support.pjrt import ffi

PREFIX = "PJRT_AsyncHostToDeviceTransferManager_"


class Manager:
    """One transfer manager over buffers of the given shapes."""

    def __init__(self, client: Client, *shapes: tuple[tuple[int, ...], Any], device: int = 0) -> None:
        self.client = client
        specs = ffi().new("PJRT_ShapeSpec[]", len(shapes))
        self.kept = [specs]
        for spec, (dims, dtype) in zip(specs, shapes, strict=True):
            self.kept.append(values := pjrt.int64s(dims))
            spec.struct_size = pjrt.abi.structs["PJRT_ShapeSpec"].unpadded_size
            spec.dims, spec.num_dims, spec.element_type = values, len(dims), pjrt.buffer_type(dtype)
        self.pointer = client.call(
            "PJRT_Client_CreateBuffersForAsyncHostToDevice",
            shape_specs=specs,
            num_shape_specs=len(shapes),
            memory=client.default_memory(device),
        ).transfer_manager

    def call(self, function: str, **fields: Any) -> Any:
        return self.client.api.call(PREFIX + function, transfer_manager=self.pointer, **fields)

    def write(self, index: int, data: np.ndarray, offset: int = 0, last: bool = True) -> Any:
        return self.call(
            "TransferData",
            buffer_index=index,
            data=pjrt.pointer_to(data),
            offset=offset,
            transfer_size=data.nbytes,
            is_last_transfer=last,
        ).done_with_h2d_transfer

    def retrieve(self, index: int) -> Any:
        return self.call("RetrieveBuffer", buffer_index=index).buffer_out

    def literal(self, index: int, array: np.ndarray, **fields: Any) -> Any:
        self.kept.append(dims := pjrt.int64s(array.shape))
        defaults = {
            "data": pjrt.pointer_to(array),
            "shape_dims": dims,
            "shape_num_dims": array.ndim,
            "shape_element_type": pjrt.buffer_type(array.dtype),
        }
        args = self.call("TransferLiteral", buffer_index=index, **(defaults | fields))
        return args.done_with_h2d_transfer

    def destroy(self) -> None:
        self.call("Destroy")
