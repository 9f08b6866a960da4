"""What a backend's own process may do: the least that its manifest asks for, within what its user allows.

The host decides (`rights_of`), the child carries it out before it opens the library (`take`); docs/isolation.md says
what holds. What the kernel does not offer, `missing` says by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import os
import pwd
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from plugin_abi import landlock, seccomp
from plugin_abi.cache import NotPrivateError, cache_root, private_folder
from plugin_abi.landlock import DEVICE, READ, WRITE, Access, Rule

RIGHTS_VARIABLE: Final = "FLAGOS_ISOLATION_RIGHTS"
LIMITS_VARIABLE: Final = "FLAGOS_ISOLATION_LIMITS"
NEEDS_VARIABLE: Final = "FLAGOS_ISOLATION_NEEDS"
_PR_SET_NO_NEW_PRIVS: Final = 38
_SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt")
#: Of /proc nothing of other processes: what is in their environment is theirs.
_FACTS: Final = (
    *("/etc", "/sys"),
    *("/proc/cpuinfo", "/proc/devices", "/proc/driver", "/proc/filesystems", "/proc/loadavg", "/proc/meminfo"),
    *("/proc/modules", "/proc/stat", "/proc/sys", "/proc/uptime", "/proc/version", "/proc/vmstat"),
)
_HARMLESS_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PACKAGES: Final = ("site-packages", "dist-packages")
#: Where the user himself wants a backend to write.
_WRITTEN: Final = ("FLAGOS_DUMP_TO", "FLAGOS_TRACE", "TRITON_CACHE_DIR")
#: The variables that a backend's process has, beside those that its manifest names.
ENVIRONMENT: Final = (
    *("HOME", "LANG", "LANGUAGE", "LC_*", "LOGNAME", "PATH", "TERM", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME"),
    *(
        "FLAGOS_*",
        "FLAGCX_*",
        "LD_*",
        "PYTHON*",
        "OMP_*",
        "GOMP_*",
        "KMP_*",
        "MKL_*",
        "OPENBLAS_*",
        "DNNL_*",
        "ONEDNN_*",
    ),
    *("JAX_*", "XLA_*", "TF_CPP_*", "TORCH*", "PYTORCH_*", "TRITON_*", "USE_FLAGGEMS", "GEMS_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "CC", "CXX", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "ASCEND_*", "MUSA_*", "MLU_*"),
    *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS", "COVERAGE_*", "SOURCE_DATE_EPOCH"),
)


class Need(enum.Enum):
    """What a backend cannot do without: to run programs (a compiler), to open sockets (collectives between hosts), to
    open devices (accelerators)."""

    EXEC = "exec"
    NETWORK = "network"
    DEVICES = "devices"


@dataclass(frozen=True)
class Limits:
    """Resource limits of the process; None: the host's own. `memory_bytes` is what it writes to privately
    (RLIMIT_DATA), `address_space_bytes` all that it maps, shared memory and files included (RLIMIT_AS)."""

    memory_bytes: int | None = None
    address_space_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_bytes: int | None = None
    cpu_seconds: int | None = None

    def within(self, other: Limits) -> Limits:
        """The smaller of each."""
        mine, theirs = asdict(self), asdict(other)
        both = {name: [value for value in (mine[name], theirs[name]) if value is not None] for name in mine}
        return Limits(**{name: min(values, default=None) for name, values in both.items()})


_LIMITS: Final = {
    "memory_bytes": resource.RLIMIT_DATA,
    "address_space_bytes": resource.RLIMIT_AS,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "file_bytes": resource.RLIMIT_FSIZE,
    "cpu_seconds": resource.RLIMIT_CPU,
}
#: Less does not start a Python.
LEAST: Final = {"open_files": 64, "memory_bytes": 64 << 20, "address_space_bytes": 256 << 20, "cpu_seconds": 10}
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Asked:
    """What a manifest says of its process. `hang_seconds` 0: no limit."""

    needs: tuple[Need, ...] = ()
    limits: Limits = field(default_factory=Limits)
    environment: tuple[str, ...] = ()
    hang_seconds: int = 0


class RightsMode(enum.Enum):
    """Whether a backend's process has the least rights that this kernel can enforce, is refused where the kernel cannot
    enforce all of them, or has the rights of its user."""

    LEAST = "least"
    REQUIRED = "required"
    USER = "user"


class SettingError(ValueError):
    """A variable of the user's that says what nobody knows: the fact, and the cure."""

    def __init__(self, fact: str, cure: str) -> None:
        super().__init__(fact)
        self.fact, self.cure = fact, cure


def rights_mode(variables: Mapping[str, str]) -> RightsMode:
    """What FLAGOS_ISOLATION_RIGHTS says. Raises SettingError."""
    value = variables.get(RIGHTS_VARIABLE, "").strip().lower() or RightsMode.LEAST.value
    known = ", ".join(mode.value for mode in RightsMode)
    for mode in RightsMode:
        if mode.value == value:
            return mode
    raise SettingError(f"{RIGHTS_VARIABLE} is {value!r}, which is none of {known}", f"set it to one of {known}")


