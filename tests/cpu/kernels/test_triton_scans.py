"""Our Triton kernels of cumulative operations, in the interpreter, against NumPy in the widest type."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.triton import scans
from programs import hlo_bytes
from support.against_xla import hlo_of_text
from support.numbers import NUMPY_DTYPE, random_values
from support.passes import for_accelerator

E = ElementType
SIMULATED = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
FLOATS = (E.F16, E.BF16, E.F32, E.F64)
INTEGERS = (E.S8, E.S16, E.S32, E.S64, E.U8, E.U16, E.U32, E.U64)
PRECISION = {E.F16: 2e-3, E.BF16: 1e-2, E.F32: 1e-5, E.F64: 1e-13}
OPERATIONS: dict[str, Any] = {
    "sum": lax.cumsum,
    "product": lax.cumprod,
    "maximum": lax.cummax,
    "minimum": lax.cummin,
    "logsumexp": lax.cumlogsumexp,
}
EXACT: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "logsumexp": np.logaddexp,
}
# First, middle and last dimension; one scan and many, odd sizes, and several of the blocks below.
SHAPES = [((2,), 0), ((23,), 0), ((50, 3), 0), ((3, 1), 0), ((2, 9, 5), 1), ((5, 7), 1), ((2, 2, 37), 2)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that scans of an interpreter's size are cut into segments of several blocks."""
    for name, size in {"_TILE": 16, "_LONG_TILE": 8, "_MANY": 3, "_LINE": 8}.items():
        monkeypatch.setattr(scans, name, size)


def windows(operation: str, x: np.ndarray, dimension: int, reverse: bool) -> Instruction:
    """The reduce-window that JAX makes."""
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda x: OPERATIONS[operation](x, axis=dimension, reverse=reverse), x)
    module = for_accelerator(import_module(hlo))
    (found,) = (i for c in module.computations() for i in c.instructions if i.opcode is Opcode.REDUCE_WINDOW)
    return found


def scanned(instruction: Instruction, x: np.ndarray, given: ElementType, result: np.dtype) -> np.ndarray:
    (ours,) = (i for i in implementations_of(str(Opcode.REDUCE_WINDOW)) if i.name == "scan")
    assert ours.provider is Provider.TRITON
    assert ours.unsupported(instruction, SIMULATED) == ""
    (variant,) = ours.variants(instruction, SIMULATED)
    stored = torch.from_numpy(x.copy().reshape(-1).view(np.uint8)).view(dtype_of(given)).view(x.shape)
    found = variant.kernel(Run(asynchronous=True), stored)
    assert found.shape == x.shape
    return np.asarray(found.view(torch.uint8).numpy().view(result)) if x.ndim else found.numpy()


def expected(operation: str, x: np.ndarray, dimension: int, reverse: bool) -> np.ndarray:
    """In double, or in x's own integers, which wrap around."""
    wide = x.astype(np.float64) if x.dtype.kind not in "iu" else x
    order = np.flip(wide, dimension) if reverse else wide
    with np.errstate(all="ignore"):
        found = EXACT[operation].accumulate(order, axis=dimension, dtype=wide.dtype)
    return np.flip(found, dimension) if reverse else found


