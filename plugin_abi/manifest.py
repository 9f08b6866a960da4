"""Manifests: what a backend says of itself before anything of it runs. Bytes in, frozen values or a Refusal out.

Second stage of the host side: search finds the files, this reads them, policy judges what they point to.
"""

from __future__ import annotations

import enum
import errno
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.files import NotRegularError, OpenFile, absence
from plugin_abi.rights import LEAST, Asked, Limits, Need
from plugin_abi.versions import AbiRange, AbiVersion, VersionRange

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 16
MAX_STRING: Final = 4096
MAX_ITEMS: Final = 256
#: The formats that this loader reads; 1.1 brings `isolation` and `isolated`.
FORMATS: Final = ((1, 0), (1, 1))
PRIORITY_LIMIT: Final = 10_000
MAX_LIMIT: Final = 2**60

_FORMAT_VERSION = re.compile(r"(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})")
_PLATFORM = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9a-f]{7,64}")
_COMPILER = re.compile(r"[a-z][a-z0-9+_-]{0,31} [0-9]+(\.[0-9]+){0,3}")
_GLIBC = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,126}\*?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

OptionValue = str | int | float | bool | tuple[int, ...]
_T = TypeVar("_T")


class Binding(enum.Enum):
    """How a backend meets a framework: through plain C data, or by linking against the framework's C++."""

    C = "c"
    CXX = "cxx"


class Isolation(enum.Enum):
    """Where a backend asks to run, unless its user says otherwise: in the host's process or in one of its own."""

    NONE = "none"
    PROCESS = "process"


class PythonAbi(enum.Enum):
    """What a backend needs of a CPython: nothing, or the stable ABI of the one in the process."""

    NONE = "none"
    STABLE = "stable"


@dataclass(frozen=True)
class FrameworkRequirement:
    """What a backend needs of one framework. A field that is None is not compared."""

    name: str
    version: VersionRange | None = None
    git_revision: tuple[str, ...] = ()
    compiler: str | None = None
    cxx11_abi: bool | None = None
    binding: Binding = Binding.C
    required: bool = False


@dataclass(frozen=True)
class PythonRequirement:
    """The Python ABI that a backend uses and the versions that it runs on."""

    abi: PythonAbi
    version: VersionRange | None = None


@dataclass(frozen=True)
class BuiltWith:
    """The toolchain of a backend. `cxx11_abi` None: no C++ inside."""

    compiler: str
    cxx11_abi: bool | None
    glibc: str
    python: PythonRequirement
    frameworks: tuple[FrameworkRequirement, ...] = ()
    git_revision: str | None = None


@dataclass(frozen=True)
class Manifest:
    """One manifest file, read and checked field by field. Paths are as the file's place makes them."""

    path: Path
    format_version: str
    name: str
    platform: str
    version: str
    library_path: str
    library_arch: str
    abi_version: AbiRange
    built_with: BuiltWith
    priority: int = 0
    resource_dir: Path | None = None
    sha256: str | None = None
    options: tuple[tuple[str, OptionValue], ...] = ()
    static_initializers: int = 0
    isolation: Isolation = Isolation.NONE
    #: What its own process needs, may use and may take, where it has one.
    isolated: Asked = field(default_factory=Asked)
    #: Fields that no loader of this format reads, each with the known one that it resembles.
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    @property
    def library_is_bare(self) -> bool:
        """Whether the library is to be found by the dynamic linker's own search (a name without a slash)."""
        return "/" not in self.library_path


class _Invalid(Exception):
    """A field that breaks the schema; becomes a Refusal at the boundary of this module."""

    def __init__(self, code: RefusalCode, fact: str, field_path: str, cure: str) -> None:
        super().__init__(fact)
        self.code, self.fact, self.field_path, self.cure = code, fact, field_path, cure


def _invalid(field_path: str, fact: str, cure: str) -> NoReturn:
    raise _Invalid(RefusalCode.MANIFEST_INVALID_FIELD, f"field {field_path} {fact}", field_path, cure)


_KINDS: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "null")


