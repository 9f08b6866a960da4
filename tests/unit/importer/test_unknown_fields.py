"""Fields that the schema does not know: which are told, and Ctrl-C while protobuf makes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from flagos_backend.importer.schema import HloInstructionProto
from flagos_backend.importer.unknown_fields import unknown_fields

ROOT = Path(__file__).resolve().parents[3]

# The signal comes as protobuf calls Python for a field: Python answers it before the first step of that call.
INTERRUPTED = """
import os, signal, sys
from flagos_backend.importer.schema import HloInstructionProto
from flagos_backend.importer.unknown_fields import unknown_fields

signal.signal(signal.SIGINT, signal.default_int_handler)
pressed = 0

def press(frame, event, argument):
    global pressed
    if event == "call" and frame.f_back and frame.f_back.f_code.co_name == "_first" and not pressed:
        pressed += 1
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(press)
try:
    unknown_fields([HloInstructionProto.FromString(bytes([0xA0, 0x05, 1]))] * 3)
except KeyboardInterrupt:
    sys.setprofile(None)
    print("KeyboardInterrupt", pressed)
"""


def test_which_are_told() -> None:
    contents = {
        "known": HloInstructionProto(name="a").SerializeToString(),
        "harmless": b"\xa0\x05\x01",  # field 84 is 1
        "zero": b"\xf8\x3e\x00",  # field 1007 is 0
        "empty": b"\xfa\x3e\x00",  # it is an empty message
        "told": b"\xa0\x05\x01\xfa\x3e\x01\x01\xf0\x3f\x01",  # 84, then 1007, then 1022
    }
    protos = [HloInstructionProto.FromString(content) for content in contents.values()]
    assert unknown_fields(protos) == {4: 1007}
    many = protos * 2000  # more than are looked at at once
    assert unknown_fields(iter(many)) == dict.fromkeys(range(4, len(many), 5), 1007)


def test_ctrl_c_while_protobuf_makes_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout.split()) == (0, ["KeyboardInterrupt", "1"]), done.stderr
