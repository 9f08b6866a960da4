"""What a call of a jitted tiny function costs the host: dispatched only, and waited for."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from . import report


def caller(platform: str, arguments: int, wait: bool) -> Callable[[], jax.Array]:
    """A call of a jitted sum of `arguments` small arrays on `platform`."""
    device = jax.devices(platform)[0]
    values = [jax.device_put(np.full(8, number, np.float32), device) for number in range(arguments)]
    function = jax.jit(lambda *arrays: sum(arrays, start=jnp.float32(1)))
    if wait:
        return lambda: function(*values).block_until_ready()
    return lambda: function(*values)


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cpu", help="XLA's platform: cpu or cuda")
    options = parser.parse_args()
    rows = []
    for arguments in (1, 16):
        for wait, what in ((False, "dispatch"), (True, "call and wait")):
            ours, peer = caller(options.device, arguments, wait), caller(options.peer, arguments, wait)
            np.testing.assert_array_equal(np.asarray(ours()), np.asarray(peer()))
            floor, mine, theirs = report.alternate([lambda: None, ours, peer], rounds=50, calls=200)
            name, goal = (
                f"{what}, {arguments} argument{'s'[: arguments > 1]}",
                None if wait else (1.5 if options.peer == "cpu" else 1.0),
            )
            rows.append(report.Row(name, "µs", floor * 1e6, mine * 1e6, theirs * 1e6, goal))
    on_host = options.peer == "cpu"
    name, beside = ("dispatch", "JAX CPU") if on_host else ("dispatch_accelerator", f"XLA {options.peer}")
    report.publish(
        name, rows, options.save, peer=beside, device="" if on_host else jax.devices(options.peer)[0].device_kind
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
