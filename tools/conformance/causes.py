"""Why tests do not pass, where a class of them has one known cause; the report names it in place of the message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tools.conformance.records import Record


@dataclass(frozen=True)
class Cause:
    """``name`` and ``message`` are patterns that a record's fields must contain."""

    text: str
    name: str = ""
    message: str = ""


CAUSES: Final[tuple[Cause, ...]] = (
    Cause(
        "Arrays on flagos are row major: a program that asks for another layout is refused, and AUTO means row major.",
        name=r"^layout_test\.py::",
        message="layout|Tuples differ",
    ),
    Cause(
        "The test calls LAPACK through targets that only JAX's CPU and GPUs register, chosen by the platform's name.",
        name=r"^ffi_test\.py::",
        message="platform_index",
    ),
    Cause(
        "JAX lists decompositions of bfloat16 as unimplemented on its own platforms, by name; refused here as there.",
        name=r"^shape_poly_test\.py::",
        message="with element type bfloat16 is not supported",
    ),
    Cause(
        "The test reads XLA's own dump files (xla_dump_to), which a compiler that is not XLA does not write.",
        name="test_dump_on_cache_hit",
    ),
    Cause(
        "The test exports for platforms, or looks them up in a table, that it names: flagos is none of them.",
        name=r"^export_test\.py::",
        message=r"exported for platforms .* but it is used on|KeyError: 'flagos'",
    ),
    Cause(
        "A Schur form is unique up to signs and the order of its blocks; the test compares the elements of LAPACK's.",
        name=r"ScipyLinalgTest::testSchur",
        message="Not equal to tolerance",
    ),
    Cause(
        "The device has strided tensors only: sparse, quantized and nested ones are refused by name.",
        message="not available on device 'flagos'",
    ),
    Cause(
        "Indices that are of the wrong type and on the wrong device: the test asks for the type to be refused first.",
        name="test_errors_nn_Embedding",
    ),
    Cause(
        "PyTorch makes GroupNorm's gradients channels last on the host only; its other devices skip this test.",
        name="test_memory_format_nn_GroupNorm",
    ),
    Cause(
        "PyTorch traces seeds of attention with dropout on the device, where programs leave them; its kernel does not.",
        name="_efficient_attention_forward",
        message=r"^sample \d+: result [23] is on \S+ instead of cpu$",
    ),
    Cause(
        "PyTorch's FlashAttention leaves the seeds of a call that drops nothing as the memory was.",
        name="_flash_attention_forward",
        message=r"^sample \d+: result [23]: (Scalars|Tensor-likes) are not equal",
    ),
    Cause(
        "PyTorch 2.11's database divides integers by zero here, whose result CUDA leaves open; later ones do not.",
        name=r"^__rmod__ u?int\d+ forward$",
    ),
    Cause(
        "Numbers divided by their own norm have no gradient: both sides give roundings of 16-bit floats that cancel.",
        name=r"^nn\.functional\.normalize b?float16 backward$",
        message="^sample 2: result 1: Tensor-likes are not close",
    ),
)


def cause_of(record: Record) -> str:
    """The known cause, or the first line of the message."""
    for cause in CAUSES:
        if re.search(cause.name, record.name) and re.search(cause.message, record.message):
            return cause.text
    return record.message.strip().split("\n")[0][:200]
