"""Worker of the harness suite: reads harness names, runs each on the platform and on JAX's CPU, answers in JSON."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from tools.conformance.comparison import compare
from tools.conformance.device import FLAGOS
from tools.conformance.records import Status
from tools.conformance.worker import serve


def main(platform: str) -> None:
    jax.config.update("jax_enable_x64", True)
    if platform == FLAGOS:
        import flagos_backend.frontends.jax

        flagos_backend.frontends.jax.initialize()  # JAX does that only for what is installed
    from jax._src.internal_test_util import test_harnesses

    device, cpu = jax.devices(platform)[0], jax.devices("cpu")[0]
    harnesses = {h.fullname: h for h in test_harnesses.all_harnesses}

    def probe() -> None:
        jax.device_get(jax.jit(lambda x: x + 1)(jax.device_put(np.ones(2, np.float32), device)))

    serve(lambda name: _run(harnesses[name], device, cpu), probe)


def _run(harness: Any, device: jax.Device, cpu: jax.Device) -> tuple[Status, str]:
    arguments = harness.dyn_args_maker(np.random.RandomState(abs(hash(harness.fullname)) % 2**31))
    try:
        with jax.default_device(cpu):
            theirs = jax.device_get(jax.jit(harness.dyn_fun)(*arguments))
    except Exception as error:  # the peer refuses the program, for whatever reason
        return Status.NOT_APPLICABLE, f"JAX's CPU: {error}"[:500]
    try:
        with jax.default_device(device):
            placed = jax.device_put(arguments, device)
            ours = jax.device_get(jax.jit(harness.dyn_fun)(*placed))
    except Exception as error:  # whatever the platform raises is the result of this test
        return Status.FAILED, f"{type(error).__name__}: {error}"[:1500]
    # Who asks for DEFAULT in so many words lets an accelerator round.
    is_rounded = harness.params.get("precision") is jax.lax.Precision.DEFAULT and device.device_kind != cpu.device_kind
    difference = compare(harness.group_name, arguments, ours, theirs, harness.params, tensor_float=is_rounded)
    return (Status.FAILED, difference) if difference else (Status.PASSED, "")


if __name__ == "__main__":
    main(sys.argv[1])
