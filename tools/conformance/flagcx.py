"""The FlagCX suite: its collectives between processes of one machine, within one vendor and between two. It is built
for host memory from a checkout of the caller's, with two adaptor plugins of ours (flagcx_host)."""

from __future__ import annotations

import concurrent.futures
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.conformance.records import HOST, Record, ResultFile, Status

#: A folder of nlohmann/json.hpp, where the checkout lacks its submodule third-party/json: FlagCX's own name for it.
JSON_VARIABLE: Final = "JSON_INCLUDE_DIR"
_PLUGINS: Final = Path(__file__).parent / "flagcx_host"
_INCLUDES: Final = (
    *("flagcx/include", "flagcx/adaptor/include", "flagcx/adaptor/device_api", "flagcx/adaptor/shmem"),
    *("flagcx/runner/include", "flagcx/core/include", "flagcx/service/include"),
)
_SOURCES: Final = (
    *("flagcx", "flagcx/adaptor", "flagcx/adaptor/device", "flagcx/adaptor/ccl", "flagcx/adaptor/net"),
    *("flagcx/adaptor/tuner", "flagcx/runner", "flagcx/core", "flagcx/service"),
)
_BACKEND: Final = "flagcx/adaptor/device_api/default_dev_api_backend.cc"
_FLAGS: Final = ("-O0", "-w", "-fPIC", "-DUSE_BOOTSTRAP_ADAPTOR", "-DFLAGCX_COMM_TRAITS_DEFAULT")


@dataclass(frozen=True, slots=True)
class Mode:
    """``vendors``: what each process says that its device's vendor is; ``variables``: of FlagCX."""

    vendors: tuple[str, ...]
    variables: Mapping[str, str]
    homogeneous: bool


_PLAIN: Final = {"FLAGCX_SOCKET_IFNAME": "lo", "FLAGCX_DEBUG": "NONE"}
#: Between vendors of one process each FlagCX takes its host adaptor; FLAGCX_USE_HOST_COMM chooses it for more.
MODES: Final = {
    "homogeneous": Mode(("A", "A"), _PLAIN, True),
    "homogeneous-4": Mode(("A",) * 4, _PLAIN, True),
    "heterogeneous": Mode(
        ("A", "B"), {**_PLAIN, "FLAGCX_USE_HOST_COMM": "1", "FLAGCX_TOPO_DETECTION_DISABLE": "1"}, False
    ),
}
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter")
_MOVES: Final = ("all_gather", "all_to_all", "all_to_all_v", "broadcast", "permute")
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64")
_FLOATS: Final = ("float32", "bfloat16", "float16", "float64")
_COUNTS: Final = (1, 1000)
#: More than the sockets' buffers hold.
_LARGE: Final = 300_000


def tests(mode: str) -> list[str]:
    """The words of a name are what the worker reads: mode, collective, reduction, dtype, elements."""
    named = [
        f"{mode} {kind} {operation} {dtype} {count}"
        for kind in _REDUCTIONS
        for operation in ("sum", "prod", "min", "max", "avg")
        for dtype in (_FLOATS if operation == "avg" else _DTYPES)
        for count in _COUNTS
    ]
    named += [f"{mode} {kind} - {dtype} {count}" for kind in _MOVES for dtype in _DTYPES for count in _COUNTS]
    named += [f"{mode} {kind} sum float32 {_LARGE}" for kind in _REDUCTIONS]
    named += [f"{mode} {kind} - float32 {_LARGE}" for kind in _MOVES]
    named += [f"{mode} slow_peer sum float32 1000", f"{mode} lost_peer sum float32 1000"]
    return [name for name in named if not is_refused(name)]


def is_refused(name: str) -> bool:
    """Whether FlagCX's host adaptor reduces this not at all (service/bootstrap.cc). Left out: one member has an error
    then, another may have sent already, and the group is out of step for whatever comes after."""
    mode, kind, operation, dtype, _ = name.split()
    if MODES[mode].homogeneous or kind not in _REDUCTIONS:
        return False
    return operation in ("prod", "avg") or dtype in ("bfloat16", "float16")


def is_wrong(name: str) -> bool:
    """Whether FlagCX is known to compute this wrongly (0c72129, service/bootstrap.cc, BroadcastBootstrap): its host
    adaptor's broadcast sends each member another part of the root's memory. Programs gather instead
    (flagos_backend/collectives/transport.py)."""
    mode, kind, *_ = name.split()
    return not MODES[mode].homogeneous and kind == "broadcast"


