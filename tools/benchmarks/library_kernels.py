"""Attention and matrix products on an accelerator: every provider's kernels, and XLA's, in one process taking turns.

TFLOP/s, the best of each provider's variants. 16384 tokens in all, 2048 channels in all heads, causal, bf16.
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, Literal

import torch

from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import CustomCallAttributes, DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD, Attention, AttentionBackwardCall, AttentionCall
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider, operation_of
from flagos_backend.kernels.reference.registry import Run

from . import report

Call = Callable[[], object]
TOKENS, CHANNELS = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
# XLA's default attention makes the whole array of weights.
XLA_DEFAULT_UP_TO = 4096
PRODUCTS = ((4096, 4096, 4096), (16, 11008, 4096))
ROUNDS = 7
_IMPLEMENTATIONS: Final[tuple[tuple[str, Literal["cudnn", "xla"]], ...]] = (("xla cudnn", "cudnn"), ("xla", "xla"))


def attention_calls(length: int, head: int) -> tuple[Instruction, Instruction, float]:
    """Forward with statistics, backward with all gradients, and the operations of the forward one."""
    heads, batch = CHANNELS // head, TOKENS // length
    shape = ArrayShape(ElementType.BF16, (batch, length, heads, head))
    attention = Attention("bthd", "bshd", "bshe", "bthe", head**-0.5, upper=0)
    builder = Builder("attention")
    query, key, value, gradient = (builder.parameter(shape) for _ in range(4))
    results = TupleShape((shape, ArrayShape(ElementType.F32, (batch, heads, length))))
    config = AttentionCall(attention, True).config()
    forward = builder.add(Opcode.CUSTOM_CALL, [query, key, value], CustomCallAttributes(FORWARD, config), shape=results)
    arguments = [query, key, value, builder.element(forward, 0), builder.element(forward, 1), gradient]
    config = AttentionBackwardCall(attention, "bthe", "bthd", "bshd", "bshe").config()
    backward = builder.add(
        Opcode.CUSTOM_CALL, arguments, CustomCallAttributes(BACKWARD, config), shape=TupleShape((shape,) * 3)
    )
    return forward, backward, 4.0 * batch * heads * length * length * head / 2


def product_call(rows: int, columns: int, contracted: int) -> Instruction:
    builder = Builder("product")
    lhs = builder.parameter(ArrayShape(ElementType.BF16, (rows, contracted)))
    rhs = builder.parameter(ArrayShape(ElementType.BF16, (contracted, columns)))
    return builder.add(
        Opcode.DOT, [lhs, rhs], DotAttributes((1,), (0,)), shape=ArrayShape(ElementType.BF16, (rows, columns))
    )


def provided(instruction: Instruction, target: Target, arguments: list[Any]) -> Iterator[tuple[str, Call]]:
    """Every variant of every provider, by name; those that fail are reported and left out."""
    run = Run(device=torch.device(target.device_type, 0))
    for implementation in implementations_of(operation_of(instruction)):
        reason = implementation.unsupported(instruction, target)
        if implementation.provider is Provider.REFERENCE or reason:
            print(f"  left out {implementation.identifier}: {reason}")
            continue
        for variant in implementation.variants(instruction, target):
            try:
                variant.kernel(run, *arguments)
            except Exception as error:  # the table shows what runs
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                print(f"  left out {implementation.identifier} ({variant.name}): {reason}")
                continue
            named = implementation.provider is Provider.VENDOR and variant.name
            name = variant.name if named else implementation.provider
            yield f"{name}\t{variant.name}", partial(variant.kernel, run, *arguments)


def measure(calls: Mapping[str, Call], module: Any) -> dict[str, float]:
    """Median seconds of each on the device's clock; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / 1e3)
    return {name: statistics.median(measured) for name, measured in times.items()}


