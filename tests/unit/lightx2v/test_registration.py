"""LightX2V's registry gets the keys once, lazily, and only where no other plugin has them."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagos_backend.frontends.lightx2v import hooks, registration
from flagos_backend.frontends.lightx2v.device import FlagosDevice
from support.lightx2v import Registry, StandIn

KEYS = {key for table in registration.TABLES for key in table.entries} | {"flagos", "fl"}


@pytest.fixture
def lightx2v(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    finders = list(sys.meta_path)
    stand_in = StandIn(monkeypatch)
    stand_in.forget_operators()
    monkeypatch.setattr(registration, "_is_installed", lambda name: False)
    yield stand_in
    stand_in.forget_operators()
    sys.meta_path[:] = finders


def test_every_key_is_registered(lightx2v: StandIn) -> None:
    registration.register()
    assert lightx2v.keys() == KEYS
    assert lightx2v.platform.PLATFORM_DEVICE_REGISTER["fl"] is FlagosDevice


def test_a_second_time_changes_nothing(lightx2v: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    registration.register()
    before = dict(lightx2v.platform.PLATFORM_MM_WEIGHT_REGISTER)
    with caplog.at_level(logging.WARNING):
        registration.register()
    assert before == lightx2v.platform.PLATFORM_MM_WEIGHT_REGISTER
    assert not caplog.records


def test_a_plugin_with_the_same_keys_is_in_force(lightx2v: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    other = type("OtherDevice", (), {"__module__": "lightx2v_fl.device"})
    lightx2v.platform.PLATFORM_DEVICE_REGISTER.register(other, key="flagos")
    registration.register()
    assert lightx2v.keys() == {"flagos"}
    assert lightx2v.platform.PLATFORM_DEVICE_REGISTER["flagos"] is other
    assert "lightx2v_fl.device" in caplog.text


def test_an_installed_plugin_goes_first(
    lightx2v: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_is_installed", lambda name: name == "lightx2v-plugin-fl")
    registration.register()
    assert lightx2v.keys() == set()
    assert "uninstall" in caplog.text


def test_tables_that_were_copied_already_get_the_keys_too(lightx2v: StandIn) -> None:
    final = {table.final: Registry() for table in registration.TABLES}
    lightx2v.module("lightx2v.utils.registry_factory", **final)
    registration.register()
    assert set(final["MM_WEIGHT_REGISTER"]) == {"flagos", "flagos-fp8", "flagos-int8"}


def test_another_registry_is_refused_whole(lightx2v: StandIn) -> None:
    del lightx2v.platform.PLATFORM_ROPE_REGISTER
    with pytest.raises(RuntimeError, match=r"no table PLATFORM_ROPE_REGISTER.*take a LightX2V"):
        registration.register()
    lightx2v.platform.PLATFORM_ROPE_REGISTER = Registry()
    assert lightx2v.keys() == set()


def test_classes_are_imported_at_first_use(lightx2v: StandIn) -> None:
    registration.register()
    make = lightx2v.platform.PLATFORM_ATTN_WEIGHT_REGISTER["flagos_flash_attn"]
    assert "flagos_backend.frontends.lightx2v.attention" not in sys.modules
    lightx2v.module("lightx2v.common.ops.attn.template", AttnWeightTemplate=object)
    assert type(make()).__name__ == "FlashAttention"


def test_a_lightx2v_of_another_line_is_named_at_first_use(lightx2v: StandIn) -> None:
    registration.register()
    lightx2v.module("lightx2v.common.ops.attn.template")
    with pytest.raises(RuntimeError, match=r"flagos_flash_attn: .*AttnWeightTemplate.*or another key"):
        lightx2v.platform.PLATFORM_ATTN_WEIGHT_REGISTER["flagos_flash_attn"]()


def test_blocks_compile_with_flagos_on_this_platform_only(lightx2v: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def __init__(self) -> None:
            self.compiled_blocks: dict[Any, Any] = {}

        def get_compiled_block(self, block_idx: int, block: object) -> str:
            return "stock"

        def get_compile_block_key(self, block_idx: int, block: object) -> int:
            return block_idx

        def infer_block(self, block: Any, x: int) -> int:
            return block.number + x

    name = "lightx2v.common.transformer_infer.transformer_infer"
    hooks.compile_blocks(lightx2v.module(name, BaseTransformerInfer=Base))
    chosen = lightx2v.module("lightx2v_platform.base.global_var", PLATFORM="cuda")
    compiled: list[Any] = []
    monkeypatch.setattr(hooks, "compiled", lambda function: compiled.append(function) or function)
    infer, block = Base(), SimpleNamespace(number=3)
    assert infer.get_compiled_block(0, block) == "stock"
    chosen.PLATFORM = "flagos"
    assert infer.get_compiled_block(0, block)(4) == 7
    assert infer.get_compiled_block(0, block) is infer.get_compiled_block(0, block)
    assert len(compiled) == 1
    assert infer.get_compiled_block(0, SimpleNamespace(number=4))(4) == 8
    monkeypatch.setenv("LIGHTX2V_FL_COMPILE", "0")
    assert infer.get_compiled_block(0, block) == "stock"


def test_models_accept_our_schemes(lightx2v: StandIn) -> None:
    class Model:
        def __init__(self, scheme: str) -> None:
            self.config = {"dit_quant_scheme": scheme}

        def _check_dit_quantized(self) -> None:
            raise AssertionError("not in the list")

    hooks.accept_schemes(lightx2v.module("lightx2v.models.networks.base_model", Model=Model))
    Model("flagos-fp8")._check_dit_quantized()
    with pytest.raises(AssertionError):
        Model("flagos-int4")._check_dit_quantized()


def test_importing_never_fails() -> None:
    """Without LightX2V, and with a variable that says nothing; and it loads no torch."""
    program = "import sys, flagos_backend.frontends.lightx2v; assert 'torch' not in sys.modules"
    for value in ("1", "0", "perhaps"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"LIGHTX2V_FL_AUTO_REGISTER": value, "PYTHONPATH": ":".join(sys.path), "FLAGOS_TORCH_DEVICE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("LIGHTX2V_FL_AUTO_REGISTER is 'perhaps'" in done.stderr) is (value == "perhaps")


def test_the_entry_point_is_register() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["lightx2v.platform_plugins"].values()
    module, _, name = value.partition(":")
    assert getattr(importlib.import_module(module), name) is registration.register


def test_configurations_name_keys_that_there_are() -> None:
    paths = sorted((Path(registration.__file__).parent / "configs").glob("*.json"))
    assert len(paths) == 3
    for path in paths:
        named = {v for k, v in json.loads(path.read_text()).items() if k.endswith("_type") and k != "modulate_type"}
        assert named | {json.loads(path.read_text())["dit_quant_scheme"]} <= KEYS