@dataclass(frozen=True)
class _Object:
    """A JSON object with the path that led to it, so that every complaint names its field."""

    values: Mapping[str, Any]
    path: str = ""
    #: The fields that were looked for here, and all objects that were entered, this one first.
    asked: set[str] = field(default_factory=set)
    entered: list[_Object] = field(default_factory=list)

    def enter(self, values: Mapping[str, Any], key: str) -> _Object:
        inner = _Object(values, self.at(key), entered=self.entered)
        self.entered.append(inner)
        return inner

    def accept_all(self) -> None:
        """The names here are the writer's own."""
        self.asked.update(self.values)

    def unknown(self) -> list[str]:
        """The fields that nobody looked for, but for notes to people and editors."""
        notes = ("$", "_")
        return [k for k in self.values if k not in self.asked and k != "description" and not k.startswith(notes)]

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, kind: type[_T], *, nullable: bool = False) -> _T | None:
        """The value, or None when it is absent (or null, where null means absent). Raises _Invalid."""
        self.asked.add(key)
        if key not in self.values:
            return None
        value = self.values[key]
        if value is None and nullable:
            return None
        # bool is a subclass of int in Python, never in JSON.
        if type(value) is not kind:
            _invalid(
                self.at(key), f"is of type {_kind(value)}, not {_KINDS[kind]}", f"make it {_article(_KINDS[kind])}"
            )
        return value

    def need(self, key: str, kind: type[_T]) -> _T:
        value = self.get(key, kind)
        if value is None:
            place = self.at(key)
            raise _Invalid(
                RefusalCode.MANIFEST_MISSING_FIELD, f"field {place} is missing", place, f"add {place} to the manifest"
            )
        return value

    def text(self, key: str, pattern: re.Pattern[str] | None = None, example: str = "") -> str | None:
        value = self.get(key, str)
        return None if value is None else _check_text(value, self.at(key), pattern, example)

    def need_text(self, key: str, pattern: re.Pattern[str] | None = None, example: str = "") -> str:
        return _check_text(self.need(key, str), self.at(key), pattern, example)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        value = self.get(key, int)
        if value is None:
            return default
        if not low <= value <= high:
            _invalid(self.at(key), f"is {value}, outside {low} to {high}", f"choose a number from {low} to {high}")
        return value

    def object(self, key: str) -> _Object | None:
        value = self.get(key, dict)
        return None if value is None else self.enter(value, key)

    def need_object(self, key: str) -> _Object:
        return self.enter(self.need(key, dict), key)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _check_text(value: str, path: str, pattern: re.Pattern[str] | None, example: str) -> str:
    if not value:
        _invalid(path, "is an empty string", "give it a value or leave it out")
    if len(value) > MAX_STRING:
        _invalid(path, f"has {len(value)} characters, more than {MAX_STRING}", "shorten it")
    if _CONTROL.search(value):
        _invalid(path, "contains a control character or a lone surrogate", "remove that character")
    if pattern is not None and not pattern.fullmatch(value):
        _invalid(path, f"is {_shorten(value)!r}", f"write it like {example!r}")
    return value


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _read(place: _Object, key: str, reader: Callable[[str], _T], text: str) -> _T:
    try:
        return reader(text)
    except ValueError as error:
        _invalid(place.at(key), f"is {_shorten(text)!r}: {error}", "correct the version")


def _abi_range(top: _Object) -> AbiRange:
    place = top.need_object("abi_version")
    low = _read(place, "min", AbiVersion.parse, place.need_text("min"))
    high = _read(place, "max", AbiVersion.parse, place.need_text("max"))
    if low > high:
        _invalid(place.path, f"has min {low} above max {high}", "exchange the two")
    return AbiRange(low, high)


def _revisions(place: _Object) -> tuple[str, ...]:
    place.asked.add("git_revision")
    value = place.values.get("git_revision", [])
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_ITEMS or not all(isinstance(item, str) for item in items):
        _invalid(place.at("git_revision"), "is neither a string nor a list of strings", "list commit hashes")
    example = "cf30153c4c131c8164ee7798e5022d810682e2cb"
    return tuple(_check_text(item, place.at("git_revision"), _REVISION, example) for item in items)


def _range(place: _Object, key: str) -> VersionRange | None:
    text = place.text(key)
    return None if text is None else _read(place, key, VersionRange.parse, text)


def _choice(place: _Object, key: str, choices: type[enum.Enum], default: enum.Enum | None) -> Any:
    text = place.text(key) if default is not None else place.need_text(key)
    if text is None:
        return default
    allowed = [member.value for member in choices]
    if text not in allowed:
        _invalid(place.at(key), f"is {_shorten(text)!r}", f"choose one of {', '.join(allowed)}")
    return choices(text)


def _framework(name: str, place: _Object, own_compiler: str, own_cxx11_abi: bool | None) -> FrameworkRequirement:
    binding: Binding = _choice(place, "binding", Binding, Binding.C)
    compiler = place.text("compiler", _COMPILER, "gcc 13.3.1")
    cxx11_abi = place.get("cxx11_abi", bool)
    if binding is Binding.CXX:
        # Who links against a framework's C++ was built to match it: what is left out is what the library itself has.
        compiler = compiler or own_compiler
        cxx11_abi = own_cxx11_abi if cxx11_abi is None else cxx11_abi
    return FrameworkRequirement(
        name=name,
        version=_range(place, "version"),
        git_revision=_revisions(place),
        compiler=compiler,
        cxx11_abi=cxx11_abi,
        binding=binding,
        required=bool(place.get("required", bool)),
    )