def compare(ours: np.ndarray, exact: np.ndarray, element_type: ElementType) -> None:
    if element_type in INTEGERS:
        np.testing.assert_array_equal(ours, exact)
    else:
        precision = PRECISION[element_type]
        scale = float(np.abs(exact[np.isfinite(exact)]).max(initial=1.0))
        np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=precision, atol=precision * scale)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(("dims", "dimension"), SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_dimensions(
    operation: str, dims: tuple[int, ...], dimension: int, reverse: bool, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(dims).astype(np.float32)
    ours = scanned(windows(operation, x, dimension, reverse), x, E.F32, x.dtype)
    compare(ours, expected(operation, x, dimension, reverse), E.F32)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("element_type", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_types(operation: str, element_type: ElementType, dimension: int, rng: np.random.Generator) -> None:
    """Integers wrap around; 16-bit floats are rounded once, as they are stored."""
    if operation == "logsumexp" and element_type in INTEGERS:
        return
    dims = (2, 19) if dimension else (19, 2)
    if element_type in INTEGERS:
        x = random_values(element_type, 38, rng).reshape(dims)
    else:
        x = rng.standard_normal(dims).astype(NUMPY_DTYPE[element_type])
    reverse = bool(rng.integers(2))
    ours = scanned(windows(operation, x, dimension, reverse), x, element_type, x.dtype)
    compare(ours, expected(operation, x, dimension, reverse), element_type)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_infinities_and_nan(operation: str, dimension: int, reverse: bool, rng: np.random.Generator) -> None:
    """NaN wins from there on; both infinities make one of a sum."""
    x = rng.standard_normal((5, 21)).astype(np.float32)
    x[0, [0, 1, 9]], x[1, [3, 12]], x[2, 8], x[3, [4, 15]], x[4, :] = (
        -np.inf,
        np.inf,
        np.nan,
        (np.inf, -np.inf),
        -np.inf,
    )
    x = x if dimension else np.ascontiguousarray(x.T)
    ours = scanned(windows(operation, x, dimension, reverse), x, E.F32, x.dtype)
    compare(ours, expected(operation, x, dimension, reverse), E.F32)


def call_text(operator: str, given: str, result: str, dimension: int, keywords: str = "") -> str:
    config = (
        f'{{\\"arguments\\": [{{\\"tensor\\": 0}}, {dimension}], \\"keywords\\": {{{keywords}}}, \\"results\\": null}}'
    )
    return (
        f"ENTRY main {{ x = {given}[4,11] parameter(0)\n"
        f' ROOT r = {result}[4,11] custom-call(x), custom_call_target="aten::{operator}.default",'
        f' backend_config="{config}" }}'
    )


SAME_TYPES = [("f32", "f32"), ("f16", "f16"), ("f64", "f64")]
OTHER_TYPES = [("bf16", "f32"), ("s32", "s64"), ("u8", "s64")]


@pytest.mark.parametrize(
    ("operator", "given", "result"),
    [
        *((operator, *types) for operator in ("cumsum", "cumprod") for types in (*SAME_TYPES, *OTHER_TYPES)),
        *(("logcumsumexp", *types) for types in SAME_TYPES),
    ],
)
def test_operators_of_pytorch(
    operator: str, given: str, result: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGOS_PREFER", "triton")  # not FlagGems, which another test may have loaded
    element_type = E[given.upper()]
    dimension = int(rng.integers(-2, 2))
    module = for_accelerator(import_module(hlo_of_text(call_text(operator, given, result, dimension))))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert "triton.scan" in built.explain(), built.explain()
    assert "not triton.scan" not in built.explain()
    x = torch.from_numpy(rng.integers(-3, 4, (4, 11)) if result == "s64" else rng.standard_normal((4, 11)))
    x = x.to(dtype_of(element_type))
    with torch.inference_mode():
        (ours,) = built.run(Run(), [x])
    exact = getattr(torch, operator)(x.double() if result != "s64" else x.long(), dimension)
    precision = PRECISION.get(element_type if given == result else E.F32, 0)
    torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=precision, atol=precision * float(exact.abs().max()))


@pytest.mark.parametrize("given", ["f32", "bf16", "f64", "s32", "u8", "s64"])
@pytest.mark.parametrize("operator", ["cummax", "cummin"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_argmin_and_argmax(
    operator: str, given: str, dimension: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGOS_PREFER", "triton")
    """Of equal ones the last, of NaNs too."""
    result = f"({given}[4,11], s64[4,11])"
    text = call_text(operator, given, "R", dimension).replace("R[4,11]", result).replace("null", "[0, 1]")
    module = for_accelerator(import_module(hlo_of_text(text)))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert "triton.scan" in built.explain() and "not triton.scan" not in built.explain(), built.explain()
    x = torch.from_numpy(rng.integers(0, 5, (4, 11))).to(dtype_of(E[given.upper()]))
    if x.is_floating_point():
        x[1, [3, 7]], x[2, [1, 2]], x[3, :] = torch.nan, -torch.inf, torch.inf
    with torch.inference_mode():
        ours = built.run(Run(), [x])
    exact = getattr(torch, operator)(x, dimension)
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "text",
    [
        call_text("cumsum", "pred", "s64", 0),
        call_text("cumsum", "f32", "f16", 0, '\\"dtype\\": {\\"dtype\\": \\"float16\\"}'),
        call_text("cumsum", "c64", "c64", 0),
    ],
)
def test_operators_left_to_aten(text: str) -> None:
    module = for_accelerator(import_module(hlo_of_text(text)))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert "not triton.scan" in built.explain(), built.explain()


@pytest.mark.parametrize(
    ("window", "initial", "dims"),
    [
        ("size=9 pad=8_0", "parameter(1)", 9),  # starts with any value
        ("size=9 pad=8_0", "constant(1)", 9),
        ("size=5 pad=4_0", "constant(0)", 9),  # prefixes of five at most
        ("size=9 pad=8_8", "constant(0)", 9),
    ],
)
def test_windows_left_to_others(window: str, initial: str, dims: int) -> None:
    result = 17 if window.endswith("8_8") else dims
    text = (
        "combine { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = f32[] add(a, b) }\n"
        f"ENTRY main {{ x = f32[{dims}] parameter(0) i = f32[] {initial}\n"
        f" ROOT r = f32[{result}] reduce-window(x, i), window={{{window}}}, to_apply=combine }}"
    )
    module = for_accelerator(import_module(hlo_of_text(text)))
    built = plan.build(module.entry, (), torch.device("cpu"), SIMULATED)
    assert "not triton.scan" in built.explain(), built.explain()


def test_no_elements() -> None:
    instruction = windows("sum", np.zeros((3, 4), np.float32), 0, False)
    (ours,) = (i for i in implementations_of(str(Opcode.REDUCE_WINDOW)) if i.name == "scan")
    assert ours.unsupported(instruction, SIMULATED) == ""
    text = (
        "combine { a = f32[] parameter(0) b = f32[] parameter(1) ROOT r = f32[] add(a, b) }\n"
        "ENTRY main { x = f32[4,0] parameter(0) i = f32[] constant(0)\n"
        " ROOT r = f32[4,0] reduce-window(x, i), window={size=4x1 pad=3_0x0_0}, to_apply=combine }"
    )
    (empty,) = (i for i in import_module(hlo_of_text(text)).entry.instructions if i.opcode is Opcode.REDUCE_WINDOW)
    assert "no elements" in ours.unsupported(empty, SIMULATED)
