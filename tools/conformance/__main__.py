"""Command line of the conformance suites."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.conformance import harnesses, jax_tests, report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("harnesses", "jax-tests"):
        command = commands.add_parser(name)
        command.add_argument("--platform", default="flagos")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--only", default="", help="run tests whose name contains this")
        command.add_argument("--resume", action="store_true", help="continue an interrupted run")
        command.add_argument("--timeout", type=float, default=120.0, help="seconds before a test counts as hung")
    commands.choices["harnesses"].add_argument("--stride", type=int, default=1, help="each n-th harness only")
    commands.choices["harnesses"].add_argument("--offset", type=int, default=0, help="where a stride begins")
    commands.choices["jax-tests"].add_argument("--checkout", type=Path, required=True, help="of jax, at the tag")
    commands.choices["jax-tests"].add_argument("--files", nargs="*", help="test files; default: all that apply")
    published = commands.add_parser("publish")
    published.add_argument("files", type=Path, nargs="+", help="result files; parts of one suite are joined")
    published.add_argument("--folder", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    if arguments.command == "publish":
        print("\n".join(map(str, report.publish(arguments.files, arguments.folder))))
        return
    common = {"only": arguments.only, "resume": arguments.resume, "timeout": arguments.timeout}
    if arguments.command == "harnesses":
        harnesses.run(arguments.platform, arguments.out, stride=arguments.stride, offset=arguments.offset, **common)
    else:
        jax_tests.run(arguments.platform, arguments.out, arguments.checkout, arguments.files, **common)
    print(report.summary(arguments.out))


if __name__ == "__main__":
    main()
