"""vLLM's interface, against a stand-in: when flagos takes part, what it changes of the platform, and what it keeps.

Graphs are compiled for real; eager is the oracle."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from flagos_backend.frontends.torch.compile.errors import UnknownOption
from flagos_backend.frontends.torch.compile.report import clear, reports
from flagos_backend.frontends.vllm import registration, saved
from flagos_backend.frontends.vllm.platform import COMPILER, CompilesWithFlagos, NoInductorPasses

ROOT = Path(__file__).parents[3]
ONE_SIZE = SimpleNamespace(is_single_size=lambda: True)


class Platform:
    """As vLLM's CPU: it has no mode 3."""

    @classmethod
    def get_compile_backend(cls) -> str:
        return "inductor"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        pass

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        config = vllm_config.compilation_config
        if config.mode == 3:
            config.mode, config.backend = 2, "inductor"
        if vllm_config.lora:
            config.mode = 0


def configuration(mode: int | None, backend: str = "inductor", *, lora: bool = False) -> Any:
    config = SimpleNamespace(
        mode=mode,
        backend=backend,
        custom_ops=[],
        ir_enable_torch_wrap=None,
        compile_sizes=None,
        use_inductor_graph_partition=True,
        pass_config=None,
    )
    return SimpleNamespace(compilation_config=config, lora=lora, additional_config={})


@pytest.fixture
def compiler_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("vllm", "vllm.envs", "vllm.compilation", "vllm.compilation.compiler_interface")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].envs = modules["vllm.envs"]  # type: ignore[attr-defined]
    modules["vllm.envs"].VLLM_USE_MEGA_AOT_ARTIFACT = False  # type: ignore[attr-defined]
    modules[names[-1]].CompilerInterface = type("CompilerInterface", (), {})  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    here = "flagos_backend.frontends.vllm.compiler"
    sys.modules.pop(here, None)
    yield importlib.import_module(here).FlagosCompiler
    sys.modules.pop(here, None)


