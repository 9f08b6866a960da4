"""What initialize() does to JAX: nothing, or a name with a reason, or a platform. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Reports on stdout how JAX comes up after initialize().
PROGRAM = """
import sys
import flagos_backend.frontends.jax
light = "jax" not in sys.modules and "torch" not in sys.modules and "cffi" not in sys.modules
flagos_backend.frontends.jax.initialize()
flagos_backend.frontends.jax.initialize()
import jax
loaded = "plugin_abi.loader" in sys.modules and sys.modules["plugin_abi.loader"].last_result() is not None
print("light", light, "searched", loaded)
try:
    print("default", jax.default_backend(), jax.numpy.arange(3).sum())
    jax.devices("flagos")
except RuntimeError as error:
    print("error", error)
"""


def run(tmp_path: Path, **variables: str) -> tuple[list[str], str]:
    """The lines on stdout and all of stderr. No backend can be found unless `variables` name one."""
    (tmp_path / "manifests").mkdir(exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "FLAGOS_"))}
    environment = {**inherited, "FLAGOS_DRIVER_FILES": str(tmp_path / "manifests"), **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr


def test_without_a_backend_jax_starts_as_ever_and_the_name_gives_the_reason(tmp_path: Path) -> None:
    (first, default, error), stderr = run(tmp_path)
    assert first == "light True searched True"
    assert default == "default cpu 3"
    assert error.startswith("error Backend 'flagos' failed to initialize: no such device flagos.")
    assert str(tmp_path / "manifests") in error
    assert stderr == ""


def test_a_refused_backend_is_one_warning_and_the_reason_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "10_broken.json").write_text("{")
    (_, default, error), stderr = run(tmp_path)
    assert default == "default cpu 3"
    assert "no such device flagos" in error
    assert "MANIFEST_NOT_JSON" in error
    assert len(stderr.splitlines()) == 1
    assert "10_broken.json" in stderr


def test_asking_for_the_device_gives_the_reason_at_once(tmp_path: Path) -> None:
    (_, error), _ = run(tmp_path, JAX_PLATFORMS="flagos")
    assert error.startswith("error Unable to initialize backend 'flagos': no such device flagos.")


def test_a_program_for_other_platforms_does_not_look_for_backends(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "10_broken.json").write_text("{")
    (first, default, error), stderr = run(tmp_path, JAX_PLATFORMS="cpu")
    assert first == "light True searched False"
    assert default == "default cpu 3"
    assert "Unknown backend flagos" in error
    assert stderr == ""


def test_what_is_registered_for_a_backend_leaves_torch_alone() -> None:
    """Another platform's user, who has flagos installed, does not wait for it."""
    imports = "from flagos_backend.frontends.jax import callbacks, dlpack, lowering"
    program = f"import sys; {imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
