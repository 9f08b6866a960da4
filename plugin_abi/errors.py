"""The catalogue of what can go wrong between host and backend: refusals, which are values, and status errors.

First stage of the host side: every later stage (search, manifest, policy, trial, loader, host) reports through it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RefusalCode(enum.IntEnum):
    """Why a manifest or its library is not used. Numbers are stable; a code is never reused for another meaning.

    They begin with 1000: numbers below are the backend's errors. ``meaning`` and ``cure`` are what docs/errors.md has;
    a refusal states the facts of its case.
    """

    meaning: str
    cure: str

    def __new__(cls, number: int, meaning: str, cure: str) -> RefusalCode:
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning, code.cure = meaning, cure
        return code

    @classmethod
    def of(cls, number: object) -> RefusalCode:
        """The code with this number. Raises ValueError if it is none's."""
        for code in cls:
            if code == number:
                return code
        raise ValueError(f"{number!r} is no code of a refusal")

    # The manifest file.
    MANIFEST_NOT_FOUND = 1100, "a manifest that was named does not exist", "correct the path that names it"
    MANIFEST_UNREADABLE = (
        1101,
        "a manifest or a folder of manifests is no file, or cannot be read",
        "let this user read it, or remove it",
    )
    MANIFEST_EMPTY = 1102, "the manifest is empty", "install the backend again"
    MANIFEST_TOO_LARGE = 1103, "the manifest is larger than any manifest may be", "install the backend again"
    MANIFEST_NOT_UTF8 = 1104, "the manifest is not UTF-8 text", "write it as UTF-8"
    MANIFEST_NOT_JSON = 1105, "the manifest is not JSON", "correct it where the message says"
    MANIFEST_TOO_DEEP = 1106, "the manifest's values are nested too deep", "write it as the contract has it"
    MANIFEST_DUPLICATE_KEY = 1107, "an object of the manifest has one key twice", "leave one of them out"
    MANIFEST_FORMAT_VERSION = (
        1108,
        "the manifest has a format that this host does not read",
        "install a matching flagos or backend",
    )
    MANIFEST_MISSING_FIELD = 1109, "the manifest lacks a field", "add it"
    MANIFEST_INVALID_FIELD = (
        1110,
        "a field of the manifest has a value that it may not have",
        "correct it as the message says",
    )
    RESOURCE_DIR_UNUSABLE = (
        1111,
        "the folder that resource_dir names is not there, or lies elsewhere",
        "install the backend's files beside its library, or correct the field",
    )
    # The choice among manifests.
    DISABLED = 1120, "FLAGOS_DRIVERS_DISABLE leaves the manifest out", "change or unset it"
    NOT_SELECTED = 1121, "FLAGOS_DRIVERS_SELECT leaves the manifest out", "change or unset it"
    DUPLICATE_LIBRARY = 1122, "a manifest that was found before has the same library", "remove one of the two"
    # Any of the checks.
    CHECK_FAILED = 1130, "a check failed itself", "correct what the cause names, or report it"
    # The library file, read without running it.
    LIBRARY_NOT_FOUND = (
        1200,
        "library_path leads to no file",
        "install the backend's library there, or correct the field",
    )
    LIBRARY_UNREADABLE = 1201, "the library is no file, or cannot be read", "let this user read it"
    LIBRARY_NOT_ELF = 1202, "the library is no ELF file", "install a complete build for this machine"
    LIBRARY_TRUNCATED = 1203, "the library ends before its tables do", "install a complete build for this machine"
    LIBRARY_MALFORMED = 1204, "the library's tables contradict themselves", "install a complete build for this machine"
    LIBRARY_NOT_SHARED = 1205, "the library is a program or an object file", "link it with -shared"
    WRONG_ARCHITECTURE = (
        1206,
        "the library, its manifest and this machine name different processors",
        "install the build for this machine",
    )
    SHA256_MISMATCH = 1207, "the library is not the one that the manifest describes", "install the backend again"
    ENTRY_MISSING = (
        1208,
        "the library does not export flagos_plugin_entry",
        "export it with C linkage and default visibility",
    )
    EXTRA_EXPORTS = 1209, "the library exports more than flagos_plugin_entry", "link it with a version script"
    STATIC_INITIALIZER = (
        1210,
        "the library, or one that it brings, runs code when it is loaded",
        "construct at first use instead",
    )
    COMPILER_MISMATCH = (
        1211,
        "the library was built by another compiler than the manifest says",
        "build the library and its manifest together again",
    )
    CXX11_ABI_MISMATCH = (
        1212,
        "the library has another C++11 ABI than the manifest says",
        "build the library and its manifest together again",
    )
    DEPENDENCY_MISSING = (
        1213,
        "the dynamic linker would not find a library that this one needs",
        "install it, or correct the run path",
    )
    GLIBC_TOO_OLD = 1214, "the library needs a newer glibc", "use a newer system, or a build for this one"
    SYMBOL_VERSION_MISSING = 1215, "a library that this one needs is too old", "install a newer one"
    EXECUTABLE_STACK = 1216, "loading it would make stacks executable", "link it with -Wl,-z,noexecstack"
    WRITABLE_CODE = 1217, "its code would be writable", "compile it with -fPIC and link it with -Wl,-z,text"
    UNCHECKED_LOAD = (
        1218,
        "it would load libraries that nobody checked",
        "link it without filters, audits and relative run paths",
    )
    LIBRARY_CHANGED = (
        1219,
        "the file changed between the checks and the load",
        "install the backend again, and start the process again",
    )
    # The ABI version.
    ABI_TOO_OLD = 1300, "the backend speaks an ABI older than this host's", "install a newer build of the backend"
    ABI_TOO_NEW = (
        1301,
        "the backend speaks an ABI newer than this host's",
        "install a newer flagos, or an older backend",
    )
    # The running frameworks.
    FRAMEWORK_MISSING = 1400, "a framework that the backend was built with is not installed", "install it"
    FRAMEWORK_REVISION = (
        1401,
        "the running framework has another git revision or version",
        "install a matching framework or backend",
    )
    FRAMEWORK_COMPILER = (
        1402,
        "the running framework was built by another compiler",
        "build the backend with the framework's compiler",
    )
    FRAMEWORK_CXX11_ABI = (
        1403,
        "the running framework has the other C++11 ABI",
        "build the backend with the framework's _GLIBCXX_USE_CXX11_ABI",
    )
    PYTHON_VERSION = 1404, "the backend does not run on this Python", "use one of the versions that the message names"
    # The load itself.
    DLOPEN_FAILED = 1500, "the dynamic linker does not load the library", "correct what the cause names"
    ENTRY_CRASHED = 1501, "the trial load ended its process", "report it to the backend's vendor"
    ENTRY_HANGS = 1502, "the trial load did not end in time", "report it to the backend's vendor, or allow it more time"
    ENTRY_FAILED = 1503, "the library's entry returned an error", "report it to the backend's vendor"
    INFO_MISMATCH = (
        1504,
        "the library says something else of itself than its manifest",
        "build the library and its manifest together again",
    )
    TABLE_INVALID = 1505, "the function table breaks the contract", "report it to the backend's vendor"
    TRIAL_UNAVAILABLE = (
        1506,
        "the library cannot be tried in a process of its own",
        "correct the cause, or load it untried as the message says",
    )
    ISOLATION_UNAVAILABLE = (
        1507,
        "the backend cannot be given a process of its own",
        "correct the cause, or set FLAGOS_ISOLATION=none",
    )


