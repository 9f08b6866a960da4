"""A device that reports an error at whatever it is asked, as one does after an access to memory that is not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENDINGS = {"at the interpreter's end": "", "where the host closes it": "context.close()"}

SCRIPT = """
import os, weakref
os.environ["FLAGOS_DEVICE"] = "simulated"
import numpy as np
from cpu.native.harness import add_one, compile, put, run
from flagos_backend.devices.simulated import SimulatedAccelerator
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context

is_broken = False
allocate = SimulatedAccelerator.allocate

def watched(self, num_bytes, stream):
    tensor = allocate(self, num_bytes, stream)
    weakref.finalize(tensor, lambda: is_broken and print("freed")).atexit = False
    return tensor

SimulatedAccelerator.allocate = watched
context = Context(loader.load().accepted)
device = context.devices[0]
program, argument = compile(context, add_one(4, donate=False)), put(device.default_memory, np.ones(4, np.float32))
kept = run(program, argument)

def record(self, stream):
    raise RuntimeError("illegal memory access")

SimulatedAccelerator.record = record
is_broken = True
try:
    run(program, argument)[0].wait()
except FlagosStatusError as error:
    print("launch:", error)
try:
    device.synchronize()
except FlagosStatusError as error:
    print("synchronize:", error)
del kept, argument, device
{ending}
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_outlives_its_device(ending: str) -> None:
    """Nor is memory of the device freed: torch's allocator would throw out of a destructor."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT.replace("{ending}", ENDINGS[ending])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split(":")[0] for line in done.stdout.splitlines() if ": INTERNAL: " in line]
    assert said == ["launch", "synchronize"] and "illegal memory access" in done.stdout, done.stdout
    assert "freed" not in done.stdout
    assert "waiting for flagos:0" in done.stderr and "illegal memory access" in done.stderr
