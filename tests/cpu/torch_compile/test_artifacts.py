"""Compiled graphs that PyTorch saves, and that another process loads. Eager is the oracle."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from flagos_backend.frontends.torch.compile import artifact
from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.frontends.torch.compile.errors import ArtifactRefused
from support.torch_compile import assert_same

SAVES = hasattr(torch.compiler, "load_compiled_function")
needs_saving = pytest.mark.skipif(not SAVES, reason="this PyTorch has no torch.compiler.load_compiled_function")


@torch.library.custom_op("flagos_artifacts::put", mutates_args=("cache",))
def put(row: Tensor, cache: Tensor, at: int) -> None:
    cache[at].copy_(row)


def decode(x: Tensor, cache: Tensor) -> Tensor:
    put(x * 2, cache, 1)
    return torch.nn.functional.gelu(x) + cache[1] + torch.tensor([1.0, 2.0, 3.0, 4.0])


def rows(x: Tensor) -> Tensor:
    return x.softmax(-1).sum(0) * x.shape[0]


def loss(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w).square().sum()


def check(call: object, name: str) -> None:
    """On fresh inputs."""
    assert callable(call)
    if name == "decode":
        x, cache = torch.randn(4), torch.zeros(2, 4)
        ours = cache.clone()
        with torch.no_grad():
            assert_same(call(x, ours), decode(x, cache))
        assert_same(ours, cache)
    elif name == "rows":
        for count in (5, 2, 8):
            x = torch.randn(count, 6)
            with torch.no_grad():
                assert_same(call(x), rows(x))
    else:
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        ours, eager = (torch.autograd.grad(f(x, w), (x, w)) for f in (call, loss))
        torch.testing.assert_close(ours, eager)


EXAMPLES = {
    "decode": (decode, (torch.ones(4), torch.zeros(2, 4)), False),
    "rows": (rows, (torch.ones(5, 6),), True),
    "loss": (loss, (torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)), False),
}


def saved(name: str, folder: Path) -> Path:
    function, inputs, dynamic = EXAMPLES[name]
    with torch.set_grad_enabled(name == "loss"):
        compiled = torch.compile(function, backend=flagos, fullgraph=True, dynamic=dynamic).aot_compile((inputs, {}))
        check(compiled, name)
        compiled.save_compiled_function(str(folder / name))
    return folder / name


def started(*arguments: str, **environment: str) -> str:
    """What this file prints as a program, in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=600
    )
    assert not run.returncode, run.stderr[-4000:]
    return run.stdout


@needs_saving
def test_another_process_loads_what_was_compiled_ahead_of_time(tmp_path: Path) -> None:
    # Where the device flagos is open, Dynamo's code asks for PyTorch's accelerator, which the other process has not.
    started("save", str(tmp_path))
    assert started("load", str(tmp_path)).split() == list(EXAMPLES)


@needs_saving
def test_another_version_s_artifact_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("rows", tmp_path)
    monkeypatch.setattr(artifact, "__version__", "0.0.9")
    with pytest.raises(ArtifactRefused, match=r"made by flagos .* and torch .*flagos 0\.0\.9.*FLAGOS-658"):
        torch.compiler.load_compiled_function(io.BytesIO(path.read_bytes()))


@needs_saving
def test_other_bytes_than_were_saved_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare = artifact.FlagosOutputCode.prepare_for_serialization

    def damaged(self: artifact.FlagosOutputCode) -> None:
        prepare(self)
        self.saved = self.saved[:-1]

    monkeypatch.setattr(artifact.FlagosOutputCode, "prepare_for_serialization", damaged)
    path = saved("rows", tmp_path)
    with pytest.raises(ArtifactRefused, match=r"other bytes than were saved.*FLAGOS-658"):
        torch.compiler.load_compiled_function(io.BytesIO(path.read_bytes()))


@needs_saving
def test_a_cache_of_pytorch_s_hits_in_another_process_and_knows_the_options(tmp_path: Path) -> None:
    def run(folder: str, *arguments: str) -> str:
        return started("cache", *arguments, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / folder))

    artifacts = str(tmp_path / "artifacts")
    assert run("a", "allow", "save", artifacts).split() == ["missed"]
    assert run("a", "allow", "other").split() == ["hit", "missed"]
    assert run("b", "allow", "load", artifacts).split() == ["hit"]


def _load(folder: Path) -> None:
    for name in EXAMPLES:
        check(torch.compiler.load_compiled_function(io.BytesIO((folder / name).read_bytes())), name)
        print(name)


def _cache(fallback: str, what: str = "", path: str = "") -> None:
    if what == "load":
        assert torch.compiler.load_cache_artifacts(Path(path).read_bytes()) is not None
    for asked in (fallback, "error") if what == "other" else (fallback,):
        counters.clear()
        torch._dynamo.reset()
        with torch._functorch.config.patch(bundled_autograd_cache=True, force_autograd_cache=True):
            check(torch.compile(loss, backend=flagos, options={"fallback": asked}), "loss")
        print("hit" if counters["aot_autograd"]["autograd_cache_hit"] else "missed")
    if what == "save":
        saved_artifacts = torch.compiler.save_cache_artifacts()
        assert saved_artifacts is not None
        Path(path).write_bytes(saved_artifacts[0])


if __name__ == "__main__":
    if sys.argv[1] == "save":
        for example in EXAMPLES:
            saved(example, Path(sys.argv[2]))
    elif sys.argv[1] == "load":
        _load(Path(sys.argv[2]))
    else:
        _cache(*sys.argv[2:])
