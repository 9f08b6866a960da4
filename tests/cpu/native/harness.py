"""Programs from HLO text, numpy arrays in and out of buffers, and the C hosts of this folder, compiled."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib import _hlo

from flagos_backend.importer import schema
from plugin_abi.host import Artifact, Buffer, Context, ElementType, Executable, HostBufferSemantics, Memory
from programs import hlo_bytes

FOLDER = Path(__file__).parent
INCLUDE = FOLDER.parents[2] / "plugin_abi" / "include"

ADD_ONE = """
ENTRY main {
  x = f32[2,3] parameter(0)
  one = f32[] constant(1)
  ones = f32[2,3] broadcast(one), dimensions={}
  ROOT y = f32[2,3] add(x, ones)
}"""


# A loop of an unknown number of iterations, so it runs on the thread of its device.
LOOP = """HloModule loop
body {
  state = (s32[], s32[], f32[64,64]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  limit = s32[] get-tuple-element(state), index=1
  x = f32[64,64] get-tuple-element(state), index=2
  one = s32[] constant(1)
  next = s32[] add(count, one)
  bounded = f32[64,64] tanh(x)
  ROOT result = (s32[], s32[], f32[64,64]) tuple(next, limit, bounded)
}
condition {
  state = (s32[], s32[], f32[64,64]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  limit = s32[] get-tuple-element(state), index=1
  ROOT more = pred[] compare(count, limit), direction=LT
}
ENTRY main {
  x = f32[64,64] parameter(0)
  zero = s32[] constant(0)
  corner = f32[1,1] slice(x), slice={[0:1], [0:1]}
  scalar = f32[] reshape(corner)
  one = s32[] convert(scalar)
  thousand = s32[] constant(1000)
  limit = s32[] multiply(one, thousand)
  initial = (s32[], s32[], f32[64,64]) tuple(zero, limit, x)
  final = (s32[], s32[], f32[64,64]) while(initial), condition=condition, body=body
  ROOT y = f32[64,64] get-tuple-element(final), index=2
}"""


def add_one(elements: int, *, donate: bool = True) -> str:
    """x + 1 on f32[elements], which may take over its argument."""
    alias = ", input_output_alias={ {}: (0, {}, may-alias) }" if donate else ""
    return f"""HloModule add_one{alias}
ENTRY main {{
  x = f32[{elements}] parameter(0)
  one = f32[] constant(1)
  ones = f32[{elements}] broadcast(one), dimensions={{}}
  ROOT y = f32[{elements}] add(x, ones)
}}"""


def program(text: str, **fields: object) -> bytes:
    """A serialized flagos.Program of an HLO text; ``fields`` are the envelope's."""
    if not text.lstrip().startswith("HloModule"):
        text = f"HloModule test\n{text}"
    message = schema.Program(schema_version=1, producer="tests", **fields)
    message.module.MergeFromString(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    return message.SerializeToString()


def compile(context: Context, text: str, **fields: object) -> Executable:
    return Executable.compile(context, program(text, **fields))


ELEMENT_TYPE = {
    np.dtype(name): ElementType[element]
    for name, element in {
        "bool": "PRED",
        **{f"int{bits}": f"S{bits}" for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
        **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
        "complex64": "C64",
        "complex128": "C128",
    }.items()
} | {np.dtype(ml_dtypes.bfloat16): ElementType.BF16, np.dtype(ml_dtypes.float8_e4m3fn): ElementType.F8E4M3FN}


def put(
    memory: Memory, array: np.ndarray, semantics: HostBufferSemantics = HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
) -> Buffer:
    """A buffer with the elements of ``array``, whatever its strides; the caller keeps the array."""
    strides = None if array.flags.c_contiguous else array.strides
    buffer, done = memory.from_host_async(
        array.ctypes.data, array.shape, ELEMENT_TYPE[array.dtype], byte_strides=strides, semantics=semantics
    )
    if semantics <= HostBufferSemantics.IMMUTABLE_UNTIL_TRANSFER:
        done.wait()
    return buffer


def get(buffer: Buffer) -> np.ndarray:
    dtype = next(dtype for dtype, element in ELEMENT_TYPE.items() if element == buffer.element_type)
    return np.frombuffer(buffer.to_host(), dtype).reshape(buffer.dims)


def run(executable: Executable, *arguments: Buffer, **options: object) -> list[Buffer]:
    """The outputs of a program of one device."""
    outputs, done = executable.execute([arguments], **options)
    done[0].close()
    return outputs[0]


def run_function(
    context: Context, function: Callable[..., Any], *arguments: np.ndarray
) -> tuple[list[np.ndarray], str]:
    """What a function of JAX gives, compiled for one device, and what the program says of itself."""
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo_bytes(function, *arguments))
    with Executable.compile(context, message.SerializeToString()) as executable:
        text = executable.artifact(Artifact.EXPLANATION).decode()
        outputs, done = executable.execute([[put(context.devices[0].default_memory, a) for a in arguments]])
        done[0].wait()
        return [get(output) for output in outputs[0]], text


def build_host(source: str, target: Path, flags: Sequence[str] = ()) -> Path:
    """Compiles a C file of this folder against the header alone."""
    command = ["cc", "-std=c99", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", *flags]
    command += [f"-I{INCLUDE}", str(FOLDER / source), "-o", str(target), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return target
