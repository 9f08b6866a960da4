"""Run the graph passes of a target on a program: print, stop after, leave out, or bisect them; show its loop nests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.nests import nests_of, transformed
from flagos_backend.cli.program_file import read_program
from flagos_backend.cli.session import add_program_argument
from flagos_backend.devices.target import NAMED_TARGETS, Target
from flagos_backend.errors import FlagosBackendError, PassOptionInvalid
from flagos_backend.importer import import_program
from flagos_backend.importer.export import export_message
from flagos_backend.importer.program import Program
from flagos_backend.ir.printer import print_module
from flagos_backend.loop_ir.printer import print_nests
from flagos_backend.loop_ir.region import Region
from flagos_backend.passes.pass_manager import (
    PassContext,
    PassOptions,
    PassReport,
    Pipeline,
    check_names,
    names,
    run_pipeline,
)
from flagos_backend.passes.pipelines import pipeline_for

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    known = ", ".join(NAMED_TARGETS)
    parser.add_argument("--target", default="cpu", help=f"whose passes: {known} (default: %(default)s)")
    parser.add_argument(
        "--print-after", action="append", default=[], metavar="NAME", help="print the module after this pass, or all"
    )
    parser.add_argument("--stop-after", default="", metavar="NAME", help="the last pass that runs")
    parser.add_argument("--disable", action="append", default=[], metavar="NAME", help="a pass that does not run")
    parser.add_argument("--dump-to", type=Path, metavar="FOLDER", help="write the module after each pass there")
    parser.add_argument("--timing", action="store_true", help="print what each pass did, and its time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as a serialized HloModuleProto")
    parser.add_argument(
        "--bisect", action="store_true", help="run the program after each pass and name the first that changes results"
    )
    parser.add_argument("--nests", action="store_true", help="print the loop nests that fusion makes of the result")
    parser.add_argument(
        "--transform", metavar="NAME", help="PROGRAM is a file of loop nests: print what this transform makes of them"
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="with --transform: run the nests before and after it on random arrays, and print how far results differ",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random arguments (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    target = NAMED_TARGETS.get(options.target)
    if target is None:
        raise WrongUsage(f"there is no target {options.target!r}; known are: {', '.join(NAMED_TARGETS)}")
    if options.transform is not None:
        return _transform(options, target)
    if options.evaluate:
        raise WrongUsage("--evaluate compares what --transform NAME makes; name a transform")
    program = _program(options.path)
    pipeline = pipeline_for(target, own_participants=program.process_groups is None)
    passes = PassOptions(
        verify=True, disabled=frozenset(options.disable), stop_after=options.stop_after, dump_to=options.dump_to
    )
    try:
        check_names(names(pipeline), passes.disabled, "--disable")
        check_names(names(pipeline), filter(None, [passes.stop_after]), "--stop-after")
        check_names(names(pipeline), set(options.print_after) - {ALL}, "--print-after")
    except PassOptionInvalid as error:
        raise WrongUsage(str(error)) from error
    try:
        if options.bisect:
            return _bisect(program, pipeline, options, passes)
        _print_stages(program, pipeline, options, passes)
        result = run_pipeline(pipeline, program.module, PassContext(target), passes)
        nests = print_nests(nests_of(result.module, target)) if options.nests else ""
    except FlagosBackendError as error:
        raise CommandFailed(str(error)) from error
    if options.timing:
        _print_timing(result.reports)
    if options.nests:
        print(nests)
    elif not options.timing and not options.print_after:
        print(print_module(result.module))
    for note in result.notes:
        print(f"note: {note}")
    if options.output is not None:
        _write(options.output, export_message(result.module).SerializeToString(deterministic=True))
    return 0


def _transform(options: argparse.Namespace, target: Target) -> int:
    try:
        pairs = list(transformed(options.path, options.transform, target))
    except FlagosBackendError as error:
        raise CommandFailed(str(error)) from error
    if options.evaluate:
        return _evaluate(pairs, options)
    print(print_nests(result for _, results in pairs for result in results))
    return 0


def _evaluate(pairs: Sequence[tuple[Region, Sequence[Region]]], options: argparse.Namespace) -> int:
    """A line for each array that a nest stores to; status 1 where one is further off than by rounding."""
    import numpy as np

    # Evaluates, so it imports torch.
    from flagos_backend.cli.nest_values import ROUNDING, compare, random_arrays
    from flagos_backend.kernels.reference.nests import NestUndefined

    rng = np.random.default_rng(options.seed)
    is_wrong = False
    for number, (nest, results) in enumerate(pairs, 1):
        try:
            found = compare([nest], results, random_arrays([nest], rng))
        except (NestUndefined, FlagosBackendError) as error:
            raise CommandFailed(f"nest {number} has no value on random arrays: {error}") from error
        for array, difference in found.items():
            is_wrong |= difference.exact > ROUNDING
            print(f"nest {number}: @{array.name}: {difference}")
    if is_wrong:
        print(f"{options.transform} changes what the nests compute")
    return int(is_wrong)


def _program(path: Path) -> Program:
    try:
        return import_program(read_program(path))
    except CommandFailed as error:
        raise WrongUsage(str(error)) from error
    except FlagosBackendError as error:
        raise WrongUsage(f"{path} does not parse: {error}") from error


def _print_stages(program: Program, pipeline: Pipeline, options: argparse.Namespace, passes: PassOptions) -> None:
    """The module after each pass of --print-after that ran; of all, after each that changed it."""
    target = NAMED_TARGETS[options.target]
    whole = run_pipeline(pipeline, program.module, PassContext(target), replace(passes, dump_to=None))
    for report in whole.reports:
        if report.name in options.print_after or (ALL in options.print_after and report.changed):
            until = replace(passes, stop_after=report.name, dump_to=None)
            module = run_pipeline(pipeline, program.module, PassContext(target), until).module
            print(f"// after {report.name}\n{print_module(module)}\n")


def _print_timing(reports: Sequence[PassReport]) -> None:
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        change = f"{report.instructions_before} -> {report.instructions_after}" if report.changed else "no change"
        print(f"{report.name:{width}} {report.seconds * 1e3:9.2f} ms  {change}")


def _bisect(program: Program, pipeline: Pipeline, options: argparse.Namespace, passes: PassOptions) -> int:
    from flagos_backend.cli.bisection import bisect  # runs programs, so it imports torch

    stages = bisect(program.module, pipeline, NAMED_TARGETS[options.target], passes, options.seed)
    for stage in stages:
        print(f"{stage.name:30} {'wrong' if stage.error > 1 else 'right'}  {stage.error:.3g} of the tolerance")
    wrong = next((stage.name for stage in stages if stage.error > 1), None)
    if wrong is None:
        print(f"no pass of {len(names(pipeline))} changes what the program computes")
        return 0
    print(f"{wrong} is the first pass that changes what the program computes")
    return 1


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written ({error.strerror}); choose another place") from error
