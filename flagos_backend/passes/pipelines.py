"""The graph passes of each target, in order. Nothing else runs a pass (tests/unit/passes/test_pipelines.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.hlo import Module
from flagos_backend.passes.channels_last import channels_last
from flagos_backend.passes.collectives.combiner import combine_collectives
from flagos_backend.passes.collectives.constant_sums import fold_constant_sums
from flagos_backend.passes.collectives.major_dimension import make_split_dimension_major
from flagos_backend.passes.collectives.reduce_scatter_creator import create_reduce_scatters
from flagos_backend.passes.collectives.single_participant import eliminate_trivial_collectives
from flagos_backend.passes.conditional_to_select import convert_conditionals_to_selects
from flagos_backend.passes.cpu.hoist_dynamic_slices import hoist_dynamic_slices
from flagos_backend.passes.cpu.split_short_contractions import split_short_contractions
from flagos_backend.passes.cse import eliminate_common_subexpressions
from flagos_backend.passes.dce import eliminate_dead_code
from flagos_backend.passes.donation import resolve_donation
from flagos_backend.passes.dot_to_multiply import dot_to_multiply
from flagos_backend.passes.dot_to_reduce import dot_to_reduce
from flagos_backend.passes.expand_ragged_dots import expand_ragged_dots
from flagos_backend.passes.fold_constants import fold_constants
from flagos_backend.passes.hoist_gathers import hoist_gathers
from flagos_backend.passes.hoist_invariants import hoist_invariants
from flagos_backend.passes.inline_calls import inline_calls
from flagos_backend.passes.pass_manager import NormalForm, Pass, PassContext, PassOptions, Pipeline, run_pipeline
from flagos_backend.passes.scatter_to_one_hot import scatter_to_one_hot_select
from flagos_backend.passes.scatter_to_update import scatter_to_dynamic_update_slice
from flagos_backend.passes.simplify import simplify
from flagos_backend.passes.trip_count import find_trip_counts

NO_DEAD_CODE = NormalForm("no dead code", eliminate_dead_code)
NO_TRIVIAL_COLLECTIVES = NormalForm("no collective of one participant", eliminate_trivial_collectives)
DONATION_RESOLVED = NormalForm("each donated argument has an output of its size", resolve_donation)
NO_OUTER_PRODUCTS = NormalForm("no product that adds nothing up", dot_to_multiply)


def of_module(function: Callable[[Module], Module]) -> Callable[[Module, PassContext], Module]:
    """A pass that needs to know the module alone."""
    return lambda module, _: function(module)


# Passes that stand in several places.
DCE = Pass("dce", of_module(eliminate_dead_code), "unused work costs all later passes", establishes=(NO_DEAD_CODE,))
CSE = Pass("cse", of_module(eliminate_common_subexpressions), "what is there twice is computed once")
SIMPLIFY = Pass("simplify", of_module(simplify), "identities that hold for every input")
FOLD_CONSTANTS = Pass("fold_constants", of_module(fold_constants), "what is known now is not computed at run time")

_TRIVIAL_COLLECTIVES = Pass(
    "trivial_collectives",
    of_module(eliminate_trivial_collectives),
    "first: a program for many devices that runs on one is fused as if it had no collectives",
    establishes=(NO_TRIVIAL_COLLECTIVES,),
)


def _simplification(target: Target) -> Pipeline:
    """What every target wants. A second run of it changes nothing."""

    def if_conversion(module: Module, _: PassContext) -> Module:
        return convert_conditionals_to_selects(module, operations=target.untaken_operations)

    def ragged_dots(module: Module, _: PassContext) -> Module:
        return expand_ragged_dots(module, target)

    return (
        Pass(
            "expand_ragged_dots",
            ragged_dots,
            "products and masks that fuse, where no library computes one; leaves calls",
        ),
        Pass("inline_calls", of_module(inline_calls), "passes and fusion see through calls"),
        Pass(
            "conditional_to_select",
            if_conversion,
            "computing both of two small branches costs less than a branch; leaves calls",
        ),
        Pass("inline_calls", of_module(inline_calls), "inlines the branches that became calls"),
        DCE,
        SIMPLIFY,
        FOLD_CONSTANTS,
        CSE,
        Pass(
            "trip_count",
            of_module(find_trip_counts),
            "loops of a known count never ask the device whether to go on; needs folded bounds",
        ),
        Pass(
            "hoist_invariants",
            of_module(hoist_invariants),
            "operands of library calls are computed once, before the loop",
        ),
        Pass(
            "scatter_to_update",
            of_module(scatter_to_dynamic_update_slice),
            "a scatter of one window becomes an update, which fuses",
        ),
        Pass(
            "scatter_to_one_hot",
            of_module(scatter_to_one_hot_select),
            "a scatter into constants becomes a comparison, which fuses",
        ),
        Pass("hoist_gathers", of_module(hoist_gathers), "elementwise operations run on the gathered elements alone"),
        # Folding and simplifying feed each other; what the second round does not reach is rare and stays correct.
        SIMPLIFY,
        FOLD_CONSTANTS,
        CSE,
        DCE,
        Pass(
            "donation",
            of_module(resolve_donation),
            "last: an output that a pass removed takes no donated argument",
            establishes=(DONATION_RESOLVED,),
        ),
    )


def _collectives(target: Target) -> Pipeline:
    constants = Pass(
        "constant_sums",
        of_module(fold_constant_sums),
        "devices do not meet for what each of them knows; after fold_constants",
        after=(FOLD_CONSTANTS, DCE),
    )
    create = Pass(
        "reduce_scatter_creator",
        of_module(create_reduce_scatters),
        "before collective_combiner, which combines collectives of one kind",
        after=(DCE,),
    )
    major = Pass(
        "collective_major_dimension",
        of_module(make_split_dimension_major),
        "transports split arrays along the major dimension; the transposes around a collective fuse",
    )
    combine = Pass(
        "collective_combiner", of_module(combine_collectives), "one rendezvous of the devices for several collectives"
    )
    return (constants, create, combine) if target.is_host else (constants, create, major, combine)


_OUTER_PRODUCTS = Pass(
    "dot_to_multiply",
    of_module(dot_to_multiply),
    "a dot without a sum is a multiplication, which fuses; after what matches dots",
    establishes=(NO_OUTER_PRODUCTS,),
)
_INNER_PRODUCTS = Pass(
    "dot_to_reduce", of_module(dot_to_reduce), "an inner product is a reduction, which can be split and fused"
)
_CHANNELS_LAST = Pass("channels_last", of_module(channels_last), "libraries of convolutions read channels last")


def cpu_pipeline(target: Target = HOST, *, own_participants: bool = True) -> Pipeline:
    """The passes for the host CPU. ``own_participants``: the participants of collectives are the program's own
    replicas and partitions, not those of process groups, whose programs may differ from this one."""
    return (
        *((_TRIVIAL_COLLECTIVES,) if own_participants else ()),
        *_simplification(target),
        *(_collectives(target) if own_participants else ()),
        Pass(
            "hoist_dynamic_slices",
            of_module(hoist_dynamic_slices),
            "a slice reads memory, and elementwise operations run on the slice alone",
            after=(DCE,),
        ),
        Pass(
            "split_short_contractions",
            of_module(split_short_contractions),
            "a library needs one call for each small matrix of a batch; before dot_to_reduce",
        ),
        _OUTER_PRODUCTS,
        _INNER_PRODUCTS,
        _CHANNELS_LAST,
    )


def accelerator_pipeline(target: Target, *, own_participants: bool = True) -> Pipeline:
    """The passes for accelerators; arguments as of ``cpu_pipeline``."""
    # A process that computes on the host starts without them.
    from flagos_backend.passes.accelerator.canonicalize_convolutions import canonicalize_convolutions
    from flagos_backend.passes.accelerator.contracting_dims_minor import contracting_dimensions_minor
    from flagos_backend.passes.accelerator.pack_argminmax import pack_argminmax
    from flagos_backend.passes.accelerator.swap_dot_operands import swap_dot_operands
    from flagos_backend.passes.attention.join_choices import join_choices
    from flagos_backend.passes.attention.match import match_attention
    from flagos_backend.passes.attention.sink_invariants import sink_invariants
    from flagos_backend.passes.attention.split_batches import split_batches
    from flagos_backend.passes.split_complex_sums import split_complex_sums

    def minor_contraction(module: Module, _: PassContext) -> Module:
        return contracting_dimensions_minor(module, target)

    return (
        *((_TRIVIAL_COLLECTIVES,) if own_participants else ()),
        *_simplification(target),
        *(_collectives(target) if own_participants else ()),
        Pass(
            "match_attention",
            lambda module, context: match_attention(module, context.notes),
            "before dots and masks change their form",
            before=(
                Pass(
                    "unhoist_masks", of_module(sink_invariants), "masks hoisted out of loops are recognised in the body"
                ),
                Pass(
                    "split_batch_dimensions",
                    of_module(split_batches),
                    "batches as einsum has them",
                    after=(CSE,),
                ),
                Pass("join_selects", of_module(join_choices), "one choice of signs, as logsumexp's gradient has it"),
                DCE,
            ),
            after=(DCE,),
        ),
        _OUTER_PRODUCTS,
        _INNER_PRODUCTS,
        _CHANNELS_LAST,
        Pass(
            "canonicalize_convolutions",
            of_module(canonicalize_convolutions),
            "padding, reversal and order as instructions, which fuse; after channels_last, which chooses the order",
        ),
        Pass(
            "pack_argminmax",
            of_module(pack_argminmax),
            "a value and its position in one integer reduce like any other",
            after=(DCE,),
        ),
        Pass(
            "split_complex_sums",
            of_module(split_complex_sums),
            "loop nests compute with complex numbers, and reduce floats; both sums fuse",
        ),
        Pass(
            "swap_dot_operands",
            of_module(swap_dot_operands),
            "a product is written as it is read, without a transpose after it",
            after=(DCE,),
        ),
        Pass(
            "contracting_dimensions_minor",
            minor_contraction,
            "last: it lays out what libraries read, once before a loop",
            after=(Pass("hoist_invariants", of_module(hoist_invariants), "the layouts leave the loops"), DCE),
        ),
    )


@functools.lru_cache(maxsize=16)
def pipeline_for(target: Target, *, own_participants: bool = True) -> Pipeline:
    """The pipeline of ``target``; ``own_participants`` as of ``cpu_pipeline``."""
    made = cpu_pipeline if target.is_host else accelerator_pipeline
    return made(target, own_participants=own_participants)


def optimize(module: Module, target: Target = HOST, *, verify: bool = False) -> Module:
    """``module`` after the whole pipeline of ``target``, for tools and tests; the compiler wants reports and notes."""
    return run_pipeline(pipeline_for(target), module, PassContext(target), PassOptions(verify=verify)).module
