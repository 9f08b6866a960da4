"""Large constants of a StableHLO program, which go around jaxlib's converter: that takes a tenth of a microsecond for
each element, seconds for a model's weights. Between parsing and conversion; convert.py calls it.

A custom call without operands stands where such a constant was; it becomes one of HLO's, which becomes the constant.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.importer import schema

logger = logging.getLogger("flagos_backend")

#: From how many elements on it pays; smaller programs than this many bytes have no such constant.
MIN_ELEMENTS: Final = 1 << 15
#: What stands in a constant's place, with its number in ``backend_config``.
TARGET: Final = "flagos.constant"


#: By MLIR's name of an element type: its members of a LiteralProto, and its elements in bytecode. Those that a literal
#: holds as varints, those of less than a byte and complex numbers are jaxlib's.
_TYPES: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "i8": ("s8s", np.dtype(np.int8)),
    "ui8": ("u8s", np.dtype(np.uint8)),
    "i16": ("s16s", np.dtype(np.int16)),
    "ui16": ("u16s", np.dtype(np.uint16)),
    "f16": ("f16s", np.dtype(np.float16)),
    "bf16": ("bf16s", np.dtype(np.uint16)),
    "f32": ("f32s", np.dtype(np.float32)),
    "f64": ("f64s", np.dtype(np.float64)),
    "f8E4M3FN": ("f8e4m3fns", np.dtype(np.uint8)),
    "f8E5M2": ("f8e5m2s", np.dtype(np.uint8)),
}


@dataclass(frozen=True)
class Elements:
    """Of one constant. ``member``: where a LiteralProto holds them; row major, little endian."""

    member: str
    data: memoryview


@dataclass(frozen=True)
class Without:
    """``code``: a program with calls of TARGET, each with the number of its constant among ``constants``."""

    code: bytes
    constants: tuple[Elements, ...]


def take_out(code: bytes) -> Without:
    """Raises RuntimeError and ValueError for what cannot be parsed. What is not seen whole stays where it is."""
    if len(code) < MIN_ELEMENTS:
        return Without(code, ())
    module = jax_internals.parse_stablehlo(code)
    taken: list[Elements] = []
    for constant in jax_internals.constants_of(module, MIN_ELEMENTS):
        kind = constant.results[0].type
        member, dtype = _TYPES.get(str(kind.element_type), ("", None))
        data = None if dtype is None else jax_internals.elements_of(constant, dtype)
        if data is None:
            logger.debug("jaxlib converts a constant of %s", kind)
            continue
        jax_internals.replace_by_call(constant, TARGET, str(len(taken)))
        taken.append(Elements(member, data))
    return Without(jax_internals.bytecode_of(module), tuple(taken)) if taken else Without(code, ())


def put_back(module: bytes, constants: Sequence[Elements]) -> bytes:
    """``module``, a serialized HloModuleProto, with a constant for each call of TARGET."""
    if not constants:
        return module
    proto = schema.HloModuleProto.FromString(module)
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.custom_call_target == TARGET:
                _become_constant(instruction, constants[int(instruction.backend_config)])
    serialized: bytes = proto.SerializeToString()
    return serialized


def _become_constant(instruction: Any, elements: Elements) -> None:
    constant = schema.HloInstructionProto(
        name=instruction.name,
        opcode="constant",
        shape=instruction.shape,
        id=instruction.id,
        metadata=instruction.metadata,
    )
    instruction.CopyFrom(constant)
    instruction.literal.shape.CopyFrom(instruction.shape)
    setattr(instruction.literal, elements.member, bytes(elements.data))
