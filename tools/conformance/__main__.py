"""Command line of the conformance suites."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.conformance import (
    chex_tests,
    figures,
    flagcx,
    flaggems,
    harnesses,
    jax_tests,
    lightx2v,
    models,
    opinfo,
    report,
    torch_tests,
    transformer_engine,
    vllm,
)
from tools.conformance.records import HOST, SIMULATED

_HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    suites = (
        *("chex-tests", "harnesses", "jax-tests", "lightx2v", "opinfo", "flaggems", "models", "torch-tests"),
        "transformer-engine",
        "flagcx",
        "vllm",
    )
    for name in suites:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--only", default="", help="run tests whose name contains this")
        command.add_argument("--resume", action="store_true", help="continue an interrupted run")
        command.add_argument("--check", action="store_true", help="exit with 1 if a test that counts did not pass")
        command.add_argument("--timeout", type=float, default=120.0, help="seconds before a test counts as hung")
    for name in ("chex-tests", "harnesses", "jax-tests"):
        commands.choices[name].add_argument("--platform", default="flagos")
    for name in ("harnesses", "jax-tests", "opinfo", "flaggems", "torch-tests"):
        commands.choices[name].add_argument("--stride", type=int, default=1, help="each n-th test only")
        commands.choices[name].add_argument("--offset", type=int, default=0, help="where a stride begins")
    for name in ("opinfo", "models", "transformer-engine"):
        commands.choices[name].add_argument("--device", default=HOST.kind, help="of the tensors: cuda, ...")
    for name in ("harnesses", "opinfo", "flaggems", "models"):
        commands.choices[name].add_argument("--workers", type=int, default=1, help="processes that run at once")
    versions = {
        "chex-tests": "any",
        "jax-tests": "the installed",
        "torch-tests": "the installed",
        "flagcx": "the tested",
        "lightx2v": "the tested",
        "transformer-engine": "the tested",
    }
    for name, version in versions.items():
        commands.choices[name].add_argument("--checkout", type=Path, required=True, help=f"at {version} version")
    for name in ("jax-tests", "torch-tests"):
        commands.choices[name].add_argument("--files", nargs="*", help="test files; default: all that apply")
    commands.choices["opinfo"].add_argument("--mode", type=opinfo.Mode, choices=list(opinfo.Mode), required=True)
    commands.choices["opinfo"].add_argument("--samples", type=int, default=3, help="inputs of each test, at most")
    of_flaggems = commands.choices["flaggems"]
    of_flaggems.add_argument("--device", default=SIMULATED.kind, help="cuda, ...; default: Triton's interpreter")
    of_flaggems.add_argument("--samples", type=int, default=20, help="calls of each test, at most")
    of_flaggems.add_argument("--seed", type=int, default=flaggems.SEED, help="what inputs are drawn from")
    commands.choices["models"].add_argument("--ways", type=models.Way, nargs="*", help="default: those of --device")
    of_flaggems.add_argument("--operators", default="", help="of PyTorch's database: those whose name contains this")
    commands.choices["vllm"].add_argument("--environment", type=Path, help="with vLLM, made where it is not there")
    published = commands.add_parser("publish")
    published.add_argument("files", type=Path, nargs="+", help="result files; parts of one suite are joined")
    renewing = "keep what is published, and take only the tests that had not passed"
    published.add_argument("--renew", action="store_true", help=renewing)
    published.add_argument("--folder", type=Path, default=_HERE / "results")
    page = _HERE.parents[1] / "docs" / "measurements.md"
    published.add_argument("--page", type=Path, default=page, help="gets the figures")
    arguments = parser.parse_args()
    if arguments.command == "opinfo" and arguments.mode is opinfo.Mode.DEVICE and arguments.device != HOST.kind:
        parser.error("--mode device is of the device flagos; FLAGOS_DEVICE says what it computes on")
    if arguments.command == "publish":
        write = report.renew if arguments.renew else report.publish
        print("\n".join(map(str, write(arguments.files, arguments.folder))))
        figures.update(arguments.page, arguments.folder)
        return
    common = {"only": arguments.only, "resume": arguments.resume, "timeout": arguments.timeout}
    match arguments.command:
        case "harnesses":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            harnesses.run(arguments.platform, arguments.out, workers=arguments.workers, **chosen, **common)
        case "jax-tests":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            jax_tests.run(arguments.platform, arguments.out, arguments.checkout, arguments.files, **chosen, **common)
        case "chex-tests":
            chex_tests.run(arguments.platform, arguments.out, arguments.checkout, **common)
        case "opinfo":
            chosen = {"stride": arguments.stride, "offset": arguments.offset, "samples": arguments.samples}
            where = {"device": arguments.device, "workers": arguments.workers}
            opinfo.run(arguments.mode, arguments.out, **where, **chosen, **common)
        case "flaggems":
            chosen = {"stride": arguments.stride, "offset": arguments.offset, "samples": arguments.samples}
            where = {"device": arguments.device, "workers": arguments.workers}
            drawn = {"seed": arguments.seed, "operators": arguments.operators}
            flaggems.run(arguments.out, **drawn, **where, **chosen, **common)
        case "flagcx":
            flagcx.run(arguments.out, arguments.checkout, **common)
        case "lightx2v":
            lightx2v.run(arguments.out, arguments.checkout, **common)
        case "models":
            where = {"device": arguments.device, "workers": arguments.workers}
            models.run(arguments.out, arguments.ways, **where, **common)
        case "torch-tests":
            chosen = {"stride": arguments.stride, "offset": arguments.offset}
            torch_tests.run(arguments.out, arguments.checkout, arguments.files, **chosen, **common)
        case "transformer-engine":
            transformer_engine.run(arguments.out, arguments.checkout, arguments.device, **common)
        case "vllm":
            vllm.run(arguments.out, arguments.environment, **common)
    print(report.summary(arguments.out))
    if arguments.check and (missing := report.missing(arguments.out)):
        sys.exit("\n".join(["not passed:", *missing]))


if __name__ == "__main__":
    main()
