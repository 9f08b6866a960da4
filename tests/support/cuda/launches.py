"""A process of its own: launches through Triton's launcher and ours, into the driver of driver.c. Run with the folder
that holds it as libcuda.so.1, and a seed; prints what each launch did, as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER, SEED = Path(sys.argv[1]), int(sys.argv[2])
os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
os.environ["TRITON_CACHE_DIR"] = str(FOLDER / "cache")
FAKE = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)

import triton  # noqa: E402
import triton.backends.nvidia.driver as nvidia  # noqa: E402

from flagos_backend.kernels.triton import _cuda, cuda_launcher  # noqa: E402

WIDTHS = {"i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "fp16": 2, "bf16": 2, "i32": 4, "u32": 4}
WIDTHS |= {"fp32": 4, "f32": 4, "i64": 8, "u64": 8, "fp64": 8}
FORMATS = {"i1": "b", "i8": "b", "u1": "B", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q"}
FORMATS |= {"u64": "Q", "fp16": "e", "bf16": "f", "fp32": "f", "f32": "f", "fp64": "d"}
ONE_FOR_ALL = not hasattr(nvidia, "make_launcher")


class Array:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def launchers(signature: tuple[Any, ...], metadata: SimpleNamespace) -> dict[str, Callable[..., None]]:
    """Triton's and ours, called alike."""
    source = SimpleNamespace(constants={}, signature=dict(enumerate(signature)), fn=None)
    theirs = ORIGINAL.__new__(ORIGINAL)
    ORIGINAL_INIT(theirs, source, metadata)
    if not ONE_FOR_ALL:
        ours = nvidia.CudaLauncher(source, metadata)
        assert isinstance(ours.launch, _cuda.Launcher), ours.launch
        return {"theirs": theirs, "ours": ours}
    launch = _cuda.Launcher(signature)

    def call(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        size = metadata.global_scratch_size * x * y * z * metadata.num_ctas
        scratch = allocate(size, metadata.global_scratch_align, stream) if size else None
        flags = (metadata.launch_cooperative_grid, metadata.launch_pdl)
        launch(x, y, z, stream, function, *flags, scratch, None, *rest)

    return {"theirs": theirs, "ours": call}


def allocate(size: int, align: int, stream: int) -> Array:
    return Array((1 << 41) + size * 256 + align + stream)


def flat(signature: tuple[Any, ...], values: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The parameters of a kernel: types and values."""
    found: list[tuple[str, Any]] = []
    for kind, value in zip(signature, values, strict=True):
        if isinstance(kind, tuple):
            found += flat(kind, value)
        elif kind != "constexpr":
            found.append((kind, value))
    return found


def outcome(launch: Callable[..., None], arguments: tuple[Any, ...], *, no_context: bool) -> dict[str, str]:
    log = (ctypes.c_char * (1 << 18)).in_dll(FAKE, "fake_log")
    log.value = b""
    ctypes.c_int.in_dll(FAKE, "fake_no_context").value = no_context
    failure = ""
    try:
        launch(*arguments)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return {"log": log.value.decode(), "failure": failure}


def expected(kind: str, value: Any) -> str:
    """The bytes of a parameter, by Python's own packing."""
    if not kind.startswith("*"):
        packed = struct.pack("<" + FORMATS[kind], value)
        return (packed[2:] if kind == "bf16" else packed).hex()
    address = value.address if isinstance(value, Array) else value or 0
    mapped = isinstance(value, Array) and address & 1
    return struct.pack("<Q", address + (1 << 40) if mapped else address).hex()


def value_of(kind: Any, rng: random.Random) -> Any:
    if isinstance(kind, tuple):
        return tuple(value_of(entry, rng) for entry in kind)
    if kind == "constexpr":
        return rng.choice([None, 3, "text", (1, 2)])
    if kind.startswith("*"):
        address = rng.randrange(1 << 32, 1 << 47)
        return rng.choice([None, 0, address, Array(0), Array(address & ~1), Array(address | 1)])
    if kind == "i1":
        return rng.random() < 0.5
    if kind in ("fp16", "bf16", "fp32", "f32", "fp64"):
        largest = 65519.0 if kind == "fp16" else 3e38
        number = rng.choice([-1, 1]) * 2.0 ** rng.uniform(-30, 15) * rng.choice([1.0, 0.0, 1.0])
        steps = rng.randrange(1 << 11) * 2.0**-25 * (2 * rng.randrange(2) + 1)  # near halves' halfway points
        return rng.choice([number, steps, -steps, largest, -largest, float("inf"), -float("inf"), 0.0, -0.0, 7])
    width = 8 * WIDTHS[kind]
    if kind.startswith("u"):
        return rng.choice([0, (1 << width) - 1, rng.randrange(1 << width)])
    high = (1 << width - 1) - 1
    low = 0 if width == 8 else -high - 1  # Triton's launchers take no negative bytes
    return rng.choice([low, high, rng.randint(low, high)])


def signature_of(rng: random.Random, depth: int = 0) -> tuple[Any, ...]:
    kinds = ["*fp32", "*i1", "constexpr", *WIDTHS]
    return tuple(
        signature_of(rng, depth + 1) if depth < 2 and rng.random() < 0.1 else rng.choice(kinds)
        for _ in range(rng.randrange(1, 8) if depth else rng.randrange(30))
    )


def main() -> None:
    rng = random.Random(SEED)
    triton.set_allocator(allocate)
    everything = ("*fp32", *WIDTHS, "constexpr", ("*i8", ("i32", "constexpr", "fp16"), "i64"), ())
    signatures = [(), everything, ("i32",) * 100, *(signature_of(rng) for _ in range(7))]
    cases = []
    for number, signature in enumerate(signatures):
        metadata = SimpleNamespace(
            num_ctas=[1, 2, 16][number % 3],
            global_scratch_size=128 * (number % 2),
            global_scratch_align=64,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=number % 5 == 2,
            launch_pdl=number % 4 == 1,
            instrumentation_mode="",
        )
        both = launchers(signature, metadata)
        kinds = [kind for kind, _ in flat(signature, value_of(signature, rng))]
        widths = [WIDTHS.get(kind, 8) for kind in kinds] + [8, 8]
        (ctypes.c_int * 512).in_dll(FAKE, "fake_sizes")[: len(widths)] = widths
        ctypes.c_int.in_dll(FAKE, "fake_num_sizes").value = len(widths)
        for trial in range(30):
            values = value_of(signature, rng)
            grid = (rng.choice([1, 3, 70000]), rng.choice([1, 5, 300]), rng.choice([1, 2, 0 if trial % 3 == 2 else 90]))
            packed = (4 << trial % 2, metadata.num_ctas, 1024 * trial)
            called: list[Any] = []
            hooks = (called.append, called.append) if trial % 3 == 0 else (None, None)
            stream = 0xBAD if trial == 7 else 0x50 + trial
            leading = (*grid, stream, 0xF00 + trial, packed, f"metadata {trial}", *hooks)
            results = {}
            for name, launch in both.items():
                called.clear()
                results[name] = outcome(launch, (*leading, *values), no_context=trial == 1) | {"called": list(called)}
            parameters = flat(signature, values)
            packed_values = [expected(kind, value) for kind, value in parameters]
            cases.append({"parameters": list(map(repr, parameters)), "expected": packed_values, **results})
    print(json.dumps({"one_for_all": ONE_FOR_ALL, "cases": cases}))


if ONE_FOR_ALL:
    active = SimpleNamespace(utils=nvidia.CudaUtils(), allocate_default_profile_scratch=lambda *_: None)
    triton.runtime.driver.set_active(active)
ORIGINAL, ORIGINAL_INIT = nvidia.CudaLauncher, nvidia.CudaLauncher.__init__
cuda_launcher.install(nvidia)
main()
