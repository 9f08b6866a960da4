"""Which device a run is about, for the header of its result file."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

from plugin_abi import isolation
from tools.conformance.records import HOST, Device
from tools.conformance.worker_pool import worker_command

FLAGOS = "flagos"


def of_flagos() -> Device:
    """What flagos computes on, as the environment chooses. Asked of a process of its own, since a device once opened
    takes memory for good, and whose backend is in it: one in another process does not say what PyTorch calls it."""
    environment = {**os.environ, isolation.MODE_VARIABLE: isolation.IsolationMode.NONE.value}
    command = worker_command("tools.conformance.device")
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return Device(**json.loads(answer.splitlines()[-1]))


def of_platform(platform: str) -> Device:
    """Of one of JAX's platforms."""
    return of_flagos() if platform == FLAGOS else Device(platform)


def of_tensors(device: str) -> Device:
    """Of tensors of a device type of torch. Raises RuntimeError if torch has no such device here."""
    if device == HOST.kind:
        return HOST
    if device == FLAGOS:
        return of_flagos()
    import torch  # takes seconds, and publishing does without

    module = torch.get_device_module(device)
    if not module.is_available():
        raise RuntimeError(f"torch {torch.__version__} drives no device of type {device} here")
    return Device(device, module.get_device_properties(0).name)


def _opened() -> Device:
    import torch

    from flagos_backend.devices.attributes import TORCH_DEVICE
    from plugin_abi import loader
    from plugin_abi.host import Context

    accepted = loader.load().accepted
    if accepted is None:
        raise SystemExit(loader.no_such_device_message())
    context = Context(accepted)
    device = context.addressable_devices[0]
    if device.is_host_memory:
        return HOST
    kind = torch.device(str(device.attributes[TORCH_DEVICE])).type
    # An accelerator over the host's memory is none of torch's.
    return Device(str(device.attributes["vendor"]) if kind == HOST.kind else kind, device.kind)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_opened())))