def user_needs(variables: Mapping[str, str]) -> tuple[Need, ...]:
    """What FLAGOS_ISOLATION_NEEDS allows beside what a manifest asks for: "network,exec". Raises SettingError."""
    words = filter(None, (word.strip().lower() for word in variables.get(NEEDS_VARIABLE, "").split(",")))
    known = {need.value: need for need in Need}
    needs = []
    for word in words:
        if word not in known:
            raise SettingError(f"{NEEDS_VARIABLE} has {word!r}, which is none of {', '.join(known)}", "correct it")
        needs.append(known[word])
    return tuple(needs)


def user_limits(variables: Mapping[str, str]) -> Limits:
    """What FLAGOS_ISOLATION_LIMITS says: "memory_bytes=8G,open_files=256". Raises SettingError."""
    values: dict[str, int] = {}
    for item in filter(None, (item.strip() for item in variables.get(LIMITS_VARIABLE, "").split(","))):
        name, _, text = item.partition("=")
        unit = _UNITS.get(text[-1:].upper(), 1)
        digits = text[:-1] if unit > 1 else text
        if name not in _LIMITS or not digits.isdecimal() or not digits.isascii() or len(digits) > 18:
            cure = f"write NAME=NUMBER, NAME one of {', '.join(_LIMITS)}, NUMBER with K, M, G or T after it if need be"
            raise SettingError(f"{LIMITS_VARIABLE} has {item!r}, which is no limit", cure)
        values[name] = int(digits) * unit
    return Limits(**values)


# ---- What the kernel offers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """What of the rights this kernel can take away: the version of Landlock (0: it has none), and seccomp's filters."""

    landlock: int
    seccomp: bool

    @classmethod
    def current(cls) -> Offer:
        return cls(landlock.version(), not seccomp.absence())


def missing(offer: Offer) -> list[str]:
    """What does not hold under an offer, each with its cause."""
    lines = []
    if not offer.landlock:
        cause = landlock.absence() or "it was left out"
        lines.append(f"files of the user, signals and memory of other processes are open to it: no Landlock ({cause})")
    elif offer.landlock < 6:
        lines.append(f"abstract Unix sockets are not kept from it: Landlock {offer.landlock} is older than 6")
    if not offer.seccomp:
        cause = seccomp.absence() or "it was left out"
        lines.append(f"programs, sockets, ptrace, keyrings and mounts are open to it: no seccomp ({cause})")
    return lines


def describe(variables: Mapping[str, str]) -> list[str]:
    """What holds for a backend in a process of its own here: for `flagos doctor` and `flagos check`."""
    try:
        mode = rights_mode(variables)
        limits = {name: value for name, value in asdict(user_limits(variables)).items() if value is not None}
        given = ", ".join(need.value for need in user_needs(variables))
    except SettingError as error:
        return [f"{error.fact}: {error.cure}"]
    bounds = ["limits: " + ", ".join(f"{name} {value}" for name, value in limits.items())] if limits else []
    bounds += [f"allowed by {NEEDS_VARIABLE} whatever it asks for: {given}"] if given else []
    if mode is RightsMode.USER:
        return [f"it has the rights of its user ({RIGHTS_VARIABLE}=user)", *bounds]
    offer = Offer.current()
    held = ["no new privileges", "a cleaned environment"]
    held += ["a filter of system calls (seccomp)"] if offer.seccomp else []
    held += [f"files by name alone (Landlock {offer.landlock})"] if offer.landlock else []
    without = [f"not here: {line}" for line in missing(offer)]
    if without and mode is RightsMode.REQUIRED:
        without.append(f"{RIGHTS_VARIABLE}=required refuses it therefore")
    return ["it has " + ", ".join(held), *without, *bounds]


# ---- The host's part -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rights:
    """What a child is to take upon itself; plain data, which crosses to it as JSON."""

    needs: Sequence[str]
    limits: dict[str, int]
    readable: Sequence[str]
    writable: Sequence[str]
    #: What stands for the user's home and for his folder of temporary files; None: there is no place for one.
    home: str | None
    temporary: str | None
    cache: str | None
    landlock: bool
    seccomp: bool


@dataclass(frozen=True)
class Confinement:
    """The rights of a process that loads a library (None: its user's), and the names of the variables that it has, or
    what they begin with and "*" (None: all)."""

    rights: Rights | None
    environment: tuple[str, ...] | None


def _homes(variables: Mapping[str, str]) -> set[Path]:
    """The user's home, by the variable and by the system's list, and all above it: never allowed as a whole."""
    homes = [variables.get("HOME", "")]
    with contextlib.suppress(KeyError):
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    found = {Path(os.path.realpath(home)) for home in homes if home.startswith("/")}
    return found | {above for home in found for above in home.parents} | {Path("/")}


