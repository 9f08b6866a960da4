"""What `pip install` puts in place: one wheel for every Python, with its data files and announcements."""

from importlib import metadata
from pathlib import Path

import pytest

import flagos_backend
import plugin_abi


@pytest.fixture(scope="module")
def wheel() -> metadata.Distribution:
    try:
        found = metadata.distribution("flagos")
    except metadata.PackageNotFoundError:
        pytest.skip("flagos is used from its source tree; tools/test installs it")
    if Path(str(found.locate_file("flagos_backend"))).resolve() != Path(flagos_backend.__path__[0]).resolve():
        pytest.skip("the installed flagos is not the one under test; tools/test installs it")
    return found


def test_one_wheel_serves_every_python(wheel: metadata.Distribution) -> None:
    tags = [line for line in (wheel.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    assert len(tags) == 1
    assert tags[0].startswith("Tag: py3-none-") and "linux" in tags[0]


def test_the_version_is_stated_once(wheel: metadata.Distribution) -> None:
    assert wheel.version == plugin_abi.__version__ == flagos_backend.__version__


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("jax_plugins", "flagos_backend.jax"),
        ("torch_dynamo_backends", "flagos_backend.torch.compile.backend:flagos"),
        ("flagos.manifests", "flagos_backend"),
        ("console_scripts", "flagos_backend.cli.main:main"),
    ],
)
def test_announcements(wheel: metadata.Distribution, group: str, value: str) -> None:
    assert [entry.value for entry in wheel.entry_points.select(group=group, name="flagos")] == [value]


@pytest.mark.parametrize(
    "name",
    [
        "plugin_abi/include/flagos/plugin_abi.h",
        "plugin_abi/include/flagos/isolation.h",
        "plugin_abi/lib/libflagos_isolation.so",
        "plugin_abi/lib/libpjrt_flagos.so",
        "plugin_abi/manifests/manifest.schema.json",
        "flagos_backend/lib/libflagos_backend.so",
        "flagos_backend/frontends/torch/compile/_launcher.abi3.so",
        "flagos_backend/kernels/triton/_cuda.abi3.so",
        "flagos_backend/manifests/50_flagos.json",
        "flagos_backend/proto/flagos.proto",
        "flagos_backend/importer/schema.binpb",
    ],
)
def test_data_files(wheel: metadata.Distribution, name: str) -> None:
    assert name in {str(file) for file in wheel.files or ()}
    assert Path(str(wheel.locate_file(name))).stat().st_size > 0


def test_no_source_of_native_parts_and_no_tests(wheel: metadata.Distribution) -> None:
    files = [str(file) for file in wheel.files or ()]
    assert not [name for name in files if name.endswith((".cc", ".map", "CMakeLists.txt"))]
    assert {name.split("/")[0] for name in files if "/" in name} <= {
        "plugin_abi",
        "flagos_backend",
        "..",
        f"flagos-{wheel.version}.dist-info",
    }


def test_nothing_of_a_framework_is_needed_for_the_other(wheel: metadata.Distribution) -> None:
    needed = [requirement for requirement in wheel.requires or () if "extra ==" not in requirement]
    assert not [requirement for requirement in needed if requirement.startswith("jax")]
