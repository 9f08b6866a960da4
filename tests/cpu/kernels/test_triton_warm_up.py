"""Warm-ups of our Triton kernels, without a compiler: what they would compile is what the first call launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import TopKAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider, Variant, operation_of
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from support.against_xla import hlo_of_text
from support.attention import CASES, SIZES, calls_of

E = ElementType
CHIP = Target("cpu", "simulated", multiprocessors=4, warp_size=4)
KERNELS = (
    *("attention", "attention_gradient", "dot", "qr", "scans", "scatter", "sort", "swaps", "top_k", "byte_transposes"),
    "windows",
)
SORT = """
less { a = f32[] parameter(0) b = f32[] parameter(1) c = s32[] parameter(2) d = s32[] parameter(3)
  ROOT r = pred[] compare(a, b), direction=LT }
ENTRY e { x = f32[40,3] parameter(0) y = s32[40,3] parameter(1)
  ROOT r = (f32[40,3], s32[40,3]) sort(x, y), dimensions={0}, is_stable=true, to_apply=less }
"""
REDUCTION = """
combine { a = f16[] parameter(0) b = f16[] parameter(1) ROOT r = f16[] maximum(a, b) }
ENTRY e { x = f16[3,8,6] parameter(0) i = f16[] parameter(1)
  ROOT r = f16[3,4,3] reduce-window(x, i), window={size=1x2x2 stride=1x2x2}, to_apply=combine }
"""
DOT = """
ENTRY e { x = f16[3,20,7] parameter(0) y = f16[3,7,9] parameter(1)
  ROOT r = f32[3,20,9] dot(x, y),
    lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1} }
"""
SCATTER = """
select { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = pred[] compare(a, b), direction=GE }
scatter { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = f32[] add(a, b) }
ENTRY e { x = f32[9] parameter(0) s = f32[3] parameter(1) i = f32[] parameter(2)
  ROOT r = f32[9] select-and-scatter(x, s, i), window={size=3 stride=3}, select=select, scatter=scatter }
"""
SCAN = """
combine { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = f32[] add(a, b) }
ENTRY e { x = f32[9000,2] parameter(0) i = f32[] constant(0)
  ROOT r = f32[9000,2] reduce-window(x, i), window={size=9000x1 pad=8999_0x0_0}, to_apply=combine }
"""
UPDATES = """
combine { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = f32[] maximum(a, b) }
ENTRY e { x = f32[90,8] parameter(0) i = s32[5,2] parameter(1) u = f32[4,5] parameter(2)
  ROOT r = f32[90,8] scatter(x, i, u), update_window_dims={0}, inserted_window_dims={1},
    scatter_dims_to_operand_dims={0,1}, index_vector_dim=1, to_apply=combine }
"""
ASSIGNMENT = """
second { a = bf16[] parameter(0) ROOT b = bf16[] parameter(1) }
ENTRY e { x = bf16[90,8] parameter(0) i = s64[3000] parameter(1) u = bf16[3000,8] parameter(2)
  ROOT r = bf16[90,8] scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=second }
"""
QR = """
ENTRY e { x = f32[2,5,3] parameter(0)
  ROOT r = (f32[2,5,3], f32[2,3]) custom-call(x), custom_call_target="flagos.geqrf" }
"""
LU = """
ENTRY e { x = f32[2,5,3] parameter(0)
  ROOT r = (f32[2,5,3], s32[2,3], s32[2,5]) custom-call(x), custom_call_target="flagos.lu" }
"""


class Recorder:
    """Stands where a Triton function does; ``compiled``, ``launched``: what it was given, arrays without their data."""

    def __init__(self, name: str, compiled: list[Any], launched: list[Any]) -> None:
        self.name, self.compiled, self.launched = name, compiled, launched

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **flags: Any) -> Any:
        self.compiled.append((self.name, grid, [_described(a) for a in arguments], flags))
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **flags: self.launched.append(
            (self.name, grid, [_described(a) for a in arguments], flags)
        )


def _described(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_described, argument))
    return (argument.dtype, argument.stride()) if isinstance(argument, torch.Tensor) else argument


def _from_text(text: str, opcode: Opcode) -> Instruction:
    (found,) = (
        i for c in import_module(hlo_of_text(text)).computations() for i in c.instructions if i.opcode is opcode
    )
    return found


def _top_k(rows: int, size: int) -> Instruction:
    builder = Builder("entry")
    result = TupleShape((ArrayShape(E.BF16, (rows, 3)), ArrayShape(E.S32, (rows, 3))))
    operand = builder.parameter(ArrayShape(E.BF16, (rows, size)))
    return builder.add(Opcode.TOP_K, [operand], TopKAttributes(3, True), shape=result)


INSTRUCTIONS = {
    **{f"attention, {name}": calls_of(CASES[name], E.F16, SIZES)[0] for name in ("causal", "bias, mask, causal")},
    **{f"gradients, {name}": calls_of(CASES[name], E.F32, SIZES)[1] for name in ("plain", "mask, finite", "bias")},
    "sort": _from_text(SORT, Opcode.SORT),
    "top-k": _top_k(5, 70),
    "top-k of few long rows": _top_k(1, 9000),
    "dot": _from_text(DOT, Opcode.DOT),
    "lu": _from_text(LU, Opcode.CUSTOM_CALL),
    "qr": _from_text(QR, Opcode.CUSTOM_CALL),
    "updates": _from_text(UPDATES, Opcode.SCATTER),
    "assignment": _from_text(ASSIGNMENT, Opcode.SCATTER),
    "scan": _from_text(SCAN, Opcode.REDUCE_WINDOW),
    "reduction of windows": _from_text(REDUCTION, Opcode.REDUCE_WINDOW),
    "scatter of windows": _from_text(SCATTER, Opcode.SELECT_AND_SCATTER),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_what_is_compiled_is_what_is_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instruction = INSTRUCTIONS[name]
    compiled: list[Any] = []
    launched: list[Any] = []
    for kernels in KERNELS:
        module = pytest.importorskip(f"flagos_backend.kernels.triton.{kernels}_kernels", reason="Triton is missing")
        for function in [n for n, value in vars(module).items() if type(value).__name__ == "InterpretedFunction"]:
            monkeypatch.setattr(module, function, Recorder(function, compiled, launched))
    for variant in _variants(instruction):
        assert variant.warm_up is not None
        variant.warm_up()
        assert compiled and not launched
        shapes = [operand.shape for operand in instruction.operands]
        operands = [torch.zeros(s.dims, dtype=dtype_of(s.element_type)) for s in shapes if isinstance(s, ArrayShape)]
        variant.kernel(Run(), *operands)
        assert launched == compiled
        compiled.clear()
        launched.clear()


def _variants(instruction: Instruction) -> list[Variant]:
    # Of LU only the order of rows is ours.
    provider = Provider.VENDOR if operation_of(instruction) == "flagos.lu" else Provider.TRITON
    offered = [i for i in implementations_of(operation_of(instruction)) if i.provider is provider]
    (ours,) = (i for i in offered if not i.unsupported(instruction, CHIP))
    return [*ours.variants(instruction, CHIP)]
