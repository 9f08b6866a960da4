"""Generated kernels on an accelerator: bandwidth of what fusion makes of memory-bound programs, beside a plain copy,
PyTorch's kernels, Inductor's and XLA's, in one process taking turns.

TB/s counting each argument and each result once. Arrays of 256 MiB and more.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax
from jaxlib import _jax

from flagos_backend.codegen.triton import RegionKernels, schedule
from flagos_backend.codegen.triton.kernel import array_of
from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from flagos_backend.passes.pipelines import optimize

from . import report

Call = Callable[[], object]
ROWS, COLUMNS = 32768, 4096
VOCABULARY = 32000
# GPT-2's, an odd number, and Llama 3's.
ODD_VOCABULARY, LARGE_VOCABULARY = 50257, 128256
ROUNDS, CALLS = 7, 20


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5) * gain + bias).astype(x.dtype)


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * gain).astype(x.dtype)


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.take_along_axis(wide, labels[:, None], -1).mean()


def cross_entropy_of_one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * wide).sum(-1).mean()


def backward(function: Callable[..., jax.Array]) -> Callable[..., object]:
    """The gradients of all arguments but the last, which is the result's."""
    return lambda *arguments: jax.vjp(function, *arguments[:-1])[1](arguments[-1])


@dataclass(frozen=True)
class Case:
    """``arguments``: shape and dtype of each; ``torch_call`` takes them. ``differentiates``: the torch call's gradients
    are what is measured, with the last argument as the result's."""

    name: str
    function: Callable[..., object]
    torch_call: Callable[..., torch.Tensor]
    arguments: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    differentiates: bool = False


_BIG = ((ROWS, COLUMNS), torch.bfloat16)
_ROW = ((COLUMNS,), torch.float32)
CASES = (
    Case(
        "gelu(x) * y",
        lambda x, y: jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype) * y,
        lambda x, y: F.gelu(x, approximate="tanh") * y,
        (_BIG, _BIG),
    ),
    Case("softmax", softmax, lambda x: F.softmax(x, -1), (_BIG,)),
    Case(
        "softmax, f32, long rows",
        lambda x: jax.nn.softmax(x, -1),
        lambda x: F.softmax(x, -1),
        (((8192, VOCABULARY), torch.float32),),
    ),
    Case(
        "layer_norm",
        layer_norm,
        lambda x, g, b: F.layer_norm(x, (COLUMNS,), g.to(x.dtype), b.to(x.dtype), 1e-5),
        (_BIG, _ROW, _ROW),
    ),
    Case(
        "layer_norm backward",
        backward(layer_norm),
        lambda x, g, b: F.layer_norm(x, (COLUMNS,), g.to(x.dtype), b.to(x.dtype), 1e-5),
        (_BIG, _ROW, _ROW, _BIG),
        differentiates=True,
    ),
    Case("rms_norm", rms_norm, lambda x, g: F.rms_norm(x, (COLUMNS,), g.to(x.dtype), 1e-5), (_BIG, _ROW)),
    Case(
        "rms_norm backward",
        backward(rms_norm),
        lambda x, g: F.rms_norm(x, (COLUMNS,), g.to(x.dtype), 1e-5),
        (_BIG, _ROW, _BIG),
        differentiates=True,
    ),
    Case(
        "cross_entropy with gradient",
        lambda x, labels: jax.value_and_grad(cross_entropy)(x, labels),
        lambda x, labels: F.cross_entropy(x.float(), labels.long()),
        (((8192, VOCABULARY), torch.bfloat16), ((8192,), torch.int32)),
        differentiates=True,
    ),
    Case(
        "cross_entropy, one-hot",
        lambda x, labels: jax.value_and_grad(cross_entropy_of_one_hot)(x, labels),
        lambda x, labels: F.cross_entropy(x.float(), labels.long()),
        (((8192, VOCABULARY), torch.bfloat16), ((8192,), torch.int32)),
        differentiates=True,
    ),
    Case("softmax, long rows", softmax, lambda x: x.softmax(-1), (((8192, VOCABULARY), torch.bfloat16),)),
    Case("softmax, odd rows", softmax, lambda x: x.softmax(-1), (((8192, ODD_VOCABULARY), torch.bfloat16),)),
    *(
        Case(
            f"cross_entropy of {vocabulary}",
            lambda x, labels: jax.value_and_grad(cross_entropy)(x, labels),
            lambda x, labels: F.cross_entropy(x.float(), labels.long()),
            (((4096, vocabulary), torch.bfloat16), ((4096,), torch.int32)),
            differentiates=True,
        )
        for vocabulary in (ODD_VOCABULARY, LARGE_VOCABULARY)
    ),
    Case("sum over rows", lambda x: x.astype(jnp.float32).sum(0), lambda x: x.sum(0, dtype=torch.float32), (_BIG,)),
    Case("sum of everything", lambda x: x.sum(), lambda x: x.sum(), (((ROWS, COLUMNS), torch.float32),)),
    Case("transpose", lambda x: x.T + 0, lambda x: x.t().contiguous(), (((16384, 8192), torch.float32),)),
)


