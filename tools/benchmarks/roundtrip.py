"""Host to device to host with 64 MB: as jax does it by itself (memory may be shared), and with copies both ways."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from benchmarks import report

SIZE = 64 * 1024 * 1024


def round_trip(platform: str, host: np.ndarray, copies: bool) -> Callable[[], object]:
    """device_put of `host`, then back into NumPy. With `copies`, neither direction may share memory."""
    device = jax.devices(platform)[0]

    def shared() -> object:
        return np.asarray(jax.device_put(host, device).block_until_ready())

    def copied() -> object:
        return np.array(jax.device_put(host, device, may_alias=False).block_until_ready(), copy=True)

    return copied if copies else shared


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = report.parser(__doc__).parse_args()
    host = np.random.default_rng().integers(0, 2**31, SIZE // 4, dtype=np.int32)
    first, second = np.empty_like(host), np.empty_like(host)

    def copy_twice() -> None:
        np.copyto(first, host)
        np.copyto(second, first)

    rows = []
    for copies, name, floor in (
        (False, "64 MB round trip", lambda: host),
        (True, "64 MB, copied both ways", copy_twice),
    ):
        ours, peer = round_trip(options.device, host, copies), round_trip("cpu", host, copies)
        np.testing.assert_array_equal(ours(), host)
        lowest, mine, theirs = report.alternate([floor, ours, peer], rounds=15)
        rows.append(report.Row(name, "ms", lowest * 1e3, mine * 1e3, theirs * 1e3, goal=1.2))
    report.publish("roundtrip", rows, options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
