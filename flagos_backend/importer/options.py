"""What a compile is asked for beside its program: by the host, in the options of flagos.Program, else by the
environment. Read by compile/compiler.py when a program is compiled, and when a serialized one is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flagos_backend.errors import KernelPolicyInvalid, MalformedProgram

EXCESS_PRECISION = "excess_precision"
EXCESS_PRECISION_VARIABLE = "FLAGOS_EXCESS_PRECISION"
_SWITCH = {"1": True, "0": False}


def allows_excess_precision(options: Mapping[str, str], variables: Mapping[str, str] | None = None) -> bool:
    """Whether 16-bit results may keep float32's digits within a kernel (excess_precision.py): no, unless the
    program's ``options`` say so, or the environment of who asks for nothing. Raises MalformedProgram and
    KernelPolicyInvalid."""
    if (asked := options.get(EXCESS_PRECISION)) is not None:
        if asked not in _SWITCH:
            fact = f"its option {EXCESS_PRECISION} is '{asked}', neither 1 nor 0"
            raise MalformedProgram(fact=fact, place="the envelope's options")
        return _SWITCH[asked]
    value = (os.environ if variables is None else variables).get(EXCESS_PRECISION_VARIABLE, "")
    if value and value not in _SWITCH:
        raise KernelPolicyInvalid(variable=EXCESS_PRECISION_VARIABLE, value=value, wanted="1 or 0")
    return _SWITCH.get(value, False)
