"""The Triton source of a program."""

from collections.abc import Callable
from typing import Any

import jax

from flagos_backend.codegen.triton import prepare, schedule
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_programs import H100


def sources(
    function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], target: Any = H100, *, excess: bool = False
) -> str:
    items = schedule(flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry), target).items
    regions = (item for item in items if isinstance(item, Region))
    return "\n".join(prepare(region, target, excess_precision=excess).source for region in regions)
