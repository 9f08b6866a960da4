"""Time a program on random arguments: compiling it, launching it, and running it to the end."""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack

from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.running import random_arguments, run_once
from flagos_backend.cli.session import add_program_argument, compile_file
from flagos_backend.importer.program import import_program
from plugin_abi.host import Executable

_VS = (
    "run it in turns with XLA's own platform, and compare; inductor: PROGRAM is what torch.export.save wrote, and runs "
    "in turns with torch.compile's own compiler"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    parser.add_argument("--rounds", type=int, default=20, help="how often it is run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random arguments (default: %(default)s)")
    parser.add_argument("--vs", choices=("cpu", "cuda", "inductor"), help=_VS)
    parser.add_argument("--json", action="store_true", help="with --vs: the comparison as JSON alone")


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise CommandFailed(f"--rounds {options.rounds}: at least one round is needed")
    if options.vs:
        # Each takes what is below from here.
        if options.vs == "inductor":
            from flagos_backend.cli.versus_inductor import compare_with_inductor

            found = compare_with_inductor(options.path, options.rounds, options.seed)
        else:
            from flagos_backend.cli.versus import compare

            found = compare(options.path, options.vs, options.rounds, options.seed)
        print(found.to_json() if options.json else found.text())
        return 0 if found.agrees else 1
    if options.json:
        raise WrongUsage("--json is for comparisons; add --vs")
    with compile_file(options.path) as compiled, ExitStack() as stack:
        print(f"compile  {compiled.seconds * 1e3:10.3f} ms, with the start of the backend")
        began = time.perf_counter()
        Executable.compile(compiled.executable.context, compiled.program).close()
        print(f"again    {(time.perf_counter() - began) * 1e3:10.3f} ms")
        if len(compiled.executable.describe().devices) != 1:
            raise CommandFailed(f"{options.path} is a program for several devices; bench runs programs for one")
        parameters = import_program(compiled.program).module.entry.parameters
        arguments = random_arguments(compiled.executable, [p.shape for p in parameters], options.seed, stack)
        launches, totals = zip(
            *(run_once(compiled.executable, arguments) for _ in range(options.rounds + 1)), strict=True
        )
    print(f"first    {totals[0] * 1e3:10.3f} ms")
    for name, times in (("launch", launches[1:]), ("run", totals[1:])):
        print(f"{name:8} {statistics.median(times) * 1e3:10.3f} ms median, {min(times) * 1e3:.3f} ms least")
    return 0
