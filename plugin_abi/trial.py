"""The trial load: a child process loads a library and calls its entry, so that a crash or a hang is not the host's.

Stage between policy and loader. Verdicts are kept by the library's hash, so a library is tried once, not at each start.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from plugin_abi import cabi, dynamic_load, negotiation
from plugin_abi.elf import ElfFile
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.files import OpenFile
from plugin_abi.log import logger
from plugin_abi.manifest import Manifest
from plugin_abi.negotiation import ENTRY_OK, HOST_NAME, EntryAnswer, TableFacts, judge, slots
from plugin_abi.policy import Library
from plugin_abi.rights import Confinement
from plugin_abi.versions import AbiRange, AbiVersion

MODE_VARIABLE: Final = "FLAGOS_TRIAL_LOAD"
TIMEOUT_VARIABLE: Final = "FLAGOS_TRIAL_TIMEOUT"
DEFAULT_TIMEOUT: Final = 20.0
#: A crash or a hang may have had a passing cause; after this long it is tried again.
BAD_VERDICT_SECONDS: Final = 3600.0
_CHILD: Final = Path(__file__).parent / "trial_child.py"
_NOT_LOADED, _NOT_CONFINED = 3, 4
_STDERR_TAIL: Final = 400
_MAX_STATUS: Final = 4096
#: Bounds of what a child may say, and a kept verdict.
MAX_RESULT: Final = 1 << 20
MAX_VERDICT: Final = 1 << 16
#: How long after its own deadline the supervisor may take to end everything.
_GRACE_SECONDS: Final = 10.0
_DAMAGED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class TrialMode(enum.Enum):
    """When a library is tried in a child: unless its verdict is known, always, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def trial_mode(variables: Mapping[str, str]) -> TrialMode:
    """What FLAGOS_TRIAL_LOAD says: 1 or always, 0 or never; anything else is auto."""
    value = variables.get(MODE_VARIABLE, "").strip().lower()
    words = {"1": TrialMode.ALWAYS, "always": TrialMode.ALWAYS, "0": TrialMode.NEVER, "never": TrialMode.NEVER}
    return words.get(value, TrialMode.AUTO)


def trial_timeout(variables: Mapping[str, str]) -> float:
    """What FLAGOS_TRIAL_TIMEOUT says, in seconds; the default where it says nothing that can be used."""
    try:
        value = float(variables.get(TIMEOUT_VARIABLE, ""))
    except ValueError:
        return DEFAULT_TIMEOUT
    return value if 0 < value <= 3600 else DEFAULT_TIMEOUT


# ---- Verdicts that are kept ----------------------------------------------------------------------------------------


