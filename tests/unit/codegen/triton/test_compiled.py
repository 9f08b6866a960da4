"""Generated kernels, and those that were written, compile for an accelerator that is not there: Triton's interpreter
takes more than its compiler does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl
from triton.compiler import ASTSource

from flagos_backend.codegen.triton import RegionKernel, prepare, schedule
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_compiled import COMPILED_FOR, compile_kernel, compiled
from support.triton_programs import CASES, H100


def regions(name: str) -> list[RegionKernel]:
    return kernels_of(*CASES[name])


def kernels_of(
    target: Target, function: Callable[..., object], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[RegionKernel]:
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    return [prepare(item, target) for item in schedule(flat, target).items if isinstance(item, Region)]


@pytest.mark.parametrize("name", [name for name, (target, _, _) in CASES.items() if target is H100])
def test_generated(name: str) -> None:
    kernels = regions(name)
    assert kernels
    for kernel in kernels:
        assert all(".entry" in ptx for ptx in compiled(kernel))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_products_and_sums_of_16_bit_floats_round_one_by_one(dtype: type) -> None:
    """Two at once, which gives what float32 rounded to 16 bits gives."""
    (kernel,) = kernels_of(H100, lambda x, y: x * y + y, [jax.ShapeDtypeStruct((1024, 768), dtype)] * 2)
    (ptx,) = compiled(kernel)
    assert "mul.rn." in ptx and "add.rn." in ptx and "fma." not in ptx and "cvt." not in ptx


def test_sums_of_16_bits_are_not_packed() -> None:
    """Which an assembler of NVIDIA's computes wrongly."""
    for kernel in regions("positions_of_16_bits"):
        for ptx in compiled(kernel):
            assert "add.s16x2" not in ptx


@pytest.mark.parametrize(("bits", "k"), [(16, 1), (32, 16)])
def test_top_k(bits: int, k: int) -> None:
    kernels = importlib.import_module("flagos_backend.kernels.triton.top_k_kernels")
    constants = {"K": max(k, 2), "BLOCK": 1024, "BITS": bits, "IS_FLOAT": True, "IS_UNSIGNED": False, "LARGEST": True}
    element = f"*i{bits}"
    assert ".entry" in compile_kernel(kernels.top_k, [element, element, "*i32", "i32", "i32"], constants, 4)
    assert ".entry" in compile_kernel(kernels.top_of_segments, [element, "*i64", "i32", "i32"], constants, 4)
    joined = {"K": max(k, 2), "BLOCK": 64}
    arrays = [element, "*i64", element, "*i32"]
    assert ".entry" in compile_kernel(kernels.top_of_keys, [*arrays, "i32", "i32", "i32"], joined, 4)


@pytest.mark.parametrize(("bits", "alone", "log_warps"), [(32, True, 4), (16, False, 4), (32, False, 5)])
def test_sort(bits: int, alone: bool, log_warps: int) -> None:
    """Rows of 16,384. What makes it fast: where a thread has both elements of an exchange, nothing is moved; only lanes
    shuffle, and shared memory is for exchanges of warps."""
    kernels = importlib.import_module("flagos_backend.kernels.triton.sort_kernels")
    log_elements = 14 - 5 - log_warps
    sizes = {"LOG": 14, "LOG_E": log_elements, "LOG_W": log_warps, "LOG_L": 5}
    order = {"BITS": bits, "IS_FLOAT": False, "IS_UNSIGNED": False, "DESCENDING": False, "INFINITY": 0}
    merged = {"IS_FLOAT": True, "INFINITY": 0x7F800000 if bits == 32 else 0x7F80, "DESCENDING": True}
    moved = (f"*i{bits}",) if alone else (f"*i{bits}", "*i8", "*i64")
    types = [f"*i{bits}", moved, moved, "i32", "i32"]
    ptx = compile_kernel(kernels.sort_rows, types, {**sizes, **order, "ALONE": alone}, 1 << log_warps)
    compile_kernel(kernels.sort_rows, types, {**sizes, **order, "ALONE": alone, **merged}, 1 << log_warps)
    words = 2 if bits == 32 and not alone else 1
    assert ptx.count("shfl.sync") == words << log_elements  # one loop's