def printable(text: str) -> str:
    """`text` as one line without anything that a terminal would act on: others' texts are shown, not obeyed."""
    if text.isprintable():
        return text
    line = text.replace("\n", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


#: A choice that the user made is no defect: it is logged for information, not as a warning.
CHOSEN_BY_USER = frozenset({RefusalCode.DISABLED, RefusalCode.NOT_SELECTED})


@dataclass(frozen=True)
class Refusal:
    """Why one manifest is not used: what is so (`fact`), where (`place`), what to do (`cure`), and what it rests on."""

    code: RefusalCode
    fact: str
    place: str
    cure: str
    cause: str = ""
    #: Nobody but the reader of a traceback needs it; never compared.
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        cause = f" Cause: {self.cause}." if self.cause else ""
        line = f"FLAGOS-{int(self.code)} {self.code.name}: {self.fact} (in {self.place}).{cause} Cure: {self.cure}."
        return printable(line)


class StatusCode(enum.IntEnum):
    """The status codes of the plugin ABI, which are those of absl::StatusCode."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @classmethod
    def of(cls, number: int) -> StatusCode:
        """The code with this number; a number that a later ABI may add is UNKNOWN."""
        return cls(number) if cls.OK <= number <= cls.UNAUTHENTICATED else cls.UNKNOWN


class FlagosStatusError(RuntimeError):
    """An error that a backend returned through the ABI: status code, message and named payload bytes."""

    def __init__(self, code: StatusCode, message: str, payloads: dict[str, bytes] | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.payloads = payloads or {}
