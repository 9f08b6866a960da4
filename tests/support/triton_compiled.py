"""Triton kernels compiled for a chip that need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flagos_backend.codegen.triton import RegionKernel, sources
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.storage import dtype_of

COMPILED_FOR = GPUTarget("cuda", 90, 32)
POINTER = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.complex64: "*i64",
}


def compile_kernel(
    function: Any, types: Sequence[object], constants: Mapping[str, object], warps: int, **options: object
) -> str:
    """The PTX. ``types``: those of the parameters that are no constants."""
    names = iter(types)
    signature = {name: "constexpr" if name in constants else next(names) for name in function.arg_names}
    # Arrays are aligned, without which nothing is loaded or computed two by two.
    arrays = [name for name, type_ in signature.items() if str(type_).startswith("*")]
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in arrays}
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, values, aligned)
    return triton.compile(source, target=COMPILED_FOR, options={"num_warps": warps, **options}).asm["ptx"]


def pointer(shape: object) -> str:
    assert isinstance(shape, ArrayShape)
    return POINTER[dtype_of(shape.element_type)]


def compiled(kernel: RegionKernel) -> list[str]:
    module = sources.load(kernel.source)
    shapes = [buffer.shape for buffer in (*kernel.inputs, *kernel.outputs)] + list(kernel.workspaces)
    return [
        compile_kernel(
            getattr(module, launch.function),
            [pointer(shapes[n]) for n in launch.arguments],
            {},
            launch.warps,
            **kernel.options,
        )
        for launch in kernel.launches
    ]
