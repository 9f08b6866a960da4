"""The call of a backend's entry and the judgement of its answer: the plugin answers, the host decides.

Fifth stage of the host side. The same judgement serves the trial load in a child and the load in the process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from plugin_abi import __version__, cabi
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.manifest import Manifest, PythonAbi
from plugin_abi.policy import refuse_abi
from plugin_abi.versions import AbiRange, AbiVersion

HOST_NAME: Final = f"flagos loader {__version__}"
ENTRY_OK, ENTRY_INCOMPATIBLE = 0, 1
MAX_TEXT: Final = 4096
#: The last slot of the table in each minor version: what lies up to it must be there.
LAST_SLOT: Final = {0: "profiler_stop"}


@dataclass(frozen=True)
class PluginInfo:
    """What a library says of itself. `cxx11_abi`: 1, 0 or -1 (no C++); `python_abi`: 0 none, 1 stable."""

    name: str
    platform: str
    version: str
    git_revision: str
    compiler: str
    glibc: str
    build_id: str
    cxx11_abi: int
    python_abi: int


@dataclass(frozen=True)
class TableFacts:
    """What is seen of a function table. `empty`: slots of this host's header that lie in it and hold no function."""

    size: int
    version: AbiVersion
    empty: tuple[str, ...]


@dataclass(frozen=True)
class EntryAnswer:
    """What an entry returned and wrote. A text that was NULL is None, and so is a table that nobody may look at."""

    status: int
    version: AbiVersion
    plugin_range: AbiRange
    table: TableFacts | None
    info: dict[str, Any] | None
    message: str

    @property
    def plugin_info(self) -> PluginInfo:
        """The info, once judge() has found it complete."""
        assert self.info is not None
        return PluginInfo(**{field.name: self.info[field.name] for field in fields(PluginInfo)})


def judge(answer: EntryAnswer, manifest: Manifest | None, host: AbiRange, place: str) -> Refusal | None:
    """Whether the host takes a backend that gave this answer. Without a manifest (native) there is nothing to equal."""

    def refuse(code: RefusalCode, fact: str, cure: str) -> Refusal:
        return Refusal(code, fact, place, cure, answer.message)

    fixed = "report the defect to the backend's vendor, or remove its manifest"
    if answer.status == ENTRY_INCOMPATIBLE:
        refusal = refuse_abi(answer.plugin_range, host, place, answer.message)
        fact = f"the entry refuses the host's ABI {host} although it speaks {answer.plugin_range}"
        return refusal or refuse(RefusalCode.ENTRY_FAILED, fact, fixed)
    if answer.status != ENTRY_OK:
        return refuse(RefusalCode.ENTRY_FAILED, f"the entry returned {answer.status}", fixed)
    if answer.version not in host:
        code = RefusalCode.ABI_TOO_OLD if answer.version < host.min else RefusalCode.ABI_TOO_NEW
        return refuse(code, f"the entry chose ABI {answer.version}, which the host did not offer ({host})", fixed)
    if answer.table is None:
        return refuse(RefusalCode.TABLE_INVALID, "the entry returned no function table", fixed)
    return _judge_info(answer, manifest, place) or _judge_table(answer.table, answer.version, place)


def _judge_info(answer: EntryAnswer, manifest: Manifest | None, place: str) -> Refusal | None:
    info = answer.info
    missing = [field.name for field in fields(PluginInfo) if info is None or info.get(field.name) is None]
    cure = "build the library and its manifest together again"
    if info is None or missing:
        fact = f"the library's info lacks {', '.join(missing)}"
        return Refusal(RefusalCode.INFO_MISMATCH, fact, place, cure)
    if manifest is None:
        return None
    built = manifest.built_with
    expected: dict[str, object] = {
        "name": manifest.name,
        "platform": manifest.platform,
        "version": manifest.version,
        "compiler": built.compiler,
        "glibc": built.glibc,
        "cxx11_abi": -1 if built.cxx11_abi is None else int(built.cxx11_abi),
        "python_abi": int(built.python.abi is PythonAbi.STABLE),
    }
    if built.git_revision is not None:
        expected["git_revision"] = built.git_revision
    differences = [
        f"{name} {info[name]!r} where the manifest says {value!r}"
        for name, value in expected.items()
        if info[name] != value
    ]
    if not differences:
        return None
    return Refusal(RefusalCode.INFO_MISMATCH, f"the library reports {'; '.join(differences)}", place, cure)