def build(checkout: Path, folder: Path) -> Path:
    """Builds FlagCX for no vendor, and both plugins, into ``folder``; what is there is kept. Returns the library.

    Raises FileNotFoundError for what is no checkout of FlagCX's, and subprocess.CalledProcessError where it does not
    compile."""
    if not (checkout / "flagcx/flagcx.cc").is_file():
        raise FileNotFoundError(f"{checkout} is no checkout of FlagCX: it has no flagcx/flagcx.cc")
    json_folder = Path(os.environ.get(JSON_VARIABLE, checkout / "third-party/json/single_include"))
    if not (json_folder / "nlohmann/json.hpp").is_file():
        raise FileNotFoundError(
            f"{json_folder} has no nlohmann/json.hpp: fetch the checkout's submodule third-party/json, or name a "
            f"folder that has it in {JSON_VARIABLE}"
        )
    library = folder / "libflagcx.so"
    includes = [f"-I{checkout / name}" for name in _INCLUDES] + [f"-I{json_folder}"]
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(file for name in _SOURCES for file in (checkout / name).glob("*.cc"))
    sources += [checkout / _BACKEND, _PLUGINS / "no_vendor.cc"]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            _compiler(*_FLAGS, *includes, "-c", str(source), "-o", str(unfinished))
            unfinished.rename(target)
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    linked = ("-shared", "-Wl,-soname,libflagcx.so", "-o", str(library))
    _compiler(*linked, *map(str, objects), "-lpthread", "-lrt", "-ldl")
    for name in ("device", "ccl"):
        plugin = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", *includes, str(_PLUGINS / f"{name}_adaptor.cc"))
        _compiler(*plugin, "-o", str(folder / f"lib{name}.so"), f"-L{folder}", "-lflagcx", "-Wl,-rpath,$ORIGIN")
    return library


def _compiler(*arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "g++"), *arguments], check=True)


def run_group(library: Path, mode: Mode, names: Sequence[str], timeout: float) -> list[list[dict[str, str]]]:
    """What each process of a new group says of the tests. One that has said nothing for so long after the group began
    is stopped."""
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), len(mode.vendors)
        (folder / "tests").write_text("\n".join(names))
        processes = []
        files = []
        seed = secrets.token_hex(4)
        for rank, vendor in enumerate(mode.vendors):
            environment = os.environ | dict(mode.variables)
            environment |= {"FLAGOS_FLAGCX_VENDOR": vendor, "FLAGOS_FLAGCX_DEVICE": str(rank)}
            environment |= {
                f"FLAGCX_{n.upper()}_ADAPTOR_PLUGIN": f"{library.parent}/lib{n}.so" for n in ("device", "ccl")
            }
            environment["FLAGOS_FLAGCX_SEED"] = seed
            command = [sys.executable, "-m", "tools.conformance.flagcx_worker"]
            with (folder / f"said{rank}").open("w") as said:
                words = [*command, str(library), str(folder), str(rank), str(size)]
                processes.append(subprocess.Popen(words, env=environment, stdout=said, stderr=subprocess.DEVNULL))
            files.append(folder / f"said{rank}")
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [[json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")] for file in files]


def judge(name: str, said: Sequence[Mapping[str, str]]) -> tuple[Status, str]:
    """``said``: of each process, its messages by test. A test has to pass in all of them."""
    messages = [messages.get(name) for messages in said]
    if None in messages:
        return Status.HUNG, "a process said nothing of it within the timeout"
    return (Status.PASSED, "") if set(messages) == {""} else (Status.FAILED, "; ".join(sorted(filter(None, messages))))


def run(out: Path, checkout: Path, *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Builds FlagCX beside ``out`` and runs the tests whose name contains ``only``; ``timeout`` is a group's."""
    library = build(checkout.resolve(), out.resolve().parent / "flagcx_build")
    results = ResultFile(out, "flagcx", "FlagCX", HOST, peer="exact results", resume=resume)
    for key, mode in MODES.items():
        names = [name for name in tests(key) if only in name and name not in results.records]
        for kind in dict.fromkeys(name.split()[1] for name in names):  # a group for each: one that hangs costs its own
            chosen = [name for name in names if name.split()[1] == kind]
            lists = run_group(library, mode, chosen, timeout)
            said = [{one["name"]: one["message"] for one in lines} for lines in lists]
            kinds = {lines[0]["name"] if lines else "" for lines in lists}
            if kinds - {""} - {"homogeneous" if mode.homogeneous else "heterogeneous"}:
                raise RuntimeError(f"FlagCX made a communicator of another kind: {kinds} in mode {key}")
            for name in chosen:
                status, message = judge(name, said)
                results.add(Record(name, kind, status, message))
                if status is not Status.PASSED:
                    print(f"{name}: {status} {message}", file=sys.stderr, flush=True)
    return results
