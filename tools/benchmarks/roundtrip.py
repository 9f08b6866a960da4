"""Host to device to host with 64 MB: as jax does it by itself (memory may be shared), and with copies both ways."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from . import report

SIZE = 64 * 1024 * 1024


def round_trip(platform: str, host: np.ndarray, copies: bool) -> Callable[[], np.ndarray]:
    """`host` to the device and back into NumPy. With `copies`, each direction makes memory of its own."""
    device = jax.devices(platform)[0]

    def shared() -> np.ndarray:
        return np.asarray(jax.device_put(host, device).block_until_ready())

    def copied() -> np.ndarray:
        return np.array(jnp.array(host, copy=True, device=device).block_until_ready(), copy=True)

    return copied if copies else shared


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = report.parser(__doc__).parse_args()
    host = np.random.default_rng().integers(0, 2**31, SIZE // 4, dtype=np.int32)
    floors = {False: lambda: host, True: lambda: host.copy().copy()}
    rows = []
    for copies, name in ((False, "64 MB round trip"), (True, "64 MB, copied both ways")):
        ours, peer = round_trip(options.device, host, copies), round_trip("cpu", host, copies)
        np.testing.assert_array_equal(ours(), host)
        floor, mine, theirs = report.alternate([floors[copies], ours, peer], rounds=15)
        rows.append(report.Row(name, "ms", floor * 1e3, mine * 1e3, theirs * 1e3, goal=1.2))
    report.publish("roundtrip", rows, options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