def best(times: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """The fastest variant of each provider."""
    found: dict[str, tuple[float, str]] = {}
    for name, seconds in times.items():
        provider, _, variant = name.partition("\t")
        if provider not in found or seconds < found[provider][0]:
            found[provider] = (seconds, variant)
    return found


def xla(length: int, head: int, platform: str) -> dict[str, dict[str, float]]:
    """Median seconds of XLA's own attention on the host's clock: direction -> implementation -> seconds."""
    import jax
    import jax.numpy as jnp

    shape = (TOKENS // length, length, CHANNELS // head, head)
    keys = jax.random.split(jax.device_put(jax.random.key(0), jax.devices(platform)[0]), 4)
    q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for name, implementation in _IMPLEMENTATIONS:
        if implementation == "xla" and length > XLA_DEFAULT_UP_TO:
            continue

        def attend(q: Any, k: Any, v: Any, implementation: Literal["cudnn", "xla"] = implementation) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

        forward = jax.jit(attend)
        both = jax.jit(lambda q, k, v, g, attend=attend: jax.vjp(attend, q, k, v)[1](g))
        try:
            calls = [lambda f=forward: f(q, k, v).block_until_ready()]
            calls.append(lambda f=both: jax.block_until_ready(f(q, k, v, g)))
            one, two = report.alternate(calls, rounds=ROUNDS)
        except Exception as error:
            print(f"  left out {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found["forward"][name] = one
        found["backward"][name] = two - one
    return found


def attention_rows(target: Target, module: Any, peer: str) -> list[dict[str, Any]]:
    rows = []
    device = torch.device(target.device_type, 0)
    for head in (128, 64):
        for length in LENGTHS:
            forward, backward, operations = attention_calls(length, head)
            shape = forward.operands[0].shape.dims  # type: ignore[union-attr]
            q, k, v, g = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
            peers = xla(length, head, peer) if peer else {"forward": {}, "backward": {}}
            calls = dict(provided(forward, target, [q, k, v]))
            results: Any = next(iter(calls.values()))()
            output, statistics_ = results
            times = best(measure(calls, module)) | {n: (s, "") for n, s in peers["forward"].items()}
            rows.append(_row("forward", head, length, operations, times))
            calls = dict(provided(backward, target, [q, k, v, output, statistics_, g]))
            times = best(measure(calls, module)) | {n: (s, "") for n, s in peers["backward"].items()}
            rows.append(_row("backward", head, length, 2.5 * operations, times))
    return rows


def product_rows(target: Target, module: Any) -> list[dict[str, Any]]:
    rows = []
    device = torch.device(target.device_type, 0)
    for m, n, k in PRODUCTS:
        instruction = product_call(m, n, k)
        arguments = [torch.randn(o.shape.dims, dtype=torch.bfloat16, device=device) for o in instruction.operands]  # type: ignore[union-attr]
        times = best(measure(dict(provided(instruction, target, arguments)), module))
        rows.append(_row(f"{m}x{n}x{k}", 0, 0, 2.0 * m * n * k, times))
    return rows


def _row(
    what: str, head: int, length: int, operations: float, times: Mapping[str, tuple[float, str]]
) -> dict[str, Any]:
    speeds = {name: operations / seconds / 1e12 for name, (seconds, _) in times.items()}
    variants = {name: variant for name, (_, variant) in times.items() if variant and variant != name}
    row = {"what": what, "head": head, "length": length, "tflops": speeds, "variants": variants}
    place = f"{what} hd{head} {length}" if head else what
    print(f"{place:24}", ", ".join(f"{n} {s:.0f}" for n, s in speeds.items()), variants, flush=True)
    return row


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cuda", help="XLA's platform of the same accelerator; empty leaves it out")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device_type = torch.accelerator.current_accelerator(check_available=True).type  # type: ignore[union-attr]
    accelerator, module = TorchAccelerator(device_type, 0), torch.get_device_module(device_type)
    rows = product_rows(accelerator.target, module)
    rows += attention_rows(accelerator.target, module, options.peer)
    source = replace(report.origin("library_kernels", module.get_device_name()), versions=_versions())
    text = render(rows) + ", ".join(f"{name} {version}" for name, version in source.versions.items())
    text += f"\n{source.hardware}; {source.date}; {source.command}\n"
    print(text)
    if options.save:
        report.keep("library_kernels", text, asdict(source) | {"rows": rows})


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "triton", "flag_gems", "jax")}


COLUMNS = ("triton", "flagos", "cudnn", "flash", "vendor", "xla cudnn", "xla")


def render(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'TFLOP/s':26}" + "".join(f"{column:>11}" for column in COLUMNS)]
    for row in rows:
        name = f"{row['what']} {row['head']}x{row['length']}" if row["head"] else row["what"]
        cells = (f"{row['tflops'][c]:11.0f}" if c in row["tflops"] else f"{'':11}" for c in COLUMNS)
        lines.append(f"{name:26}" + "".join(cells))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
