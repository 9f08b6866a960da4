"""Command line of the conformance suites."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.conformance import harnesses, jax_tests, models, opinfo, readme, report, torch_tests

_HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("harnesses", "jax-tests", "opinfo", "models", "torch-tests"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--only", default="", help="run tests whose name contains this")
        command.add_argument("--resume", action="store_true", help="continue an interrupted run")
        command.add_argument("--timeout", type=float, default=120.0, help="seconds before a test counts as hung")
    for name in ("harnesses", "jax-tests"):
        commands.choices[name].add_argument("--platform", default="flagos")
    for name in ("harnesses", "jax-tests", "opinfo", "torch-tests"):
        commands.choices[name].add_argument("--stride", type=int, default=1, help="each n-th test only")
        commands.choices[name].add_argument("--offset", type=int, default=0, help="where a stride begins")
    for name in ("jax-tests", "torch-tests"):
        commands.choices[name].add_argument("--checkout", type=Path, required=True, help="at the installed version")
        commands.choices[name].add_argument("--files", nargs="*", help="test files; default: all that apply")
    commands.choices["opinfo"].add_argument("--mode", type=opinfo.Mode, choices=list(opinfo.Mode), required=True)
    commands.choices["opinfo"].add_argument("--samples", type=int, default=3, help="inputs of each test, at most")
    commands.choices["models"].add_argument("--ways", type=models.Way, nargs="*", default=list(models.Way))
    published = commands.add_parser("publish")
    published.add_argument("files", type=Path, nargs="+", help="result files; parts of one suite are joined")
    published.add_argument("--folder", type=Path, default=_HERE / "results")
    published.add_argument("--readme", type=Path, default=_HERE.parents[1] / "README.md", help="gets the figures")
    arguments = parser.parse_args()
    if arguments.command == "publish":
        print("\n".join(map(str, report.publish(arguments.files, arguments.folder))))
        readme.update(arguments.readme, arguments.folder)
        return
    common = {"only": arguments.only, "resume": arguments.resume, "timeout": arguments.timeout}
    match arguments.command:
        case "harnesses":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            harnesses.run(arguments.platform, arguments.out, **chosen, **common)
        case "jax-tests":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            jax_tests.run(arguments.platform, arguments.out, arguments.checkout, arguments.files, **chosen, **common)
        case "opinfo":
            chosen = {"stride": arguments.stride, "offset": arguments.offset, "samples": arguments.samples}
            opinfo.run(arguments.mode, arguments.out, **chosen, **common)
        case "models":
            models.run(arguments.out, arguments.ways, **common)
        case "torch-tests":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            torch_tests.run(arguments.out, arguments.checkout, arguments.files, **chosen, **common)
    print(report.summary(arguments.out))


if __name__ == "__main__":
    main()