def _built_with(top: _Object) -> BuiltWith:
    place = top.need_object("built_with")
    compiler = place.need_text("compiler", _COMPILER, "gcc 12.2.0")
    if "cxx11_abi" not in place.values:
        place.need("cxx11_abi", bool)
    cxx11_abi = place.get("cxx11_abi", bool, nullable=True)
    python = place.need_object("python")
    frameworks = place.object("framework") or _Object({}, place.at("framework"))
    frameworks.accept_all()
    if len(frameworks.values) > MAX_ITEMS:
        _invalid(frameworks.path, f"names more than {MAX_ITEMS} frameworks", "name those that the backend uses")
    return BuiltWith(
        compiler=compiler,
        cxx11_abi=cxx11_abi,
        glibc=place.need_text("glibc", _GLIBC, "2.36"),
        python=PythonRequirement(_choice(python, "abi", PythonAbi, None), _range(python, "version")),
        frameworks=tuple(
            _framework(
                _check_text(name, frameworks.path, _NAME, "torch"), frameworks.need_object(name), compiler, cxx11_abi
            )
            for name in frameworks.values
        ),
        git_revision=place.text("git_revision", _REVISION, "cf30153c4c131c8164ee7798e5022d810682e2cb"),
    )


def _option(path: str, value: object) -> OptionValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if value == "" else _check_text(value, path, None, "")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            _invalid(path, "does not fit in 64 bits", "choose a smaller number")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            _invalid(path, "is not finite", "choose a finite number")
        return value
    if isinstance(value, list) and len(value) <= MAX_ITEMS and all(type(item) is int for item in value):
        return tuple(int(_option(path, item)) for item in value)  # type: ignore[arg-type]
    _invalid(path, f"is of type {_kind(value)}", "use a string, number, boolean or list of integers")


def _options(top: _Object) -> tuple[tuple[str, OptionValue], ...]:
    place = top.object("options")
    if place is None:
        return ()
    place.accept_all()
    if len(place.values) > MAX_ITEMS:
        _invalid(place.path, f"has more than {MAX_ITEMS} entries", "remove some")
    return tuple(
        (_check_text(name, place.path, _NAME, "num_threads"), _option(place.at(name), value))
        for name, value in place.values.items()
    )


def _format_version(top: _Object) -> str:
    text = top.need_text("file_format_version", _FORMAT_VERSION, "1.0.0")
    major, minor, _ = map(int, text.split("."))
    if (major, minor) not in FORMATS:
        wanted = " and ".join(f"{major}.{minor}.x" for major, minor in FORMATS)
        raise _Invalid(
            RefusalCode.MANIFEST_FORMAT_VERSION,
            f"file_format_version is {text}; this loader reads {wanted}",
            "file_format_version",
            "install a loader of that format, or write the manifest for this one",
        )
    return text


def _is_of_format_1_1(name: str, format_version: str) -> None:
    if format_version.startswith("1.0."):
        # A loader of that format would leave the field out, and load the library into its process.
        _invalid(name, "is of the format 1.1, the manifest of 1.0", "write file_format_version 1.1.0")


def _isolation(top: _Object, format_version: str) -> Isolation:
    value = top.text("isolation")
    if value is None:
        return Isolation.NONE
    _is_of_format_1_1("isolation", format_version)
    found = next((isolation for isolation in Isolation if isolation.value == value), None)
    if found is None:
        _invalid("isolation", f"is {value!r}", f"write one of {', '.join(known.value for known in Isolation)}")
    return found


def _texts(place: _Object, key: str, pattern: re.Pattern[str] | None, example: str) -> tuple[str, ...]:
    items = place.get(key, list) or []
    if len(items) > MAX_ITEMS or not all(isinstance(item, str) for item in items):
        _invalid(place.at(key), f"is no list of at most {MAX_ITEMS} strings", f"write it like [{example!r}]")
    return tuple(_check_text(item, place.at(key), pattern, example) for item in items)


def _isolated(top: _Object, format_version: str) -> Asked:
    place = top.object("isolated")
    if place is None:
        return Asked()
    _is_of_format_1_1("isolated", format_version)
    known = [need.value for need in Need]
    needs = _texts(place, "needs", None, known[0])
    for need in needs:
        if need not in known:
            _invalid(place.at("needs"), f"has {_shorten(need)!r}", f"choose among {', '.join(known)}")
    bounds = place.object("limits") or _Object({}, place.at("limits"))
    limits = {
        name.name: bounds.integer(name.name, 0, LEAST.get(name.name, 1), MAX_LIMIT)
        for name in fields(Limits)
        if name.name in bounds.values
    }
    bounds.asked.update(name.name for name in fields(Limits))
    return Asked(
        needs=tuple(Need(need) for need in dict.fromkeys(needs)),
        limits=Limits(**limits),
        environment=_texts(place, "environment", _VARIABLE, "MYCHIP_*"),
        hang_seconds=place.integer("hang_seconds", 0, 0, 1_000_000),
    )


