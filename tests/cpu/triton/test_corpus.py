"""The corpus of JAX programs through fusion and generated kernels, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.triton.harness import run_both
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from programs import PROGRAMS
from support.numbers import distance
from support.passes import for_accelerator

# Control flow is the runtime's: its bodies get schedules of their own.
_CONTROL = {Opcode.WHILE, Opcode.CONDITIONAL, Opcode.CALL}
# What test_operations.py holds to more.
_SINGLE_OPERATIONS = ("unary_", "binary_", "convert_from_")


@pytest.mark.parametrize("name", sorted(n for n in PROGRAMS if not n.startswith(_SINGLE_OPERATIONS)))
def test_program(name: str) -> None:
    program = PROGRAMS[name]
    computation = for_accelerator(import_module(program.hlo())).entry
    if any(instruction.opcode in _CONTROL for instruction in computation.instructions):
        pytest.skip("control flow at the top")
    arguments = program.arguments()
    ours, theirs, _ = run_both(computation, arguments)
    for a, b in zip(ours, theirs, strict=True):
        if program.exact:
            assert not np.any(distance(a, b))
        else:
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
