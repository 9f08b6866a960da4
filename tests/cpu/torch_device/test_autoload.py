"""`import torch` in processes of their own: what makes the device known, and what it leaves as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=300
    )


def printed(code: str, **variables: str) -> str:
    done = run(code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


#: Autoloads as an installed package does; the source tree announces no entry point.
IMPORT = """
    import importlib.metadata as metadata
    import sys
    names = {e.name for e in metadata.entry_points(group="torch.backends")}
    import torch
    if "flagos" not in names and torch._is_device_backend_autoload_enabled():
        from flagos_backend.frontends.torch.autoload import autoload
        autoload()
"""


def test_importing_torch_is_enough() -> None:
    assert printed(IMPORT + "    print(torch.ones(2, device='flagos').sum().item())") == "2.0"


def test_ours_may_come_first() -> None:
    code = "    import flagos_backend.frontends.torch.device.registration\n" + IMPORT
    assert printed(code + "    print(torch.ones(2, device='flagos').device)") == "flagos:0"


def test_it_can_be_switched_off() -> None:
    name = "    print(torch._C._get_privateuse1_backend_name(), hasattr(torch, 'flagos'))"
    assert printed(IMPORT + name, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "privateuseone False"
    assert printed(IMPORT + name, FLAGOS_TORCH_DEVICE="0") == "privateuseone False"
    enabled = "    from flagos_backend.torch.autoload import enable\n    print(enable() or torch.ones(1).flagos())"
    assert printed(IMPORT + enabled, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "tensor([1.], device='flagos:0')"


def test_the_first_use_says_why_every_backend_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "bad.json"
    manifest.write_text("{")
    code = """
    print(torch.ones(2).sum().item(), torch.flagos.is_available(), torch.flagos.device_count())
    for use in (
        lambda: torch.ones(2, device="flagos"), lambda: torch.ones(2).to("flagos"), lambda: torch.ones(2).flagos(),
        lambda: torch.nn.Linear(2, 2).to("flagos"), lambda: torch.Generator("flagos"), torch.flagos.init,
    ):
        try:
            use()
        except RuntimeError as error:
            print(error)
    """
    for _ in range(2):  # found out, and remembered
        done = run(IMPORT + code, FLAGOS_DRIVER_FILES=str(manifest))
        first, *errors = done.stdout.splitlines()
        assert (done.returncode, first) == (0, "2.0 False 0"), done.stderr
        assert len(errors) == 6 and all("no such device flagos" in error and "FLAGOS-1105" in error for error in errors)
        assert done.stderr.count("is not used: FLAGOS-1105 MANIFEST_NOT_JSON") == 1


def test_a_refused_backend_leaves_the_place_to_others(tmp_path: Path) -> None:
    manifest = tmp_path / "bad.json"
    manifest.write_text("{")
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nother = math:floor\n")
    code = f"""
    import sys
    sys.path.append({str(tmp_path)!r})
    import torch
    from flagos_backend.frontends.torch.autoload import enable
    print(enable())
    print(torch._C._get_privateuse1_backend_name())
    """
    done = run(code, FLAGOS_DRIVER_FILES=str(manifest), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["no backend is accepted; see `flagos doctor`", "privateuseone"], done.stderr


def test_an_exception_of_ours_is_one_warning() -> None:
    code = """
    import sys
    sys.modules["flagos_backend.frontends.torch.device.verdict"] = None
    """
    done = run(code + IMPORT + "    print(torch.ones(2).sum().item())")
    assert (done.returncode, done.stdout.strip()) == (0, "2.0")
    lines = [line for line in done.stderr.splitlines() if "flagos" in line]
    assert len(lines) == 1 and lines[0].startswith("PyTorch starts without the device flagos: ")


def test_another_extension_has_the_place() -> None:
    code = """
    import torch
    import types
    torch.utils.rename_privateuse1_backend("other")
    torch._register_device_module("other", types.SimpleNamespace(is_available=lambda: False))
    from flagos_backend.frontends.torch.autoload import autoload
    autoload()
    print(torch._C._get_privateuse1_backend_name())
    print(torch.compile(lambda x: x + 1, backend="flagos")(torch.ones(2)).tolist())
    """
    done = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split("\n")[:2] == ["other", "[2.0, 2.0]"], done.stderr
    assert "the extension of device 'other' has PyTorch's one place" in done.stderr


#: What a program that does not use the device can see of PyTorch.
PROBE = """
    import warnings
    from torch.utils.data import DataLoader
    warnings.simplefilter("ignore")

    def outcome(question):
        try:
            return str(question())
        except RuntimeError:
            return "RuntimeError"

    def saved():
        import tempfile
        import torch.distributed.checkpoint as checkpoint
        state = {"x": torch.arange(3.0)}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(state, checkpoint_id=folder, no_dist=True)
            state["x"].zero_()
            checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        return state["x"].tolist()

    accelerator = torch.accelerator
    questions = [
        accelerator.current_accelerator, accelerator.is_available, accelerator.device_count, accelerator.synchronize,
        accelerator.memory_allocated, accelerator.current_device_index, torch._C._get_accelerator,
        lambda: torch.ones(2).pin_memory(), lambda: torch.ones(2).is_pinned(), lambda: torch.empty(2, pin_memory=True),
        lambda: next(iter(DataLoader(torch.ones(4), batch_size=2, pin_memory=True))), torch.get_device_module,
        lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape,
        lambda: torch.autocast("cpu").fast_dtype, lambda: torch.amp.GradScaler("cpu").is_enabled(),
        lambda: torch.Generator().device, lambda: torch.ones(2).__dlpack_device__(), lambda: type(torch.Generator()),
        lambda: torch.nn.Linear(2, 2).to(torch.float64).weight.dtype, lambda: torch.UntypedStorage(3).nbytes(),
        lambda: torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=False).shape,
        lambda: torch.manual_seed(3).initial_seed(), lambda: torch.rand(2).tolist(), saved,
    ]
    for question in questions:
        print(outcome(question))
    sys.exit(hasattr(torch, "flagos") and torch.flagos.is_initialized())
