"""What the host's programs go through between the shared graph passes and emission, in order. Nothing else runs one
of these, which a test checks."""

from __future__ import annotations

import functools

from flagos_backend.codegen.cpu.emit_row_loop import Phases, reduces_rows
from flagos_backend.codegen.cpu.passes.complex_conversions import without_complex_conversions
from flagos_backend.codegen.cpu.passes.crop_before_pad import without_cropping_pads
from flagos_backend.codegen.cpu.passes.narrow_integer_dots import with_narrow_products
from flagos_backend.codegen.cpu.passes.short_scans_to_reductions import with_reduced_scans
from flagos_backend.codegen.cpu.passes.widen_half_sums import with_wide_sums
from flagos_backend.codegen.cpu.passes.wrap_negative_indices import with_wrapped_indices
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import simplify
from flagos_backend.codegen.cpu.transforms.flatten_addresses import with_flat_addresses
from flagos_backend.codegen.cpu.transforms.fuse_op_pairs import with_pairs, with_rotations
from flagos_backend.codegen.cpu.transforms.split_at_seams import split_at_seams
from flagos_backend.codegen.cpu.transforms.split_long_reductions import in_parts
from flagos_backend.codegen.cpu.transforms.split_two_ended_reductions import split
from flagos_backend.codegen.cpu.transforms.transpose_short_reductions import as_columns
from flagos_backend.codegen.cpu.transforms.unroll_channels import with_unrolled_channels
from flagos_backend.codegen.cpu.transforms.unroll_short_rows import lengthened
from flagos_backend.codegen.loop_pass_manager import EXCESS_PRECISION, LoopPass, LoopPipeline, log2, one
from flagos_backend.codegen.transforms.floor_division import with_floors
from flagos_backend.codegen.transforms.logistic import with_logistics
from flagos_backend.loop_ir.region import Region
from flagos_backend.passes.hoist_invariants import hoist_invariants
from flagos_backend.passes.pass_manager import Pass, Pipeline
from flagos_backend.passes.pipelines import CSE, DCE, FOLD_CONSTANTS, of_module
from flagos_backend.passes.split_complex_sums import split_complex_sums


@functools.cache
def native_pipeline() -> Pipeline:
    """Graph passes after ``cpu_pipeline`` and before emitter.py: their gathers and scatters are no HLO, and only native
    programs have them."""
    return (
        Pass(
            "narrow_integer_dots",
            of_module(with_narrow_products),
            "fewer bytes to read; native products take integers of two types",
            after=(DCE,),
        ),
        Pass(
            "crop_before_pad",
            of_module(without_cropping_pads),
            "loop nests write around what they read, and do not crop",
        ),
        Pass(
            "complex_conversions",
            of_module(without_complex_conversions),
            "loop nests convert to floats, and put numbers together",
            after=(CSE, DCE),
        ),
        Pass(
            "split_complex_sums",
            of_module(split_complex_sums),
            "loop nests compute with complex numbers, and reduce floats",
        ),
        Pass(
            "short_scans_to_reductions",
            of_module(with_reduced_scans),
            "running sums of short rows need no call; before widen_half_sums, which widens reductions",
        ),
        Pass(
            "widen_half_sums",
            of_module(with_wide_sums),
            "BLAS and loop nests compute F32 without a call; conversions fuse",
            after=(
                FOLD_CONSTANTS,
                CSE,
                Pass("hoist_invariants", of_module(hoist_invariants), "weights are converted before loops"),
                DCE,
            ),
        ),
        Pass(
            "wrap_negative_indices",
            of_module(with_wrapped_indices),
            "last: gathers and scatters that raise negative indices themselves",
            after=(DCE,),
        ),
    )


@functools.cache
def cpu_loop_pipeline() -> LoopPipeline:
    """From fused nests to those that the host runs one after another. They may need memory between them, which is
    planned afterwards."""
    return (
        LoopPass("split_at_seams", split_at_seams, "first: all others take loads without guards"),
        LoopPass(
            "unroll_channels", one(with_unrolled_channels), "addresses that are not flat are one for all channels"
        ),
        LoopPass("flatten_addresses", one(with_flat_addresses), "what an element's number is made of is operations"),
        LoopPass("split_long_reductions", in_parts, "threads share what few long rows are reduced to"),
        LoopPass("split_two_ended_reductions", split, "a reduction along memory, then one of few elements"),
        LoopPass("transpose_short_reductions", as_columns, "vectors run along a longer dimension"),
        LoopPass("unroll_short_rows", lengthened, "last: several of the rows that are left become one"),
    )


@functools.cache
def cpu_emission_pipeline(excess_precision: bool = False) -> LoopPipeline:
    """From those to what emit_map_loop.py and emit_row_loop.py write: operations that the native library has as one.
    ``excess_precision`` as in excess_precision.py."""
    return (
        log2(excess_precision),
        LoopPass(
            "logistic",
            one(functools.partial(with_logistics, excess_precision=excess_precision)),
            "one rounding, and no overflow on the way",
        ),
        *((EXCESS_PRECISION,) if excess_precision else ()),
        LoopPass("floor_division", one(with_floors), "quotients as Python writes them"),
        LoopPass("rotate", one(with_rotations), "before pairs, which joins rotations with others"),
        LoopPass("join_operations", one(_with_pairs), "last: two operations in one pass over a tile"),
    )


def _with_pairs(region: Region) -> Region:
    varies = Phases(region).varies if reduces_rows(region, simplify(region)) else {}
    return with_pairs(region, varies)