def hlo_of(function: Callable[..., object], arguments: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    lowered = jax.jit(function, keep_unused=True).trace(*arguments).lower(lowering_platforms=("generic",))
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    converted = _jax.mlir.mlir_module_to_xla_computation(bytecode.getvalue(), use_tuple_args=False, return_tuple=False)
    return bytes(converted.as_serialized_hlo_module_proto())


def ours(case: Case, arguments: Sequence[torch.Tensor], accelerator: TorchAccelerator) -> tuple[Call, int, list[str]]:
    """A call, the bytes of arguments and results, and what its kernels are."""
    shapes = [jax.ShapeDtypeStruct(a.shape, str(a.dtype).removeprefix("torch.")) for a in arguments]
    flat = flatten(optimize(import_module(hlo_of(case.function, shapes)), accelerator.target).entry)
    items = schedule(flat, accelerator.target)
    memory: dict[Instruction, torch.Tensor] = dict(zip(flat.parameters, arguments, strict=True))
    steps: list[Call] = []
    texts = []
    for item in items.items:
        if isinstance(item, Region):
            step, text = _generated(item, memory, accelerator)
        else:
            step, text = _library(item, items.buffers, memory)
        steps.append(step)
        texts.append(text)

    def call() -> None:
        for step in steps:
            step()

    call()
    results = {items.buffers[o]: memory[items.buffers[o]] for o in flat.outputs}
    moved = sum(t.nbytes for t in (*arguments, *results.values()))
    return call, moved, texts


def _generated(
    region: Region, memory: dict[Instruction, torch.Tensor], accelerator: TorchAccelerator
) -> tuple[Call, str]:
    kernel = RegionKernels.of(region, accelerator.target).fastest()
    for output in kernel.outputs:
        shape = array_of(output)
        memory[output] = torch.empty(shape.dims, dtype=dtype_of(shape.element_type), device=accelerator.device)
    return lambda: kernel([memory[i] for i in kernel.inputs], [memory[o] for o in kernel.outputs]), kernel.text


def _library(
    item: Instruction, buffers: dict[Instruction, Instruction], memory: dict[Instruction, torch.Tensor]
) -> tuple[Call, str]:
    kernel = registry.prepare(item)

    def step() -> None:
        memory[item] = kernel(Run(), *[memory[buffers[o]].reshape(array_of(o).dims) for o in item.operands])

    return step, f"ATen: {item}"


def with_torch(case: Case, function: Callable[..., torch.Tensor], arguments: Sequence[torch.Tensor]) -> Call:
    if not case.differentiates:
        return lambda: function(*arguments)
    differentiable = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    scalar = case.name.startswith("cross")
    operands = differentiable if scalar else differentiable[:-1]
    wanted = [a for a in operands if a.requires_grad]
    if scalar:
        return lambda: torch.autograd.grad(function(*operands), wanted)
    result = function(*operands)
    return lambda: torch.autograd.grad(result, wanted, arguments[-1], retain_graph=True)


def with_xla(case: Case, arguments: Sequence[torch.Tensor]) -> Call:
    compiled = jax.jit(case.function)
    arrays = [jax.dlpack.from_dlpack(a.contiguous()) for a in arguments]
    return lambda: compiled(*arrays)


def milliseconds(call: Call, accelerator: TorchAccelerator) -> float:
    """Of one call, by the device's clock for torch's streams and by the host's for XLA's."""
    start, end = (torch.Event(accelerator.device.type, enable_timing=True) for _ in range(2))
    call()  # the device is busy while the host prepares the next one, whose start would count otherwise
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def milliseconds_of_xla(call: Call) -> float:
    jax.block_until_ready(call())
    begin = time.perf_counter()
    results = [call() for _ in range(CALLS)]
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / CALLS * 1e3


def measure(case: Case, accelerator: TorchAccelerator, peers: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """TB/s of each contender."""
    torch.manual_seed(0)
    arguments = [
        torch.randn(shape, device=accelerator.device).to(dtype)
        if dtype.is_floating_point
        else torch.randint(0, VOCABULARY, shape, device=accelerator.device, dtype=dtype)
        for shape, dtype in case.arguments
    ]
    mine, moved, texts = ours(case, arguments, accelerator)
    half = torch.empty(moved // 2, dtype=torch.uint8, device=accelerator.device)
    other = torch.empty_like(half)
    calls: dict[str, Call] = {"copy": lambda: other.copy_(half), "ours": mine}
    if "torch" in peers:
        calls["torch"] = with_torch(case, case.torch_call, arguments)
    if "inductor" in peers:
        torch._dynamo.reset()
        calls["inductor"] = with_torch(case, torch.compile(case.torch_call, dynamic=False), arguments)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(milliseconds(call, accelerator))
    if "xla" in peers:
        theirs = with_xla(case, arguments)
        times["xla"] = [milliseconds_of_xla(theirs) for _ in range(ROUNDS)]
    return {name: moved / statistics.median(found) / 1e9 for name, found in times.items()}, texts


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peers", default="torch,inductor,xla")
    parser.add_argument("--only", default="", help="cases whose names begin so, comma-separated")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    if device is None:
        parser.error("this needs an accelerator")
    accelerator = TorchAccelerator(device.type, 0)
    peers = options.peers.split(",")
    names = ["copy", "ours", *(p for p in ("torch", "inductor", "xla") if p in peers)]
    lines = [f"{'TB/s':30}" + "".join(f"{name:>10}" for name in names) + f"{'ours/copy':>11}"]
    rows, kernels = [], []
    for case in CASES:
        if options.only and not case.name.startswith(tuple(options.only.split(","))):
            continue
        found, texts = measure(case, accelerator, peers)
        line = f"{case.name:30}" + "".join(f"{found[name]:10.2f}" for name in names)
        lines.append(f"{line}{found['ours'] / found['copy']:11.2f}")
        print(lines[-1], flush=True, file=sys.stderr)
        rows.append({"name": case.name, "unit": "TB/s", **found})
        kernels += [f"{case.name}: {text}" for text in texts]
    source = report.origin("fused_kernels", accelerator.facts().kind)
    tail = [
        ", ".join(f"{k} {v}" for k, v in source.versions.items()),
        f"{source.hardware}; {source.date}; {source.command}",
    ]
    text = "\n".join([*lines, *tail]) + "\n"
    print(text, *kernels, sep="\n")
    if options.save:
        report.keep("fused_kernels", text, asdict(source) | {"rows": rows, "kernels": kernels})


if __name__ == "__main__":
    main()