"""


def test_who_does_not_use_the_device_finds_torch_as_it_was(tmp_path: Path) -> None:
    refused = tmp_path / "bad.json"
    refused.write_text("{")
    without = printed(IMPORT + PROBE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert printed(IMPORT + PROBE) == without
    assert printed(IMPORT + PROBE, FLAGOS_DRIVER_FILES=str(refused)) == without


def test_a_machine_with_another_accelerator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
    import torch
    from flagos_backend.frontends.torch import autoload
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")
    torch.cuda.device_count = lambda: 1
    print(autoload.enable("auto"))
    print(torch._C._get_privateuse1_backend_name())
    """
    assert printed(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split("\n") == [
        "the accelerator of this process is cuda; FLAGOS_TORCH_DEVICE=1 makes it flagos",
        "privateuseone",
    ]


@pytest.mark.parametrize("imports_dynamo_first", [False, True])
def test_dynamo_compiles_nothing_of_the_device(imports_dynamo_first: bool) -> None:
    """Its kernels, its answers for torch.accelerator and its stand-ins for PyTorch's methods are called as they are."""
    code = f"""
    import sys
    {"import torch._dynamo" if imports_dynamo_first else "import torch"}
    from flagos_backend.frontends.torch import autoload
    autoload.enable()
    assert ("torch._dynamo" in sys.modules) is {imports_dynamo_first}
    torch.ones(1, device="flagos")
    from torch._dynamo import convert_frame
    assert convert_frame.__loader__ is convert_frame.__spec__.loader
    compile_frame, files = convert_frame._compile, set()

    def spy(code, *args, **kwargs):
        files.add(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    convert_frame._compile = spy

    @torch.compile(backend="eager")
    def program(x):
        torch._dynamo.graph_break()
        torch.accelerator.synchronize()
        torch.accelerator.memory_allocated()
        x.is_pinned(), torch.Generator("flagos"), torch.UntypedStorage(3)
        there = torch.ones(1, 1, 4, 4, device="flagos").resize_(3)
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4, device="flagos")] * 3)
        return x + there.cpu()

    print(program(torch.ones(3)).tolist())
    print(sorted(file for file in files if "flagos_backend" in file), len(files) > 0)
    """
    assert printed(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split("\n") == ["[2.0, 2.0, 2.0]", "[] True"]
