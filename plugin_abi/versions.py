"""Versions on the host side: the ABI range that host and backend speak, and the version ranges that manifests declare.

Used by the manifest, the policy and the loader; knows no files and no libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ABI = re.compile(r"([0-9]{1,5})\.([0-9]{1,5})")
_RELEASE = re.compile(r"\s*[vV]?([0-9]+(?:\.[0-9]+)*)(.*)")
_PRERELEASE = re.compile(r"[.\-_]?(a|b|c|rc|alpha|beta|pre|dev)[.\-_]?[0-9]*", re.IGNORECASE)
_CLAUSE = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?\s*")


@dataclass(frozen=True, order=True)
class AbiVersion:
    """A version of the plugin ABI; on the wire it is major << 16 | minor."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> AbiVersion:
        """Read "major.minor". Raises ValueError."""
        match = _ABI.fullmatch(text)
        if match is None or max(map(int, match.groups())) > 0xFFFF:
            raise ValueError(f"{text!r} is not an ABI version like '1.0'")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def from_number(cls, number: int) -> AbiVersion:
        """Read the form that crosses the ABI."""
        return cls(number >> 16, number & 0xFFFF)

    @property
    def number(self) -> int:
        return self.major << 16 | self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class AbiRange:
    """The versions from `min` to `max`, both included."""

    min: AbiVersion
    max: AbiVersion

    def __contains__(self, version: AbiVersion) -> bool:
        return self.min <= version <= self.max

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min} to {self.max}"


def _release(text: str) -> tuple[int, ...] | None:
    match = _RELEASE.fullmatch(text)
    if match is None:
        return None
    return tuple(int(part) for part in match[1].split("."))


def _is_prerelease(text: str) -> bool:
    match = _RELEASE.fullmatch(text)
    return match is not None and _PRERELEASE.match(match[2]) is not None


def _padded(release: tuple[int, ...], length: int) -> tuple[int, ...]:
    return release + (0,) * (length - len(release))


@dataclass(frozen=True)
class _Clause:
    operator: str
    release: tuple[int, ...]
    prefix: bool

    def accepts(self, version: tuple[int, ...], prerelease: bool) -> bool:
        if self.prefix:
            equal = _padded(version, len(self.release))[: len(self.release)] == self.release
            return equal == (self.operator == "==")
        length = max(len(version), len(self.release))
        # A pre-release comes just before its release: it is below it, and below nothing else of the same number.
        left = (_padded(version, length), 0 if prerelease else 1)
        right = (_padded(self.release, length), 1)
        return {
            "==": left == right,
            "!=": left != right,
            ">=": left >= right,
            "<=": left <= right,
            ">": left > right,
            # "<2.0" leaves out 2.0's own pre-releases, as PEP 440 does.
            "<": left[0] < right[0],
        }[self.operator]


@dataclass(frozen=True)
class VersionRange:
    """A comma-separated list of version clauses in PEP 440's notation, all of which must hold: ">=2.11,<2.16".

    Local version parts ("+cpu") are ignored. The operators ~= and === are not known.
    """

    text: str
    clauses: tuple[_Clause, ...]

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Read a range. Raises ValueError for an unknown operator or a malformed version."""
        clauses = []
        for part in text.split(","):
            match = _CLAUSE.fullmatch(part)
            if match is None or (match[3] and match[1] not in ("==", "!=")):
                raise ValueError(f"{part.strip()!r} is not a version clause like '>=2.11'")
            clauses.append(_Clause(match[1], tuple(int(n) for n in match[2].split(".")), bool(match[3])))
        return cls(text, tuple(clauses))

    def __contains__(self, version: str) -> bool:
        """Whether all clauses hold; a version that cannot be read is in no range."""
        release = _release(version)
        prerelease = _is_prerelease(version)
        return release is not None and all(clause.accepts(release, prerelease) for clause in self.clauses)

    def __str__(self) -> str:
        return self.text


def release_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for ordering symbol versions such as GLIBC_2.34; () when there are none."""
    return _release(text) or ()
