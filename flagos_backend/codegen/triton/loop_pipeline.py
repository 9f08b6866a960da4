"""The transforms of loop nests for accelerators, in order, before a kernel is written."""

from __future__ import annotations

import functools

from flagos_backend.codegen.loop_pass_manager import EXCESS_PRECISION, LoopPass, LoopPipeline, log2, one
from flagos_backend.codegen.triton.loop_transforms.divisions import with_reciprocals, without_branches
from flagos_backend.codegen.triton.loop_transforms.exponentials import below_maximum
from flagos_backend.codegen.triton.loop_transforms.half_powers import with_roots
from flagos_backend.codegen.triton.loop_transforms.packed_sums import without_packed_sums
from flagos_backend.codegen.triton.loop_transforms.piecewise_polynomials import chosen_last, with_near_arguments
from flagos_backend.codegen.triton.loop_transforms.sums import joined
from flagos_backend.devices.target import Target


@functools.lru_cache(maxsize=16)
def triton_loop_pipeline(target: Target, excess_precision: bool = False) -> LoopPipeline:
    """From fused nests to what writer.py writes for ``target``; ``excess_precision`` as in excess_precision.py."""
    every = (
        log2(excess_precision),
        *((EXCESS_PRECISION,) if excess_precision else ()),
        LoopPass("half_powers", one(with_roots), "a power is a hundred instructions, and a branch"),
        LoopPass("join_sums", one(joined), "warps wait for one another once"),
    )
    with_library = (
        LoopPass(
            "shared_reciprocals",
            one(with_reciprocals),
            "a product and a correction for each quotient; needs products and sums that round once",
        ),
    )
    with_intrinsics = (
        LoopPass("exp_below_maximum", one(below_maximum), "fewer instructions where the operand cannot be positive"),
        LoopPass("unpacked_16_bit_sums", one(without_packed_sums), "CUDA 12.8's assembler packs them wrongly"),
        LoopPass("straight_quotients", one(without_branches), "a branch would have what follows held in registers"),
        LoopPass("near_arguments", one(with_near_arguments), "before the polynomials that read them move"),
        LoopPass("select_after_polynomials", one(chosen_last), "last: a choice costs two multiply-adds"),
    )
    pipeline = every + (with_library if target.facts.math_library else ())
    return pipeline + (with_intrinsics if target.facts.assembly else ())
