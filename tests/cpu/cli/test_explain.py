"""`flagos explain` and `flagos_backend.explain`, on the host CPU."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flagos_backend
import flagos_backend.frontends.jax
from flagos_backend.cli.main import main
from flagos_backend.frontends.torch import autoload
from flagos_backend.loop_ir.parser import parse_nests
from flagos_backend.loop_ir.printer import print_nest
from programs import hlo_bytes

flagos_backend.frontends.jax.initialize()


def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) / jnp.sqrt((x * x).sum())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "norm.hlo"
    path.write_bytes(hlo_bytes(norm, np.ones((16, 32), np.float32), np.ones((32, 8), np.float32)))
    return path


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_half_a_page_comes_first(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "explain", str(program))
    assert len(out.splitlines()) < 25
    for part in ("on the host CPU: 2 arguments, 1 output", "1 product (BLAS)", "at least", "fell back nothing"):
        assert part in out
    assert "measured" not in out


def test_details_come_on_demand(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "explain", str(program), "--kernels", "--memory", "--matches", "--measure", "--rounds", "2")
    assert "measured  " in out and "median of 2 launches" in out
    assert "native product" in out and "from step" in out and "nothing was matched" in out
    assert Path(__file__).name in out  # the line of the user's program


def test_nests_are_text_that_parses(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "explain", str(program), "--nests")
    steps = json.loads(output_of(capsys, "explain", str(program), "--json"))["steps"]
    nests = parse_nests(out[out.index("// step") :])
    assert [print_nest(nest) for nest in nests] == [step["nest"] for step in steps if step["nest"]]
    assert nests and Path(__file__).name in out


def test_json_stands_alone(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = json.loads(output_of(capsys, "explain", str(program), "--json"))
    assert [step["provider"] for step in explanation["steps"]].count("blas") == 1


def test_no_rounds_are_refused_in_one_line(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(program), "--rounds", "0"]) == 1
    assert "at least one round" in capsys.readouterr().err


def test_a_function_of_jax_is_explained_as_its_executable_is() -> None:
    device = jax.devices("flagos")[0]
    x, w = jax.device_put((jnp.ones((16, 32)), jnp.ones((32, 8))), device)
    function = jax.jit(norm)
    (explained,) = flagos_backend.explain(function, x, w, measured=True)
    explanation = explained.explanation
    assert explanation is not None and explained.measured is not None and explained.measured.seconds > 0
    compiled = function.lower(x, w).compile()
    costs, sizes = compiled.cost_analysis(), compiled.memory_analysis()
    assert (explanation.flops, explanation.bytes_accessed) == (costs["flops"], costs["bytes accessed"])
    assert explanation.temporary_bytes == sizes.temp_size_in_bytes
    assert explanation.argument_bytes == sizes.argument_size_in_bytes
    assert explanation.output_bytes == sizes.output_size_in_bytes
    assert str(explained).startswith("jit_norm on the host CPU")


def test_a_function_of_pytorch_is_explained_by_the_programs_it_became() -> None:
    assert not autoload.enable()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ x).sum()

    report = flagos_backend.explain(torch.compile(function, backend="flagos"), torch.ones(16, 16))
    (explained,) = report
    assert "(BLAS)" in explained.kernels()
    assert "nodes lowered" in str(report)
    assert json.loads(report.to_json())[0]["argument_bytes"] == 4 * 16 * 16


def test_what_is_no_compiled_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"jax.jit\(f\) or torch.compile"):
        flagos_backend.explain(norm, 1.0, 2.0)
    with pytest.raises(ValueError, match="nothing was compiled for flagos"):
        flagos_backend.explain(torch.compile(lambda x: x + 1, backend="eager"), torch.ones(2))
