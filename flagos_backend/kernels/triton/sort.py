"""Sort by one key: rows lie in the registers of a program for all of a bitonic network (sort_kernels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import SortAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.sort_keys import INFINITY, OperandKey, operand_key, sort_keys
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_FLOATS = frozenset({E.F32, E.F16, E.BF16})
_UNSIGNED = frozenset({E.U8, E.U16, E.U32})
# Kernels count rows in 32 bits.
_MAX_ROWS = (1 << 31) - 1
_KEYS = _FLOATS | _UNSIGNED | frozenset({E.PRED, E.S8, E.S16, E.S32})
# Kernels move elements by their bits.
_STORED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What threads hold, at most: 32 registers. With as many again to work with, a multiprocessor has room for 1024 threads.
_THREAD_BYTES, _MAX_THREADS, _MAX_REGISTERS = 128, 1024, 64
# Short rows share a program of this many elements, where there are enough of them for all multiprocessors. Where there
# are not, threads hold fewer elements, so that there are more threads.
_BLOCK = 2048
_FEW = 8


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a sort looks like to the kernel: ``count`` rows of ``size`` elements."""

    key: OperandKey
    descending: bool
    element: ElementType
    count: int
    size: int
    alone: bool

    @property
    def log(self) -> int:
        return (self.size - 1).bit_length()

    @property
    def word_bytes(self) -> int:
        """A key of 32 bits that carries its column is 64 bits wide; one of 16 bits has room for it in 32."""
        return 8 if self.element.bits == 32 and not self.alone else 4

    @property
    def shared_bytes(self) -> int:
        """What an element takes in shared memory; where operands are gathered, the compiler moves their addresses."""
        return 4 if self.alone else 8


def _shape(value: Instruction) -> ArrayShape:
    assert isinstance(value.shape, ArrayShape)
    return value.shape


def _rows(instruction: Instruction) -> _Rows | str:
    """The rows, or why the kernel does not sort by this order."""
    keys = sort_keys(instruction.called[0])
    if keys is None or len(keys) != 1:
        return "it sorts by one key"
    key = operand_key(keys[0])
    if key is None:
        return "its key is computed"
    shape = _shape(instruction.operands[key.operand])
    if shape.element_type not in _KEYS:
        return f"it does not order {shape.element_type.name.lower()}"
    size = shape.dims[instruction.attributes_as(SortAttributes).dimension]
    if shape.num_elements == 0 or size < 2:
        return "there is nothing to sort"
    if shape.num_elements // size > _MAX_ROWS:
        return f"it sorts up to {_MAX_ROWS} rows"
    alone = len(instruction.operands) == 1 and shape.element_type.bits == 32
    return _Rows(key, keys[0].descending, shape.element_type, shape.num_elements // size, size, alone)


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why not, or "". Cheap: no device is asked."""
    rows = _rows(instruction)
    if isinstance(rows, str):
        return rows
    if any(dtype_of(_shape(operand).element_type).itemsize not in _STORED for operand in instruction.operands):
        return "it moves elements of up to 8 bytes"
    # A target that does not say has what a program's threads hold.
    room = min(_THREAD_BYTES * _MAX_THREADS, target.shared_memory_bytes or _THREAD_BYTES * _MAX_THREADS)
    longest = room // rows.shared_bytes
    if 1 << rows.log > longest:
        return f"a program holds rows of up to {longest} such elements"
    return ""


def _program(rows: _Rows, target: Target) -> dict[str, Any]:
    """How a program's elements lie in its threads, and their warps; as logarithms."""
    length, filled = 1 << rows.log, rows.count << rows.log >= target.multiprocessors * _BLOCK
    elements = _THREAD_BYTES // rows.word_bytes if filled else max(_FEW, length // _MAX_THREADS)
    # At least two threads to a row.
    elements = min(elements, length // 2)
    block = max(length, elements * target.warp_size, _BLOCK if filled else 0)
    warps = block // (elements * target.warp_size)
    return {
        "LOG": rows.log,
        "LOG_E": elements.bit_length() - 1,
        "LOG_W": warps.bit_length() - 1,
        "LOG_L": target.warp_size.bit_length() - 1,
        "num_warps": warps,
        # Else NVIDIA's assembler takes more where a program has few threads, and leaves no room for a second one.
        **({"maxnreg": _MAX_REGISTERS} if target.facts.limits_registers else {}),
    }


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """Operands of one shape, each sorted along the dimension by the one key; equal keys keep their order."""
    from flagos_backend.kernels.triton import sort_kernels as kernels

    rows = _rows(instruction)
    assert isinstance(rows, _Rows)
    dimension = instruction.attributes_as(SortAttributes).dimension
    dims = list(_shape(instruction.operands[0]).dims)
    in_rows = [*dims[:dimension], *dims[dimension + 1 :], dims[dimension]]
    flags = _program(rows, target)
    block = 1 << (flags["LOG_E"] + flags["LOG_W"] + flags["LOG_L"])
    programs = -(-rows.count // (block >> rows.log))
    flags |= {
        "BITS": rows.element.bits if rows.element is not E.PRED else 8,
        "IS_FLOAT": rows.element in _FLOATS,
        "IS_UNSIGNED": rows.element in _UNSIGNED,
        "DESCENDING": rows.descending,
        "INFINITY": INFINITY[rows.element] if rows.key.merged else 0,
        "ALONE": rows.alone,
    }

    def into(run: Run, outputs: Sequence[Tensor | None], *operands: Tensor) -> Value:
        sources = [operand.movedim(dimension, -1).contiguous() for operand in operands]
        # A result's place is an array of rows only where the rows are the last dimension.
        last = dimension == len(dims) - 1
        results = [
            output if output is not None and last else torch.empty(in_rows, dtype=source.dtype, device=source.device)
            for output, source in zip(outputs, sources, strict=True)
        ]
        stored = [tuple(a.view(_STORED[a.dtype.itemsize]) for a in arrays) for arrays in (sources, results)]
        key = stored[0][rows.key.operand]
        launch(kernels.sort_rows, (programs,), key, *stored, rows.size, rows.count, **flags)
        if not last:
            moved = [result.movedim(-1, dimension) for result in results]
            results = [m if o is None else o.copy_(m) for o, m in zip(outputs, moved, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def kernel(run: Run, *operands: Tensor) -> Value:
        return into(run, [None] * len(operands), *operands)

    return (Variant("", kernel, into),)