def piece(*, single: bool) -> tuple[GraphModule, torch.Tensor]:
    graph = Graph()
    x = graph.placeholder("x")
    value = graph.call_function(torch.nn.functional.silu, (x,))
    graph.output(value if single else (value, graph.call_function(torch.mul, (x, 2.0))))
    return GraphModule({}, graph), torch.randn(3, 4)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the front end wrote: PyTorch writes its traces too."""
    return [record for record in caplog.records if record.name == "flagos.vllm"]


def test_the_entry_point_is_declared_and_imports_no_vllm() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"flagos": "flagos_backend.frontends.vllm:register"}
    code = (
        "import sys; from flagos_backend.frontends.vllm import register; register();"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"VLLM_PLUGINS": "fl,flagos"}, True),
        ({"VLLM_PLUGINS": "fl"}, False),
        ({"VLLM_FL_COMPILE": "1"}, True),
        ({"VLLM_FL_COMPILE": "0", "VLLM_PLUGINS": "flagos"}, False),
    ],
)
def test_it_takes_part_only_where_it_is_asked(variables: dict[str, str], wanted: bool) -> None:
    assert registration.is_wanted(variables) is wanted


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"VLLM_FL_COMPILE is 'maybe'.*1 or 0"):
        registration.is_wanted({"VLLM_FL_COMPILE": "maybe"})


@pytest.mark.parametrize(
    ("mode", "backend", "expected"),
    [
        (1, "inductor", (1, "flagos")),
        (2, "", (2, "flagos")),
        (3, "inductor", (3, COMPILER)),
        (3, "eager", (2, "inductor")),
        (0, "inductor", (0, "inductor")),
    ],
)
def test_the_platform_keeps_all_but_the_compiler(mode: int, backend: str, expected: tuple[int, str]) -> None:
    platform, vllm_config = Platform(), configuration(mode, backend)
    registration.mix_in(platform)
    assert isinstance(platform, Platform)
    assert platform.get_compile_backend() == COMPILER
    platform.apply_config_platform_defaults(vllm_config)
    platform.check_and_update_config(vllm_config)
    config = vllm_config.compilation_config
    assert (config.mode, config.backend) == expected
    ours = expected[1] != "inductor"
    assert config.custom_ops == (["none"] if ours else [])
    assert config.compile_sizes == ([] if expected == (3, COMPILER) else None)


def test_what_the_platform_switches_off_stays_off() -> None:
    platform, vllm_config = Platform(), configuration(3, lora=True)
    registration.mix_in(platform)
    platform.check_and_update_config(vllm_config)
    assert vllm_config.compilation_config.mode == 0


def test_a_second_time_and_a_platform_with_its_own_compiler_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    platform = Platform()
    registration.mix_in(platform)
    kind = type(platform)
    registration.mix_in(platform)
    assert type(platform) is kind
    other = type("Other", (Platform,), {"get_compile_backend": classmethod(lambda cls: "theirs.Compiler")})()
    with caplog.at_level(logging.WARNING):
        registration.mix_in(other)
    assert not isinstance(other, CompilesWithFlagos)
    assert "theirs.Compiler" in caplog.text


def test_a_pass_of_inductor_s_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    NoInductorPasses().add("FuseNorm")
    assert "FuseNorm" in caplog.text


def test_the_hash_knows_versions_and_options(compiler_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed(**options: Any) -> str:
        result: str = compiler_class().compute_hash(SimpleNamespace(additional_config={"flagos": options}))
        return result

    first = hashed()
    assert first == hashed()
    assert first != hashed(fallback="error")
    monkeypatch.setenv("FLAGOS_DEVICE", "simulated")
    assert first != hashed()
    monkeypatch.delenv("FLAGOS_DEVICE")
    monkeypatch.setattr(saved, "__version__", "0.0.9")
    assert first != hashed()
    with pytest.raises(UnknownOption, match="wrong"):
        hashed(wrong=1)


@pytest.mark.parametrize("single", [True, False])
def test_a_piece_is_compiled_kept_and_loaded(compiler_class: Any, tmp_path: Path, single: bool) -> None:
    compiler = compiler_class()
    compiler.initialize_cache(str(tmp_path))
    graph, x = piece(single=single)
    clear()
    run, handle = compiler.compile(graph, [x], {}, ONE_SIZE, "piece")
    assert handle == ("piece", str(tmp_path / "piece"))
    loaded = compiler.load(handle, graph, [x], 0, ONE_SIZE)
    for call in (run, loaded):
        fresh = torch.randn(3, 4)
        torch.testing.assert_close(call(fresh), graph(fresh))
    assert reports()
    assert not any(report.fallback for report in reports())


@pytest.mark.parametrize("fault", ["truncated", "tampered", "another version", "no file", "foreign"])
def test_a_wrong_file_is_compiled_again_with_one_line(
    compiler_class: Any, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_class()
    compiler.initialize_cache(str(tmp_path))
    graph, x = piece(single=True)
    _, handle = compiler.compile(graph, [x], {}, ONE_SIZE, "piece")
    path, content = tmp_path / "piece", (tmp_path / "piece").read_bytes()
    if fault == "truncated":
        path.write_bytes(content[:-20])
    elif fault == "tampered":
        path.write_bytes(content[:-20] + bytes(20))
    elif fault == "foreign":
        path.write_bytes(b"\x80\x04.")
    elif fault == "no file":
        path.unlink()
    else:
        monkeypatch.setattr(saved, "__version__", "0.0.9")
    with caplog.at_level(logging.WARNING, logger="flagos.vllm"):
        run = compiler.load(handle, graph, [x], 0, ONE_SIZE)
    assert len(ours(caplog)) == 1
    assert "compiled again" in caplog.text
    fresh = torch.randn(3, 4)
    torch.testing.assert_close(run(fresh), graph(fresh))
    caplog.clear()
    compiler.load(handle, graph, [x], 0, ONE_SIZE)
    assert not ours(caplog)