@pytest.mark.parametrize(
    ("name", "pointers", "own"),
    [
        ("reduce_windows", ["*bf16"] * 3, {"COMBINE": "maximum"}),
        ("select_places", ["*bf16", "*i8"], {"COMPARE": "GE"}),
        ("gather_selected", ["*i8", *["*bf16"] * 3], {}),
    ],
)
def test_windows(name: str, pointers: list[str], own: dict[str, object]) -> None:
    kernels = importlib.import_module("flagos_backend.kernels.triton.windows_kernels")
    sizes = {"H": 112, "W": 112, "B": 64, "OH": 56, "OW": 56, "KH": 3, "KW": 3, "SH": 2, "SW": 2, "PH": 0, "PW": 0}
    constants = {**sizes, "DH": 1, "DW": 1, "ACC": tl.float32, "BLOCK": 512, **own}
    assert ".entry" in compile_kernel(getattr(kernels, name), [*pointers, "i32"], constants, 4)


ATTENTION = {
    "attention_forward": (64, 64, 4, 3),
    "attention_query_gradient": (64, 64, 4, 2),
    "attention_key_gradient": (64, 64, 4, 2),
    "attention_delta": (64, 64, 4, 3),
    "attention_bias_gradient": (64, 64, 4, 2),
}
FLOATS, NUMBERS = ("scale", "fill", "factor"), ("upper", "lower")
#: What a program of an H100 may have of shared memory.
SHARED_MEMORY = 227 * 1024


def attention_ptx(name: str, channels: int, **changes: object) -> str:
    """bf16, causal, with the blocks that run where nothing is measured; checks that the device has room."""
    module = "attention_kernels" if name == "attention_forward" else "attention_gradient_kernels"
    function = getattr(importlib.import_module(f"flagos_backend.kernels.triton.{module}"), name)
    rows, keys, warps, stages = ATTENTION[name]
    flags = ("HAS_BIAS", "HAS_MASK", "HAS_SINK", "HAS_LOWER", "EMPTY_ROWS", "FINITE_FILL", "ADDED", "SUMS_QUERIES")
    constants: dict[str, object] = {
        **dict.fromkeys(flags, False), "HAS_UPPER": True, "EVEN": True, "WIDE": False, "PRECISION": "ieee", "CAP": 0.0,
        "BLOCK_M": rows, "BLOCK_N": keys, "BLOCK_D": channels, "BLOCK_E": channels,
    }  # fmt: skip
    constants |= changes
    constants |= {n: 1 for n in function.arg_names if n.endswith(("_d", "_e"))}  # strides of channels
    wide = ("bias", "sink", "statistics", "delta", "sink_gradient")
    signature, attributes = {}, {}
    for place, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        if argument in FLOATS:
            signature[argument] = "fp32"
            continue
        is_array = "_" not in argument.removesuffix("_gradient") and argument.islower() and argument not in NUMBERS
        element = "fp32" if argument in wide else "u8" if argument == "mask" else "bf16"
        signature[argument] = f"*{element}" if is_array else "i32"
        if is_array or argument.endswith(("_b", "_h", "_t", "_s")) or argument in ("T", "S"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    known = {(function.arg_names.index(n),): v for n, v in constants.items() if n in function.arg_names}
    source = ASTSource(function, signature, known, attributes)
    compiled = triton.compile(source, target=COMPILED_FOR, options={"num_warps": warps, "num_stages": stages})
    assert compiled.metadata.shared <= SHARED_MEMORY
    return compiled.asm["ptx"]


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "attention_delta"])
def test_attention(name: str) -> None:
    """A soft cap takes one more exponential and a division for each logit, and costs nothing where there is none."""
    plain, capped = attention_ptx(name, 128), attention_ptx(name, 128, CAP=72.0)
    assert "wgmma" in plain and "wgmma" in capped
    exponentials = [ptx.count("ex2.approx") for ptx in (plain, capped)]
    divisions = [ptx.count("div.full") for ptx in (plain, capped)]
    assert divisions[1] - divisions[0] == exponentials[1] - exponentials[0] > 0


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_everything(name: str) -> None:
    everything = dict.fromkeys(
        ("HAS_BIAS", "HAS_MASK", "HAS_SINK", "HAS_LOWER", "EMPTY_ROWS", "FINITE_FILL", "ADDED"), True
    )
    assert ".entry" in attention_ptx(name, 64, **everything, EVEN=False, WIDE=True, CAP=72.0)


def test_a_gradient_of_a_bias_without_queries() -> None:
    ptx = attention_ptx("attention_bias_gradient", 128, HAS_BIAS=True, SUMS_QUERIES=True)
    assert "wgmma" in ptx and "atom" not in ptx  # sums are one program's, and the same in every run