def _text(ffi: cabi.Ffi, pointer: Any) -> str | None:
    if pointer == ffi.NULL:
        return None
    text = ffi.string(pointer, MAX_TEXT)
    assert isinstance(text, bytes)
    return text.decode("utf-8", "replace")


def _read_info(ffi: cabi.Ffi, info: Any) -> dict[str, Any] | None:
    """The fields of a FlagosPluginInfo that its struct_size covers."""
    if info == ffi.NULL:
        return None
    layout = dict(ffi.typeof("FlagosPluginInfo").fields)
    values: dict[str, Any] = {}
    for field in fields(PluginInfo):
        if layout[field.name].offset + ffi.sizeof(layout[field.name].type) <= info.struct_size:
            value = getattr(info, field.name)
            values[field.name] = value if isinstance(value, int) else _text(ffi, value)
    return values


def call_entry(ffi: cabi.Ffi, entry: Any, host: AbiRange, log: Any, log_level: int) -> tuple[EntryAnswer, Any]:
    """Call an entry in this process; its answer and the FlagosApi pointer that came with it."""
    name = ffi.new("char[]", HOST_NAME.encode())
    args: Any = ffi.new("FlagosEntryArgs*")
    args.struct_size = ffi.sizeof("FlagosEntryArgs")
    args.host_version_min, args.host_version_max = host.min.number, host.max.number
    args.host_name, args.log, args.log_level = name, log, log_level
    status = entry(args)
    answer = EntryAnswer(
        status=status,
        version=AbiVersion.from_number(args.version),
        plugin_range=AbiRange(
            AbiVersion.from_number(args.plugin_version_min), AbiVersion.from_number(args.plugin_version_max)
        ),
        table=_read_table(ffi, args.api) if status == ENTRY_OK and args.api != ffi.NULL else None,
        info=_read_info(ffi, args.info),
        message=_text(ffi, args.message) or "",
    )
    return answer, args.api


def slots(ffi: cabi.Ffi) -> dict[str, int]:
    """The function slots of the table as this host's header has them: name to offset."""
    fields: list[tuple[str, Any]] = ffi.typeof("FlagosApi").fields
    return {name: field.offset for name, field in fields if field.type.kind == "function"}


def _read_table(ffi: cabi.Ffi, api: Any) -> TableFacts:
    """Look at a function table; nothing beyond its own struct_size is read."""
    pointer, size = ffi.sizeof("void*"), api.struct_size
    empty = (name for name, at in slots(ffi).items() if at + pointer <= size and getattr(api, name) == ffi.NULL)
    number = api.version if ffi.offsetof("FlagosApi", "reserved") <= size else 0
    return TableFacts(size, AbiVersion.from_number(number), tuple(empty))


def _judge_table(table: TableFacts, version: AbiVersion, place: str) -> Refusal | None:
    """Whether a function table is what its version promises."""

    def refuse(fact: str) -> Refusal:
        cure = "report the defect to the backend's vendor, or remove its manifest"
        return Refusal(RefusalCode.TABLE_INVALID, fact, place, cure)

    ffi = cabi.ffi()
    last = LAST_SLOT[max(minor for minor in LAST_SLOT if minor <= version.minor)]
    if table.size < slots(ffi)[last] + ffi.sizeof("void*"):
        return refuse(f"its table of ABI {version} ends after {table.size} bytes, before the slot {last}")
    if table.version != version:
        return refuse(f"its table is of ABI {table.version}, the entry chose {version}")
    return refuse(f"its table has no function in {', '.join(table.empty)}") if table.empty else None
