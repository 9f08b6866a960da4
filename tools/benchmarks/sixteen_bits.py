"""Programs written in bfloat16: each result rounded, as programs say, beside excess precision and XLA on the same
hardware, taking turns in one process. Milliseconds of a call that is waited for, the least of all rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import report

SHAPES = {"cpu": (512, 2048), "cuda": (32768, 4096)}
ROUNDS = 25


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def adam(p: jax.Array, m: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    m = 0.9 * m + 0.1 * gradient
    v = 0.99 * v + 0.01 * gradient * gradient
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-6), m, v


@dataclass(frozen=True)
class Case:
    """``whole``: arguments of the array's shape; ``rows``: those of one row's."""

    name: str
    function: Callable[..., object]
    whole: int
    rows: int = 0


CASES = (
    Case("x * y + z", lambda x, y, z: x * y + z, 3),
    Case("gelu(x) * y", lambda x, y: jax.nn.gelu(x) * y, 2),
    Case("silu(x) * y", lambda x, y: jax.nn.silu(x) * y, 2),
    Case("softmax", lambda x: jax.nn.softmax(x, -1), 1),
    Case("layer norm", layer_norm, 1, 2),
    Case("RMS norm", rms_norm, 1, 1),
    Case("Adam", adam, 4),
)


def measure(case: Case, device: jax.Device, peer: jax.Device, shape: tuple[int, int]) -> dict[str, float]:
    """Milliseconds by contender."""
    rng = np.random.default_rng(0)
    shapes = [shape] * case.whole + [shape[1:]] * case.rows
    arguments = [np.abs(rng.standard_normal(s, np.float32)).astype(jnp.bfloat16) for s in shapes]
    contenders = {
        name: (jax.jit(case.function, compiler_options={"xla_allow_excess_precision": name == "excess"}), device)
        for name in ("rounded", "excess")
    }
    contenders["xla"] = (jax.jit(case.function), peer)

    def call(function: Callable[..., object], where: jax.Device) -> Callable[[], object]:
        given = jax.device_put(arguments, where)
        return lambda: jax.block_until_ready(function(*given))

    calls = [call(*contender) for contender in contenders.values()]
    for _ in range(3):  # past recordings
        for function in calls:
            function()
    seconds = report.alternate(calls, ROUNDS, calls=3, summary=min)
    return {name: found * 1e3 for name, found in zip(contenders, seconds, strict=True)}


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--peer", choices=tuple(SHAPES), default="cpu", help="XLA's platform for the same hardware")
    options = parser.parse_args()
    device, peer = (jax.devices(platform)[0] for platform in (options.device, options.peer))
    lines = [f"{'ms':20}{'rounded':>10}{'excess':>10}{'XLA':>10}{'XLA/rounded':>13}"]
    rows = []
    for case in CASES:
        found = measure(case, device, peer, SHAPES[options.peer])
        ratio = found["xla"] / found["rounded"]
        lines.append(f"{case.name:20}" + "".join(f"{value:10.3f}" for value in found.values()) + f"{ratio:13.2f}")
        rows.append({"name": case.name, "unit": "ms", **found})
    source = report.origin("sixteen_bits", "" if options.peer == "cpu" else peer.device_kind)
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.save:
        where = "host" if options.peer == "cpu" else "accelerator"
        report.keep(f"sixteen_bits_{where}", text, asdict(source) | {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
