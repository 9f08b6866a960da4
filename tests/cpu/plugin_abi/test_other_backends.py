"""JAX and PyTorch on a backend that is none of this project's: what it has works, what it has not is said."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from unit.plugin_abi.plugins import Plugins, Toolchain


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    (tmp_path / "libraries").mkdir()
    return Plugins(Toolchain(tmp_path / "libraries"), tmp_path)


def _run(program: str, manifest: Path) -> subprocess.CompletedProcess[str]:
    variables = {"FLAGOS_DRIVER_FILES": str(manifest), "XDG_CACHE_HOME": str(manifest.parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def _printed(program: str, manifest: Path) -> str:
    done = _run(program, manifest)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_jax_keeps_arrays_there_and_tells_what_it_does_not_compile(plugins: Plugins) -> None:
    program = """
        import flagos_backend.frontends.jax, jax, numpy
        flagos_backend.frontends.jax.initialize()
        device = jax.devices("flagos")[0]
        print(device.device_kind, numpy.asarray(jax.device_put(numpy.arange(3), device)).tolist())
        try:
            jax.jit(lambda x: x + 1, device=device)(41)
        except RuntimeError as error:
            print(error)
    """
    first, refusal = _printed(program, plugins.add()).splitlines()
    assert first == "minimal [0, 1, 2]"
    assert "scale" in refusal


def test_what_a_device_says_of_dlpack_is_what_jax_gives_and_takes(plugins: Plugins) -> None:
    program = """
        import flagos_backend.frontends.jax, jax, numpy, torch
        flagos_backend.frontends.jax.initialize()
        array = jax.device_put(numpy.arange(3), jax.devices("flagos")[0])
        try:
            tensor = torch.from_dlpack(array)
            array.delete()
            print(tensor.tolist(), jax.dlpack.from_dlpack(tensor, device=jax.devices("flagos")[0]).devices())
        except BufferError as error:
            print(error)
    """
    assert "not available" in _printed(program, plugins.add())
    # It gives its options as the attributes of its device.
    place = {"dlpack_device_type": 1, "dlpack_device_id": 0}
    assert _printed(program, plugins.add(options=place)) == "[0, 1, 2] {minimal:0}\n"


def test_pytorch_computes_in_its_memory_and_tells_what_it_does_not_compile(plugins: Plugins) -> None:
    program = """
        from flagos_backend.frontends.torch.autoload import enable
        import torch
        enable()
        x = torch.arange(3.0, device="flagos")
        print((x * 2).tolist(), torch.flagos.get_device_properties().kind)
        try:
            torch.compile(lambda x: x * 2, backend="flagos")(x)
        except Exception as error:
            print(str(error).splitlines()[1])
    """
    first, refusal = _printed(program, plugins.add()).splitlines()
    assert first == "[0.0, 2.0, 4.0] minimal"
    assert "scale" in refusal


def test_tensors_of_the_host_do_not_go_to_a_device_with_other_memory(plugins: Plugins) -> None:
    program = """
        import flagos_backend.frontends.torch, torch
        try:
            torch.compile(lambda x: x * 2, backend="flagos")(torch.ones(2))
        except Exception as error:
            print(str(error).splitlines()[1])
    """
    library = plugins.toolchain.build(is_host_memory=0)
    assert "minimal 0.1.0 has no device for tensors of the host" in _printed(program, plugins.add(library=library))


def test_a_backend_without_its_chip_is_no_device_and_says_why(plugins: Plugins) -> None:
    program = """
        import flagos_backend.frontends.jax, jax, torch
        from flagos_backend.frontends.torch.autoload import enable
        flagos_backend.frontends.jax.initialize()
        enable()
        print(jax.jit(lambda x: x + 1)(41), torch.ones(2).sum().item())
        def compiled():
            torch.compile(lambda x: x * 2, backend="flagos")(torch.ones(2))
        for use in (lambda: jax.devices("flagos"), lambda: torch.ones(2, device="flagos"), compiled):
            try:
                use()
            except Exception as error:
                print(str(error).replace("\\n", " "))
    """
    done = _run(program, plugins.add("none", plugins.toolchain.build(flags=("-DMINIMAL_NO_CHIP",))))
    assert done.returncode == 0, done.stderr
    computed, *reasons = done.stdout.splitlines()
    assert computed == "42 2.0" and len(reasons) == 3
    for text in (*reasons, done.stderr):
        assert text.count("offers none: UNAVAILABLE: ") == text.count("no chip is there") == 1
        assert "FLAGOS_DRIVERS_DISABLE=none.json" in text
