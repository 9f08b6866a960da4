"""Measures prepared kernels of one task, an instruction or a fused region, on the device it is compiled for, and
remembers the fastest.

Kernels that need it are checked as well: what they compute of the random operands must be what the others do. What was
measured is kept in the user's cache folder, keyed by everything that may change the order.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import flagos_backend
from flagos_backend.devices.device_lock import device_lock
from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, Shape
from flagos_backend.kernels.implementation import signature_of
from flagos_backend.kernels.reference.aten import is_pointwise
from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process import progress
from flagos_backend.process.cache import private_folder, replace
from flagos_backend.process.side_by_side import side_by_side
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

# Changes with how times are measured.
_METHOD = "in turns, beside a dummy launch"
_VERSIONED = ("torch", "triton", "flag_gems")
# Runs of one kernel: enough for a stable minimum, cut short by the time there is.
_MAX_RUNS, _MIN_RUNS = 20, 3
# A kernel that takes so many times as long as another one is not run again.
_BEATEN = 1.5
# The first kernel, which is taken where nothing is measured, is left for one that takes less than this share of its
# time: what is closer, the next measurement may decide otherwise.
_CLEARLY = 0.97
# What a launch takes the host, many times over; a kernel much longer than that needs no dummy launch.
_DUMMY_LAUNCH_SECONDS, _LONG_SECONDS = 3e-4, 2e-3
_DUMMY_LAUNCH_SIDE = 1024
# The largest difference from another kernel's results, relative to their largest magnitude, that is no defect: f32 may
# be rounded to TF32, and sums have any order.
_PRECISION = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
_PRECISION_OF_NARROW = 5e-2
# Arguments larger than this share of the free memory are not made just to measure.
_MEMORY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured: random arrays of the shapes ``operands`` are taken, those of ``result`` are made. ``key``: what
    else may change the order of kernels. Integers are below ``numbers``."""

    name: str
    key: tuple[str, ...]
    operands: tuple[Shape, ...]
    result: Shape
    numbers: int = 2  # 0 and 1 index any array that has elements

    @staticmethod
    def of(instruction: Instruction) -> Task:
        attributes = instruction.attributes
        is_call = isinstance(attributes, CustomCallAttributes) and attributes.target.startswith("aten::")
        numbers = 1 << (30 if is_call and is_pointwise(instruction) else 1)
        shapes = tuple(operand.shape for operand in instruction.operands)
        return Task(instruction.name, tuple(signature_of(instruction)), shapes, instruction.shape, numbers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``name`` of the kernel to use; ``text`` says why."""

    name: str
    text: str


def fastest(
    task: Task,
    target: Target,
    kernels: Mapping[str, Kernel],
    seconds: float,
    compiled: Collection[str] = (),
    warm_ups: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    checked: Collection[str] = (),
) -> Outcome:
    """The fastest of ``kernels`` by name; the first, unmeasured, where there is no device or no time to measure on.

    ``compiled`` names those that start at once: they are measured before the time is up. ``warm_ups``: of those that
    start at once after it; they go on side by side. Those in ``checked`` are not used if they compute something else
    than the others.
    """
    first = next(iter(kernels))
    if len(kernels) == 1:
        return Outcome(first, "the only one")
    reason = _unmeasurable(task, target, seconds)
    if reason:
        return Outcome(first, f"first of {len(kernels)}, not measured: {reason}")
    path = _cache_path(task, target, tuple(kernels))
    times = _read(path)
    if times is None or not times.keys() <= kernels.keys():
        order = sorted(kernels, key=lambda name: name not in compiled)
        with progress.shown(), progress.stage(f"measuring {task.name}"):
            times = _measure(task, target, {name: kernels[name] for name in order}, seconds, warm_ups, checked)
        _write(path, times)
    measured = {name: taken for name, taken in times.items() if taken is not None}
    name = _quickest(times, first)
    if name is None:
        right = next((name for name in kernels if name not in times), first)
        return Outcome(right, f"first of {len(kernels)}: none could be measured")
    others = [f"{other} {taken * 1e3:.4g} ms" for other, taken in measured.items() if other != name]
    others += [f"{other} not measured" for other in kernels if other not in times]
    others += [f"{other}, which computes something else" for other in times if other not in measured]
    text = f"measured {measured[name] * 1e3:.4g} ms"
    return Outcome(name, text + (f", against {', '.join(others)}" if others else ""))


def awaited(
    task: Task,
    target: Target,
    kernels: Mapping[str, Kernel],
    seconds: float,
    warm_ups: Mapping[str, Callable[[], object]],
) -> Mapping[str, Callable[[], object]]:
    """Those of ``warm_ups`` that ``fastest`` of the same waits for, or who then runs what it found."""
    found = _first_or_remembered(task, target, kernels, seconds)
    return warm_ups if found is None else {name: warm_ups[name] for name in (found,) if name in warm_ups}


def _first_or_remembered(task: Task, target: Target, kernels: Mapping[str, Kernel], seconds: float) -> str | None:
    """The kernel that ``fastest`` gives without measuring; None where it measures."""
    first = next(iter(kernels))
    if len(kernels) == 1 or _unmeasurable(task, target, seconds):
        return first
    times = _read(_cache_path(task, target, tuple(kernels)))
    if times is None or not times.keys() <= kernels.keys():
        return None
    return _quickest(times, first) or first


def _unmeasurable(task: Task, target: Target, seconds: float) -> str:
    if target.device_type == "cpu":
        return "the device is the host's memory"
    if seconds == 0:
        return "FLAGOS_AUTOTUNE_SECONDS is 0"
    module = torch.get_device_module(target.device_type)
    free, _ = module.mem_get_info()
    needed = sum(map(_bytes_of, task.operands)) + _bytes_of(task.result)
    return "its arrays are too large to make twice" if needed > free * _MEMORY_SHARE else ""


def _bytes_of(shape: Shape) -> int:
    return shape.num_bytes if isinstance(shape, ArrayShape) else sum(map(_bytes_of, shape.elements))


def _measure(
    task: Task,
    target: Target,
    kernels: Mapping[str, Kernel],
    seconds: float,
    warm_ups: Mapping[str, Callable[[], object]],
    checked: Collection[str],
) -> _Times:
    """Seconds of each kernel that ran, or was compiled, before the time was up; compiling counts, but is not
    interrupted. All run before the first is measured: from then on they take turns."""
    device = torch.device(target.device_type, torch.get_device_module(target.device_type).current_device())
    arguments = _arguments(task, device)
    run = Run(device=device, asynchronous=True)
    times: _Times = {}
    ready: dict[str, Kernel] = {}
    trusted = [kernel for name, kernel in kernels.items() if name not in checked]
    begun = time.perf_counter()
    _begin([*warm_ups.values()], device)
    left = seconds - (time.perf_counter() - begun)
    with device_lock:
        deadline = time.perf_counter() + left
        expected = _expected(trusted, run, arguments) if len(trusted) < len(kernels) else None
        for name, kernel in progress.counted([*kernels.items()], "candidates"):
            if ready and name not in warm_ups and time.perf_counter() > deadline:
                continue
            try:
                if name in checked and expected is not None and not _agree(kernel(run, *arguments), expected):
                    logger.warning("%s: %s computes something else than the others and is not used", task.name, name)
                    times[name] = None
                    continue
                kernel(run, *arguments)  # compiles, and tunes FlagGems' own kernels
                kernel(run, *arguments)
                ready[name] = kernel
            except Exception as error:  # a kernel that cannot run here is no candidate, whatever it raises
                logger.debug("%s: %s cannot run: %s", task.name, name, error)
        return times | _times_in_turns(ready, run, arguments, device, seconds)


def _expected(trusted: Sequence[Kernel], run: Run, arguments: Sequence[Value]) -> Value | None:
    """What the first kernel that can run here computes."""
    for kernel in trusted:
        with contextlib.suppress(Exception):  # a kernel that cannot run here, whatever it raises
            expected: Value = kernel(run, *arguments)
            return expected
    return None


def _agree(found: Value, expected: Value) -> bool:
    """Whether results are the same but for roundings."""
    if not isinstance(expected, torch.Tensor):
        return len(found) == len(expected) and all(map(_agree, found, expected))
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    if expected.dtype not in _PRECISION:
        found, expected = found.float(), expected.float()
        precision = _PRECISION_OF_NARROW
    else:
        precision = _PRECISION[expected.dtype]
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(expected.isnan(), found.isnan()):
        return False
    distance = torch.where(finite, found - expected, 0).abs()
    scale = torch.where(finite, expected, 0).abs()
    return not expected.numel() or bool(distance.max() <= precision * scale.max())


def _begin(warm_ups: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Side by side. A kernel that fails will fail again when it is measured."""

    def call(warm_up: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            warm_up()

    side_by_side(call, warm_ups, device)


def _times_in_turns(
    kernels: Mapping[str, Kernel], run: Run, arguments: Sequence[Value], device: torch.device, seconds: float
) -> dict[str, float]:
    """The least time of each, which have run before. What else the device does for a while, as for another process,
    falls on all of them alike. Those that are beaten clearly run no longer than it takes to see that."""
    module = torch.get_device_module(device.type)
    dummy_launch = _dummy_launch(device)
    best = dict.fromkeys(kernels, float("inf"))
    contenders = list(kernels)
    _wait(module)
    deadline = time.perf_counter() + seconds
    for count in range(1, _MAX_RUNS + 1):
        for name in contenders:
            if best[name] < _LONG_SECONDS:
                dummy_launch()
            start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
            start.record()
            kernels[name](run, *arguments)
            stop.record()
            stop.synchronize()
            best[name] = min(best[name], start.elapsed_time(stop) / 1e3)
        if count >= _MIN_RUNS:
            least = min(best.values(), default=0.0)
            contenders = [name for name in contenders if best[name] <= _BEATEN * least]
            if len(contenders) < 2 or time.perf_counter() > deadline:
                break
    return best


def _dummy_launch(device: torch.device) -> Callable[[], object]:
    """Keeps the device busy while the host launches what is measured: a kernel that is shorter than its launch would be
    measured by that, though a replay launches it without the host. Sums down columns take long, little memory and no
    library of the vendor's. Nothing where the memory does not suffice."""
    module = torch.get_device_module(device.type)
    try:
        array = torch.zeros((_DUMMY_LAUNCH_SIDE, _DUMMY_LAUNCH_SIDE), device=device)
        result = torch.empty_like(array)
        torch.cumsum(array, 0, out=result)
    except RuntimeError:
        return lambda: None
    start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    for _ in range(_MIN_RUNS):
        torch.cumsum(array, 0, out=result)
    stop.record()
    stop.synchronize()
    one = max(start.elapsed_time(stop) / 1e3 / _MIN_RUNS, 1e-6)
    calls = -(-_DUMMY_LAUNCH_SECONDS // one)

    def dummy_launch() -> None:
        for _ in range(int(calls)):
            torch.cumsum(array, 0, out=result)

    return dummy_launch


def _wait(module: ModuleType) -> None:
    """For what was enqueued: other threads may have the device do things that must not be waited for."""
    reached = module.Event(enable_timing=True)
    reached.record()
    reached.synchronize()


def _arguments(task: Task, device: torch.device) -> list[Value]:
    """Random operands. They come from a generator of their own: the device's belongs to the user's program, and may be
    in another thread's capture."""
    generator = torch.Generator(device)
    return [_random(shape, generator, task.numbers) for shape in task.operands]


def _random(shape: Shape, generator: torch.Generator, numbers: int) -> Value:
    """Values of ``shape``: normal floats, and integers below ``numbers``."""
    if not isinstance(shape, ArrayShape):
        return tuple(_random(element, generator, numbers) for element in shape.elements)
    dtype, device = dtype_of(shape.element_type), generator.device
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.itemsize >= 2 else torch.float32
        return torch.randn(shape.dims, generator=generator, dtype=wide, device=device).to(dtype)
    numbers = 2 if dtype is torch.bool else numbers
    return torch.randint(0, numbers, shape.dims, generator=generator, device=device).to(dtype)


# ---- what is remembered ----


@functools.cache
def _versions() -> str:
    found = [f"flagos {flagos_backend.__version__}, {_METHOD}"]
    for package in _VERSIONED:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} none")
    return ", ".join(found)


def _cache_path(task: Task, target: Target, names: tuple[str, ...]) -> Path | None:
    """Where times of these kernels are kept; None where no folder is safe to use."""
    folder = private_folder("tuning")
    if folder is None:
        return None
    module = torch.get_device_module(target.device_type)
    key = (str(module.get_device_name()), repr(target), _versions(), *task.key, *names)
    return folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"


# By name of a kernel: seconds, or that it computes something else than it should.
_Times = dict[str, float | None]


def _quickest(times: _Times, first: str) -> str | None:
    """The fastest; ``first`` where it is as fast but for noise."""
    measured = {name: taken for name, taken in times.items() if taken is not None}
    if not measured:
        return None
    name = min(measured, key=lambda each: measured[each])
    return first if first in measured and measured[name] > measured[first] * _CLEARLY else name


def _read(path: Path | None) -> _Times | None:
    if path is None or not path.exists():
        return None
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    valid = isinstance(found, dict) and all(v is None or (isinstance(v, float) and 0 < v < 1e6) for v in found.values())
    return found if valid else None


def _write(path: Path | None, times: _Times) -> None:
    """In one step, so that other processes see all or nothing."""
    if path is None or not times:
        return
    try:
        replace(path, json.dumps(times).encode())
    except OSError as error:
        logger.warning("measured kernels are not kept: %s", error)