def _packages(own: Iterable[Path]) -> list[Path]:
    """The folders of Python that a child imports from: its installation, packages, and where the backend's own lie."""
    folders = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)]
    held = [Path(os.path.realpath(place)) for place in (Path(__file__), *own)]
    for entry in filter(None, sys.path):
        place = Path(entry).absolute()
        real = Path(os.path.realpath(place))
        if place.name in _PACKAGES or any(real in path.parents for path in held):
            folders.append(place)
    return folders


def rights_of(
    asked: Asked, files: Iterable[Path], resource_dir: Path | None, variables: Mapping[str, str], privileged: bool
) -> Rights | None:
    """The rights of a child that opens `files`: the manifest, the library, and what that needs. None: its user's, where
    there are no limits either. Raises SettingError."""
    mode, limits = rights_mode(variables), asked.limits.within(user_limits(variables))
    bounds = {name: max(value, LEAST.get(name, 0)) for name, value in asdict(limits).items() if value is not None}
    needs = tuple(dict.fromkeys(need.value for need in (*asked.needs, *user_needs(variables))))
    if mode is RightsMode.USER:
        return Rights(needs, bounds, (), (), None, None, None, False, False) if bounds else None
    offer = Offer.current()
    if mode is RightsMode.REQUIRED and (lacking := missing(offer)):
        cure = f"set {RIGHTS_VARIABLE}=least to do without"
        raise SettingError(f"{RIGHTS_VARIABLE}=required, and {'; '.join(lacking)}", cure)
    files = [Path(path).absolute() for path in files]
    forbidden = _homes(variables)
    folders = [*_packages(files), *(path.parent for path in files), *([resource_dir] if resource_dir else [])]
    folders += [Path(entry) for entry in variables.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]
    allowed = [folder for folder in folders if Path(os.path.realpath(folder)) not in forbidden]
    root, own = cache_root(variables), None
    with contextlib.suppress(NotPrivateError):
        own = private_folder("isolated", variables, privileged)
    written = [Path(variables[name]) for name in _WRITTEN if variables.get(name, "").startswith("/")]
    cache = [root] if own is not None and root is not None else []
    return Rights(
        needs,
        bounds,
        tuple(dict.fromkeys(map(str, (*allowed, *files)))),
        tuple(str(folder) for folder in (*cache, *written) if Path(os.path.realpath(folder)) not in forbidden),
        home=str(own / "home") if own is not None else None,
        temporary=str(own / "tmp") if own is not None else None,
        cache=str(root.parent) if root is not None else None,
        landlock=offer.landlock > 0,
        seccomp=offer.seccomp,
    )


# ---- The child's part ----------------------------------------------------------------------------------------------


def _set_limits(limits: Mapping[str, int]) -> None:
    for name, value in limits.items():
        kind = _LIMITS[name]
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def _rules(rights: Rights) -> list[Rule]:
    run = Access.EXECUTE if Need.EXEC.value in rights.needs else Access(0)
    rules = [Rule(Path(folder), READ | run) for folder in (*_SYSTEM, *rights.readable)]
    rules += [Rule(Path(folder), READ) for folder in (*_FACTS, "/proc/self")]
    rules += [Rule(Path(folder), WRITE) for folder in rights.writable]
    rules += [Rule(Path(device), DEVICE) for device in _HARMLESS_DEVICES]
    if Need.DEVICES.value in rights.needs:
        rules.append(Rule(Path("/dev"), DEVICE | Access.READ_DIR))
    return rules


def take(values: Mapping[str, Any], hand_over: Callable[[int], None] | None = None) -> None:
    """Takes upon this process, which has one thread, what `rights_of` decided, for good. Raises OSError. `hand_over`
    gives the listener of its filter to a process that refuses what is denied, and reports it."""
    rights = Rights(**values)
    host = os.getppid()
    for name, folder in (("HOME", rights.home), ("TMPDIR", rights.temporary)):
        if folder is not None:
            Path(folder).mkdir(mode=0o700, exist_ok=True)
            os.environ[name] = folder
    if rights.cache is not None:  # where it is without the variable depends on the home
        os.environ["XDG_CACHE_HOME"] = rights.cache
    _set_limits(rights.limits)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    needs = {need: need.value in rights.needs for need in Need}
    if rights.landlock:
        # Never closed: the rule about it is one about this very entry, which the system would make anew.
        os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)
        landlock.restrict(_rules(rights), network=needs[Need.NETWORK])
    if rights.seccomp:
        made = functools.partial(
            seccomp.filter_program, os.getpid(), host, programs=needs[Need.EXEC], network=needs[Need.NETWORK]
        )
        if hand_over is not None:
            try:
                listener = seccomp.install(made(listened=True), listened=True)
            except OSError:  # before Linux 5.7, or this process has a listener that somebody else set
                pass
            else:
                hand_over(listener)
                os.close(listener)
                return
        seccomp.install(made())