@functools.cache
def _rules() -> str:
    """A digest of the code that judges: verdicts of another are not its own."""
    files = (Path(__file__), _CHILD, Path(negotiation.__file__), Path(dynamic_load.__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _key(library: Library, manifest: Manifest, host: AbiRange, confined: Confinement | None) -> str:
    """What a verdict depends on: the library, what it is loaded with, who judges it and what it is compared with."""
    dependencies: list[object] = [file.stamp for file in library.files[1:]]
    for name, path in sorted(library.dependencies.found.items()):
        with contextlib.suppress(OSError):
            status = path.stat()
            dependencies.append((name, str(path), status.st_size, status.st_mtime_ns))
    built = manifest.built_with
    facts = (
        *(library.sha256, str(host), _rules(), platform.libc_ver(), dependencies),
        *(manifest.name, manifest.platform, manifest.version, repr(built)),
        *((repr(confined),) if confined is not None else ()),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _recall(folder: Path, key: str, place: str) -> tuple[bool, Refusal | None]:
    """Whether a verdict is kept that still holds, and which."""
    try:
        file = OpenFile(folder / f"{key}.json")
        return read_verdict(file.read(0, MAX_VERDICT), place) if file.owner == os.geteuid() else (False, None)
    except OSError:
        return False, None


def read_verdict(data: bytes, place: str) -> tuple[bool, Refusal | None]:
    """Whether the bytes of a file are a verdict that still holds, and which. Never raises for what they contain."""
    try:
        value = json.loads(data)
        if value["good"] is True:
            return True, None
        age = time.time() - float(value["time"])
        if 0 <= age < BAD_VERDICT_SECONDS:
            cure = f"{value['cure']}; to try it again now, set {MODE_VARIABLE}=1"
            fact = f"{value['fact']} (when it was tried {int(age)} s ago)"
            return True, Refusal(RefusalCode.of(value["code"]), fact, place, cure, str(value["cause"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Damaged or of another version: as good as never tried.
        pass
    return False, None


def _keep(folder: Path, key: str, refusal: Refusal | None) -> None:
    value: dict[str, Any] = {"good": refusal is None, "time": time.time()}
    if refusal is not None:
        value |= {"code": int(refusal.code), "fact": refusal.fact, "cure": refusal.cure, "cause": refusal.cause}
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file)
            Path(temporary).replace(folder / f"{key}.json")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.debug("the verdict is not kept: %s", error)


# ---- The child -----------------------------------------------------------------------------------------------------


def python_program() -> str | None:
    """A Python to run the child with; in an embedding host sys.executable may be any program."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = (Path(sys.exec_prefix) / "bin", Path(sys.base_exec_prefix) / "bin")
    candidates = [Path(sys.executable or "/"), *(folder / name for folder in folders for name in (version, "python3"))]
    for path in candidates:
        if path.name.startswith("python") and os.access(path, os.X_OK):
            return str(path)
    return None


def _loads(library: Library) -> list[tuple[str, str, int]]:
    """What the child is to load, in order, the library last. What this process has, the child loads by its path."""
    items = [
        (d.name, str(d.path), file.descriptor if (file := _file(d.elf)) is not None else -1)
        for d in library.dependencies.first
        if d.own or d.elf is not None
    ]
    path = library.file.place
    return [*items, (path, path, library.file.descriptor)]


def _file(elf: ElfFile | None) -> OpenFile | None:
    return elf.file if elf is not None and isinstance(elf.file, OpenFile) else None


def _request(
    library: Library, host: AbiRange, timeout: float, confined: Confinement | None, result_fd: int, status_fd: int
) -> str:
    ffi = cabi.ffi()

    def layout(name: str) -> dict[str, Any]:
        struct = cabi.struct_layout(ffi, name)
        # cffi writes "char *" with and without const alike.
        return {"size": struct.size, "fields": {f.name: (f.offset, f.size, f.type) for f in struct.fields}}

    return json.dumps(
        {
            "host": os.getpid(),
            "loads": _loads(library),
            "min": host.min.number,
            "max": host.max.number,
            "host_name": HOST_NAME,
            "timeout": timeout,
            "rights": asdict(confined.rights) if confined is not None and confined.rights is not None else None,
            "result_fd": result_fd,
            "status_fd": status_fd,
            "args": layout("FlagosEntryArgs"),
            "info": layout("FlagosPluginInfo"),
            "entry_ok": ENTRY_OK,
            "table": layout("FlagosApi"),
            "slots": list(slots(ffi)),
        }
    )


@dataclass(frozen=True)
class _Outcome:
    """How a child ended. `status` is None when it was killed for taking too long; below zero: a signal."""

    status: int | None
    result: bytes
    errors: str
    denied: tuple[str, ...] = ()


class _Pipe:
    """What comes out of a child through one pipe, of which no more than `limit` bytes are kept, the last ones."""

    def __init__(self, limit: int) -> None:
        self.kept, self._limit = b"", limit
        self.reading, self.writing = os.pipe()

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        data = os.read(self.reading, 1 << 16)
        self.kept = (self.kept + data)[-self._limit :]
        return bool(data)

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def close(self) -> None:
        self.close_writing()
        os.close(self.reading)


def _environment(confined: Confinement | None) -> dict[str, str] | None:
    """What the child has of this process's environment; None: all."""
    if confined is None or confined.environment is None:
        return None
    patterns = confined.environment
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def _run_child(library: Library, host: AbiRange, python: str, timeout: float, confined: Confinement | None) -> _Outcome:
    """Raises OSError where no child can be started."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for limit in (MAX_RESULT, _STDERR_TAIL, _MAX_STATUS):
            pipes.append(_Pipe(limit))
            stack.callback(pipes[-1].close)
        result, errors, status = pipes
        request = _request(library, host, timeout, confined, result.writing, status.writing)
        child = subprocess.Popen(
            [python, "-I", "-S", str(_CHILD), request],
            stdin=subprocess.DEVNULL,
            stdout=errors.writing,
            stderr=errors.writing,
            pass_fds=(result.writing, status.writing, *(file.descriptor for file in library.files)),
            start_new_session=True,
            env=_environment(confined),
        )
        try:
            _collect(pipes, time.monotonic() + timeout + _GRACE_SECONDS)
        finally:
            if child.poll() is None and not status.kept:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        text = errors.kept.decode("utf-8", "replace").strip()
        if not status.kept:
            # The supervisor did not live to tell.
            return _Outcome(child.returncode or None, b"", text)
        told = json.loads(status.kept)
        return _Outcome(told["status"], result.kept, text, tuple(told["denied"]))


def _collect(pipes: list[_Pipe], deadline: float) -> None:
    """Read all pipes until the supervisor has told how the child ended, by then with all that it started."""
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            pipe.close_writing()
            selector.register(pipe.reading, selectors.EVENT_READ, pipe)
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                if not key.data.read():
                    selector.unregister(key.fd)


def _answer(result: bytes) -> EntryAnswer:
    """The child's account of the entry's answer. Raises what _DAMAGED lists where it is no such account."""
    value = json.loads(result)
    args, seen = value["args"], value["table"]
    version = AbiVersion.from_number(seen["version"]) if seen else None
    return EntryAnswer(
        status=int(value["status"]),
        version=AbiVersion.from_number(args["version"]),
        plugin_range=AbiRange(
            AbiVersion.from_number(args["plugin_version_min"]), AbiVersion.from_number(args["plugin_version_max"])
        ),
        table=TableFacts(seen["size"], version, tuple(seen["empty"])) if version is not None else None,
        info=value["info"],
        message=args["message"] or "",
    )


#: Of trials in this process, by manifest.
_denied: dict[Path, tuple[str, ...]] = {}


def denied(manifest: Path) -> tuple[str, ...]:
    """The system calls that the library of a manifest tried in its last trial here, and was denied by the filter of its
    process."""
    return _denied.get(manifest, ())


def _try(
    library: Library, manifest: Manifest, host: AbiRange, timeout: float, confined: Confinement | None
) -> Refusal | None:
    place = str(library.path)
    vendor = "report it to the backend's vendor, or remove its manifest"
    python = python_program()
    if python is None:
        cure = f"set {MODE_VARIABLE}=0 to load the library without a trial"
        fact = "there is no Python program to try the library with"
        return Refusal(RefusalCode.TRIAL_UNAVAILABLE, fact, place, cure)
    try:
        outcome = _run_child(library, host, python, timeout, confined)
    except OSError as error:
        cure = f"correct the cause, or set {MODE_VARIABLE}=0 to load the library without a trial"
        fact = "the trial load could not be started"
        return Refusal(RefusalCode.TRIAL_UNAVAILABLE, fact, place, cure, str(error), error)
    _denied[manifest.path] = outcome.denied
    if outcome.denied:
        logger.warning("trial: %s was denied %s", library.path, ", ".join(outcome.denied))
    if outcome.status is None:
        fact = f"its trial load did not end within {timeout:g} s"
        cure = f"{vendor}; {TIMEOUT_VARIABLE} allows a slow library more time"
        return Refusal(RefusalCode.ENTRY_HANGS, fact, place, cure, outcome.errors)
    if outcome.status == _NOT_LOADED:
        with contextlib.suppress(*_DAMAGED):
            cause = str(json.loads(outcome.result)["error"])
            fact = "the dynamic linker does not load it"
            return Refusal(RefusalCode.DLOPEN_FAILED, fact, place, "correct what the cause names", cause)
    if outcome.status == _NOT_CONFINED:
        with contextlib.suppress(*_DAMAGED):
            cause = str(json.loads(outcome.result)["error"])
            fact = "the process of its trial load cannot be confined"
            return Refusal(RefusalCode.TRIAL_UNAVAILABLE, fact, place, "correct what the cause names", cause)
    if outcome.status == 0:
        with contextlib.suppress(*_DAMAGED):
            return judge(_answer(outcome.result), manifest, host, place)
    fact = f"its trial load ended the process with {_describe(outcome.status)}"
    return Refusal(RefusalCode.ENTRY_CRASHED, fact, place, vendor, outcome.errors)


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


@dataclass(frozen=True)
class Trial:
    """How libraries are tried in this process."""

    mode: TrialMode
    timeout: float = DEFAULT_TIMEOUT
    folder: Path | None = None

    def judge(
        self, library: Library, manifest: Manifest, host: AbiRange, confined: Confinement | None = None
    ) -> Refusal | None:
        """The verdict on a library: the kept one where it may be used, else that of a child. `confined`: how a
        process of the library's own would be; None: the child has its user's rights, as this process."""
        if self.mode is TrialMode.NEVER:
            return None
        key = _key(library, manifest, host, confined)
        if self.mode is TrialMode.AUTO and self.folder is not None:
            known, refusal = _recall(self.folder, key, str(library.path))
            if known:
                logger.debug("trial: the verdict on %s is known", library.path)
                return refusal
        logger.info("trial: loading %s in a child process", library.path)
        refusal = _try(library, manifest, host, self.timeout, confined)
        changed = library.refuse_change()
        if changed is not None:
            return changed
        if self.folder is not None and (refusal is None or refusal.code is not RefusalCode.TRIAL_UNAVAILABLE):
            _keep(self.folder, key, refusal)
        return refusal
