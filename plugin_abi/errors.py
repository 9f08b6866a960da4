"""The catalogue of what can go wrong between host and backend: refusals, which are values, and status errors.

First stage of the host side: every later stage (search, manifest, policy, trial, loader, host) reports through it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RefusalCode(enum.IntEnum):
    """Why a manifest or its library is not used. Numbers are stable; a code is never reused for another meaning."""

    # The manifest file.
    MANIFEST_NOT_FOUND = 100
    MANIFEST_UNREADABLE = 101
    MANIFEST_EMPTY = 102
    MANIFEST_TOO_LARGE = 103
    MANIFEST_NOT_UTF8 = 104
    MANIFEST_NOT_JSON = 105
    MANIFEST_TOO_DEEP = 106
    MANIFEST_DUPLICATE_KEY = 107
    MANIFEST_FORMAT_VERSION = 108
    MANIFEST_MISSING_FIELD = 109
    MANIFEST_INVALID_FIELD = 110
    RESOURCE_DIR_UNUSABLE = 111
    # The choice among manifests.
    DISABLED = 120
    NOT_SELECTED = 121
    DUPLICATE_LIBRARY = 122
    # Any of the checks.
    CHECK_FAILED = 130
    # The library file, read without running it.
    LIBRARY_NOT_FOUND = 200
    LIBRARY_UNREADABLE = 201
    LIBRARY_NOT_ELF = 202
    LIBRARY_TRUNCATED = 203
    LIBRARY_MALFORMED = 204
    LIBRARY_NOT_SHARED = 205
    WRONG_ARCHITECTURE = 206
    SHA256_MISMATCH = 207
    ENTRY_MISSING = 208
    EXTRA_EXPORTS = 209
    STATIC_INITIALIZER = 210
    COMPILER_MISMATCH = 211
    CXX11_ABI_MISMATCH = 212
    DEPENDENCY_MISSING = 213
    GLIBC_TOO_OLD = 214
    SYMBOL_VERSION_MISSING = 215
    EXECUTABLE_STACK = 216
    WRITABLE_CODE = 217
    UNCHECKED_LOAD = 218
    LIBRARY_CHANGED = 219
    # The ABI version.
    ABI_TOO_OLD = 300
    ABI_TOO_NEW = 301
    # The running frameworks.
    FRAMEWORK_MISSING = 400
    FRAMEWORK_REVISION = 401
    FRAMEWORK_COMPILER = 402
    FRAMEWORK_CXX11_ABI = 403
    PYTHON_VERSION = 404
    # The load itself.
    DLOPEN_FAILED = 500
    ENTRY_CRASHED = 501
    ENTRY_HANGS = 502
    ENTRY_FAILED = 503
    INFO_MISMATCH = 504
    TABLE_INVALID = 505
    TRIAL_UNAVAILABLE = 506


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
        line = f"F{int(self.code)} {self.code.name}: {self.fact} (in {self.place}).{cause} Cure: {self.cure}."
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