def _unknown_fields(top: _Object) -> tuple[str, ...]:
    """What is misspelt counts for nothing, and neither does the check that it asked for."""
    found: list[str] = []
    unknown = [(place, key) for place in (top, *top.entered) for key in place.unknown()]
    if unknown:
        # Not at every start: nearly all manifests have none.
        import difflib

        for place, key in unknown[:MAX_ITEMS]:
            near = difflib.get_close_matches(_shorten(key), sorted(place.asked), n=1)
            found.append(_shorten(place.at(key)) + (f" (did you mean {near[0]}?)" if near else ""))
    return tuple(found)


def _manifest(path: Path, top: _Object) -> Manifest:
    format_version = _format_version(top)
    resource_dir = top.text("resource_dir")
    manifest = Manifest(
        path=path,
        format_version=format_version,
        name=top.need_text("name", _NAME, "flagos"),
        platform=top.need_text("platform", _PLATFORM, "flagos"),
        version=top.need_text("version", _NAME, "0.1.0"),
        library_path=top.need_text("library_path"),
        library_arch=top.need_text("library_arch", _ARCH, "x86_64"),
        abi_version=_abi_range(top),
        built_with=_built_with(top),
        priority=top.integer("priority", 0, -PRIORITY_LIMIT, PRIORITY_LIMIT),
        resource_dir=None if resource_dir is None else path.parent / resource_dir,
        sha256=top.text("sha256", _SHA256, "64 lower-case hex digits"),
        options=_options(top),
        static_initializers=top.integer("static_initializers", 0, 0, 1_000_000),
        isolation=_isolation(top, format_version),
        isolated=_isolated(top, format_version),
    )
    return replace(manifest, unknown_fields=_unknown_fields(top))


# ---- Bytes to JSON -------------------------------------------------------------------------------------------------


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings; json itself would recurse before anyone could look."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Invalid(
                RefusalCode.MANIFEST_DUPLICATE_KEY,
                f"the key {_shorten(ascii(key))} appears twice in one object",
                key,
                "keep one of the two",
            )
        values[key] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {_shorten(text, 40)} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > 64:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _decode(data: bytes) -> _Object:
    """Bytes to a JSON object. Raises _Invalid."""

    def fail(code: RefusalCode, fact: str, cure: str) -> NoReturn:
        raise _Invalid(code, fact, "", cure)

    if len(data) > MAX_BYTES:
        fail(RefusalCode.MANIFEST_TOO_LARGE, f"the file has more than {MAX_BYTES} bytes", "remove what no loader reads")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(RefusalCode.MANIFEST_NOT_UTF8, f"byte {error.start} is not UTF-8", "save the file as UTF-8")
    if not text.strip():
        fail(RefusalCode.MANIFEST_EMPTY, "the file is empty", "write a manifest or delete the file")
    if _depth(text) > MAX_DEPTH:
        fail(RefusalCode.MANIFEST_TOO_DEEP, f"it nests deeper than {MAX_DEPTH} levels", "flatten it")
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_bounded
        )
    except ValueError as error:
        fail(RefusalCode.MANIFEST_NOT_JSON, f"it is not JSON: {error}", "correct the syntax")
    if not isinstance(value, dict):
        fail(
            RefusalCode.MANIFEST_INVALID_FIELD,
            f"its top level is of type {_kind(value)}, not object",
            "wrap the fields in { }",
        )
    return _Object(value)


def parse_manifest(data: bytes, path: Path) -> Manifest | Refusal:
    """Read the bytes of a manifest that lies at `path`. Never raises for what the bytes contain."""
    try:
        return _manifest(path, _decode(data))
    except _Invalid as invalid:
        return Refusal(invalid.code, invalid.fact, str(path), invalid.cure, exception=invalid)


def read_manifest(path: Path) -> Manifest | Refusal:
    """Read one manifest file; no more than MAX_BYTES of it, and nothing but a regular file."""
    try:
        data = OpenFile(path).read(0, MAX_BYTES + 1)
    except NotRegularError:
        fact = "it is not a regular file"
        return Refusal(RefusalCode.MANIFEST_UNREADABLE, fact, str(path), "put a manifest file there")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ELOOP):
            fact = f"the file {absence(path)}"
            return Refusal(RefusalCode.MANIFEST_NOT_FOUND, fact, str(path), "correct the path that names it")
        fact, cure = "the file cannot be read", "make it readable to this user, or remove it"
        return Refusal(RefusalCode.MANIFEST_UNREADABLE, fact, str(path), cure, str(error), error)
    return parse_manifest(data, path)
