"""The declarations made from plugin_abi/pjrt/abi: they lie in memory where the facts say, in C++ and in cffi."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support import pjrt

# Offsets of PJRT_Api 0.114 that an adapter in the field relies on, written down independently of the tables.
GOLDEN_SLOTS = {
    "pjrt_api_version": 16,
    "PJRT_Error_Destroy": 40,
    "PJRT_Plugin_Initialize": 64,
    "PJRT_Event_OnReady": 112,
    "PJRT_Client_Create": 120,
    "PJRT_Client_Compile": 200,
    "PJRT_Client_BufferFromHostBuffer": 216,
    "PJRT_LoadedExecutable_Execute": 480,
    "PJRT_Buffer_ToHostBuffer": 600,
    "PJRT_Client_DmaMap": 920,
    "PJRT_Client_TopologyDescription": 800,
    "PJRT_Event_Set": 1056,
    "PJRT_Error_ForEachPayload": 1096,
    "PJRT_TopologyDescription_GetMemorySpaceKindIds": 1136,
}


def test_cffi_lays_structs_out_as_the_tables_say() -> None:
    ffi = pjrt.ffi()
    for struct in pjrt.abi.structs.values():
        fields = dict(ffi.typeof(struct.name).fields)
        unions = {k: v for name, field in fields.items() if not name for k, v in field.type.fields}
        assert ffi.sizeof(struct.name) == struct.size, struct.name
        for field in struct.fields:
            assert ffi.offsetof(struct.name, field.name) == field.offset, f"{struct.name}.{field.name}"
            assert ffi.sizeof((fields | unions)[field.name].type) == field.size, f"{struct.name}.{field.name}"


def test_a_cxx_compiler_agrees(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    (tmp_path / "pjrt_abi.h").write_text(pjrt.generate.header(pjrt.abi))
    (tmp_path / "test.cc").write_text('#include "pjrt_abi.h"\n')
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(tmp_path / "test.cc")]
    subprocess.run(command, check=True)


def test_a_wrong_fact_stops_the_compiler(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    header = pjrt.generate.header(pjrt.abi)
    assert "offsetof(PJRT_Program, code_size) == 24" in header
    (tmp_path / "test.cc").write_text(
        header.replace("offsetof(PJRT_Program, code_size) == 24", "offsetof(PJRT_Program, code_size) == 32")
    )
    command = [compiler, "-std=c++17", "-fsyntax-only", str(tmp_path / "test.cc")]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode != 0
    assert "PJRT_Program.code_size" in outcome.stderr


def test_golden_slots() -> None:
    api = pjrt.abi.structs["PJRT_Api"]
    offsets = {field.name: field.offset for field in api.fields}
    assert {name: offsets[name] for name in GOLDEN_SLOTS} == GOLDEN_SLOTS
    assert api.size == 1144
    assert len(pjrt.abi.api_functions()) == 138


def test_callers_of_jaxlib_0_10_0_are_long_enough() -> None:
    """A field that is younger than PJRT 0.104 is not demanded of a caller."""
    structs = pjrt.abi.structs
    younger = {name for name, struct in structs.items() if struct.minimum_size < struct.unpadded_size}
    assert younger == {
        "PJRT_Device_MemoryStats_Args",
        "PJRT_ExecuteOptions",
        "PJRT_Executable_DeserializeAndLoad_Args",
    }
    assert structs["PJRT_ExecuteOptions"].minimum_size == 120
    assert structs["PJRT_Event_IsReady_Args"].minimum_size == 25


def test_tables_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pjrt.generate._rows
    monkeypatch.setattr(pjrt.generate, "_rows", lambda name: rows(name)[1:] if name == "functions.csv" else rows(name))
    with pytest.raises(ValueError, match="list different slots"):
        pjrt.generate.load()
