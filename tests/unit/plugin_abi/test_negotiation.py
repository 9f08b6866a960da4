"""Version negotiation both ways, with plugins compiled against an older and a newer header than the host's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cffi
import pytest

from plugin_abi import cabi, loader
from plugin_abi.errors import FlagosStatusError, RefusalCode, StatusCode
from plugin_abi.host import Api
from plugin_abi.loader import Backend
from plugin_abi.negotiation import EntryAnswer, call_entry, judge
from plugin_abi.versions import AbiRange, AbiVersion
from unit.plugin_abi.plugins import Plugins, Toolchain

V1_0, V1_1, V1_4 = AbiVersion(1, 0), AbiVersion(1, 1), AbiVersion(1, 4)
HEADER = cabi.HEADER.read_text("utf-8")
#: The header of a later minor version: one function more at the end of the table.
NEWER_HEADER = HEADER.replace(
    "  FlagosError* (*profiler_stop)(FlagosProfilerStopArgs* args);\n",
    "  FlagosError* (*profiler_stop)(FlagosProfilerStopArgs* args);\n  FlagosError* (*appended)(void* args);\n",
)


def _negotiate(header: str, library: Path, host: AbiRange) -> tuple[cffi.FFI, EntryAnswer, Any]:
    ffi = cabi.ffi_from_header(header)
    handle: Any = ffi.dlopen(str(library), os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_NODELETE)
    return ffi, *call_entry(ffi, handle.flagos_plugin_entry, host, ffi.NULL, 0)


def _api(ffi: cffi.FFI, answer: EntryAnswer, table: Any, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(cabi, "ffi", lambda: ffi)
    address = int(ffi.cast("uintptr_t", table))
    return Api(Backend(None, answer.plugin_info, answer.version, address, 0, "a test", table))


def test_an_older_host_uses_a_newer_plugin_at_its_own_version(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = toolchain.build(flags=("-DMINIMAL_NEWER_TABLE",), max_minor=1)
    ffi, answer, table = _negotiate(HEADER, newer, AbiRange(V1_0, V1_0))
    assert judge(answer, None, AbiRange(V1_0, V1_0), "a test") is None
    assert answer.version == V1_0 and answer.plugin_range == AbiRange(V1_0, V1_1)
    # The table is longer than the host knows; what it knows, it can use.
    assert table.struct_size == ffi.sizeof("FlagosApi") + ffi.sizeof("void*")
    api = _api(ffi, answer, table, monkeypatch)
    assert api.has("profiler_stop") and not api.has("appended")


def test_a_newer_host_uses_an_older_plugin_and_touches_nothing_beyond_its_table(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the older table's end lies a function that must not be called: the host must not even read it."""
    host = AbiRange(V1_0, V1_4)
    ffi, answer, table = _negotiate(NEWER_HEADER, toolchain.build(), host)
    assert judge(answer, None, host, "a test") is None
    assert answer.version == V1_0
    assert table.struct_size == ffi.sizeof("FlagosApi") - ffi.sizeof("void*")
    assert table.appended != ffi.NULL
    api = _api(ffi, answer, table, monkeypatch)
    assert not api.has("appended")
    with pytest.raises(FlagosStatusError, match="appended is not in the table") as caught:
        api.call("appended", ffi.NULL)
    assert caught.value.code is StatusCode.UNIMPLEMENTED


def test_a_newer_host_and_a_newer_plugin_use_what_was_appended(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = toolchain.build(flags=("-DMINIMAL_NEWER_TABLE",), max_minor=1)
    host = AbiRange(V1_0, V1_4)
    ffi, answer, table = _negotiate(NEWER_HEADER, newer, host)
    assert judge(answer, None, host, "a test") is None
    assert answer.version == V1_1
    with pytest.raises(FlagosStatusError, match="the appended function was called"):
        _api(ffi, answer, table, monkeypatch).call("appended", ffi.NULL)


@pytest.mark.parametrize(
    ("host", "minors", "code"),
    [
        (AbiRange(V1_0, V1_0), (3, 4), RefusalCode.ABI_TOO_NEW),
        (AbiRange(V1_4, V1_4), (0, 0), RefusalCode.ABI_TOO_OLD),
        (AbiRange(AbiVersion(2, 0), AbiVersion(2, 3)), (0, 4), RefusalCode.ABI_TOO_OLD),
    ],
    ids=["plugin too new", "plugin too old", "host of another major"],
)
def test_ranges_that_do_not_meet_are_refused_with_the_plugins_own_range(
    host: AbiRange, minors: tuple[int, int], code: RefusalCode, toolchain: Toolchain
) -> None:
    library = toolchain.build(min_minor=minors[0], max_minor=minors[1])
    _, answer, _table = _negotiate(HEADER, library, host)
    refusal = judge(answer, None, host, "a test")
    assert refusal is not None and refusal.code is code
    assert str(answer.plugin_range) in refusal.fact and str(host) in refusal.fact
    assert "the versions do not meet" in refusal.cause


def test_an_entry_may_be_asked_again_with_another_range(toolchain: Toolchain) -> None:
    library = toolchain.build(max_minor=4)
    for host, version in ((AbiRange(V1_0, V1_4), V1_4), (AbiRange(V1_0, V1_0), V1_0), (AbiRange(V1_1, V1_1), V1_1)):
        _, answer, _ = _negotiate(HEADER, library, host)
        assert answer.version == version


BROKEN_TABLES = {
    "an empty slot": ("table.api.buffer_copy=NULL;", "no function in buffer_copy"),
    "too short": ("table.api.struct_size=64;", "ends after 64 bytes"),
    "no size": ("table.api.struct_size=0;", "ends after 0 bytes"),
    "another version": ("table.api.version=7;", "of ABI 0.7, the entry chose 1.0"),
}


@pytest.mark.parametrize(("change", "part"), BROKEN_TABLES.values(), ids=BROKEN_TABLES.keys())
def test_a_broken_table_is_refused_in_the_process_and_in_a_trial(change: str, part: str, plugins: Plugins) -> None:
    library = plugins.toolchain.build(flags=(f"-DBEFORE_RETURN={change}",))
    host = AbiRange(V1_0, V1_0)
    _, answer, _ = _negotiate(HEADER, library, host)
    manifest = plugins.add(library=library)
    for refusal in (judge(answer, None, host, "a test"), loader.check(manifest, environment=plugins.environment())):
        assert refusal is not None and refusal.code is RefusalCode.TABLE_INVALID
        assert part in refusal.fact


def test_an_entry_sees_a_host_that_gives_its_name_and_its_range(plugins: Plugins) -> None:
    check = (
        '-DBEFORE_NEGOTIATION=if(args->struct_size!=sizeof*args||strncmp(args->host_name,"flagos loader ",14)!=0||'
        "args->host_version_min!=args->host_version_max||args->api!=NULL)abort();"
    )
    library = plugins.toolchain.build(flags=(check,))
    _, answer, _ = _negotiate(HEADER, library, AbiRange(V1_0, V1_0))
    assert answer.status == 0
