"""The table itself: its version, its slots, its one symbol, and what every call checks first."""

from __future__ import annotations

import subprocess

import pytest

from cpu.pjrt.harness import Client
from support import pjrt
from support.pjrt import Pjrt, PjrtError, ffi


def test_version_and_size(api: Pjrt) -> None:
    version = api.api.pjrt_api_version
    assert (version.major_version, version.minor_version) == (pjrt.generate.MAJOR, pjrt.generate.MINOR)
    assert api.api.struct_size == pjrt.abi.structs["PJRT_Api"].unpadded_size


def test_every_slot_is_filled(api: Pjrt) -> None:
    empty = [f.name for f in pjrt.abi.api_functions() if getattr(api.api, f.name) == ffi().NULL]
    assert empty == []


def test_slots_are_different_functions(api: Pjrt) -> None:
    """A slot filled with its neighbour's function would pass the test above."""
    addresses = {int(ffi().cast("intptr_t", getattr(api.api, f.name))) for f in pjrt.abi.api_functions()}
    assert len(addresses) == len(pjrt.abi.api_functions())


def test_exported_symbols() -> None:
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", str(pjrt.library_path())], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert sorted(line.split()[-1] for line in lines) == ["FlagosPjrtLend", "GetPjrtApi"]


def test_links_neither_python_nor_the_backend() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(pjrt.library_path())], check=True, capture_output=True, text=True)
    needed = [line for line in dynamic.stdout.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "python" in line or "flagos" in line]


@pytest.mark.parametrize("function", pjrt.abi.api_functions(), ids=lambda f: f.name)
def test_arguments_are_checked(api: Pjrt, function: pjrt.generate.Function) -> None:
    """NULL arguments, a struct_size from before PJRT 0.104 and a NULL object give an error, never a crash."""
    call = getattr(api.api, function.name)
    if function.result == "void":
        call(ffi().NULL)
        return
    with pytest.raises(PjrtError, match="the arguments are NULL") as null:
        api.call_with(function.name, ffi().NULL)
    assert null.value.code == "INVALID_ARGUMENT"
    args = api.new(function.arguments)
    args.struct_size = pjrt.abi.structs[function.arguments].minimum_size - 1
    with pytest.raises(PjrtError, match=f"{function.name}: struct_size is {args.struct_size}") as short:
        api.call_with(function.name, args)
    assert short.value.code == "INVALID_ARGUMENT"
    if function.handle:
        with pytest.raises(PjrtError, match=f"{function.name}: the object that it is called on is NULL"):
            api.call(function.name)


def test_fields_of_younger_versions_are_not_written_for_an_older_caller(api: Pjrt, client: Client) -> None:
    args = api.new("PJRT_Device_MemoryStats_Args", device=client.devices[0], peak_allocated_bytes_is_set=True)
    args.struct_size = pjrt.abi.structs["PJRT_Device_MemoryStats_Args"].minimum_size
    api.call_with("PJRT_Device_MemoryStats", args)
    assert args.peak_allocated_bytes_is_set  # not ours to touch
    args.struct_size = pjrt.abi.structs["PJRT_Device_MemoryStats_Args"].unpadded_size
    api.call_with("PJRT_Device_MemoryStats", args)
    assert not args.peak_allocated_bytes_is_set


def test_a_younger_caller_is_served(api: Pjrt, client: Client) -> None:
    args = api.new("PJRT_Client_PlatformName_Args", client=client.pointer)
    args.struct_size = pjrt.abi.structs["PJRT_Client_PlatformName_Args"].unpadded_size + 64
    api.call_with("PJRT_Client_PlatformName", args)
    assert pjrt.text(args.platform_name, args.platform_name_size) == "flagos"


def test_destroying_nothing_is_fine(api: Pjrt) -> None:
    for function in pjrt.abi.api_functions():
        if (
            function.name.endswith("_Destroy")
            and function.result != "void"
            and "CopyToDeviceStream" not in function.name
        ):
            api.call(function.name)


def test_plugin_attributes(api: Pjrt) -> None:
    args = api.call("PJRT_Plugin_Attributes")
    values = ffi().unpack(args.attributes, args.num_attributes)
    names = [pjrt.text(value.name, value.name_size) for value in values]
    assert len(set(names)) == len(names)
    assert {"xla_version", "stablehlo_current_version", "stablehlo_minimum_version"} <= set(names)
    for value, name in zip(values, names, strict=True):
        if name.startswith("stablehlo"):
            assert value.value_size == 3


def test_what_the_device_cannot_do_says_so(api: Pjrt, client: Client) -> None:
    stream = ffi().cast("PJRT_CopyToDeviceStream*", 1)
    for name in ("Destroy", "AddChunk", "TotalBytes", "GranuleSize", "CurrentBytes"):
        with pytest.raises(PjrtError, match=f"PJRT_CopyToDeviceStream_{name}: ") as refusal:
            api.call(f"PJRT_CopyToDeviceStream_{name}", stream=stream)
        assert refusal.value.code == "UNIMPLEMENTED"
    with pytest.raises(PjrtError, match="PJRT_Device_PoisonExecution: launch 7 ") as refusal:
        api.call("PJRT_Device_PoisonExecution", device=client.devices[0], launch_id=7, error_code=13)
    assert refusal.value.code == "UNIMPLEMENTED"
