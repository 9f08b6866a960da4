"""Manifests: what is read from them, what the schema says of them, and that no bytes raise."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.manifest import Binding, Isolation, Manifest, PythonAbi, parse_manifest, read_manifest
from plugin_abi.rights import Asked, Limits, Need
from plugin_abi.versions import AbiRange, AbiVersion

MANIFESTS = Path(__file__).parents[3] / "manifests"
SCHEMA = json.loads((MANIFESTS / "manifest.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PLACE = Path("/somewhere/50_vendor.json")

FULL: dict[str, Any] = {
    "file_format_version": "1.1.3",
    "name": "vendor",
    "platform": "flagos",
    "version": "1.2.3",
    "library_path": "../lib/libvendor.so",
    "library_arch": "aarch64",
    "abi_version": {"min": "1.0", "max": "1.2"},
    "built_with": {
        "git_revision": "a" * 40,
        "compiler": "gcc 12.2.0",
        "cxx11_abi": True,
        "glibc": "2.28",
        "python": {"abi": "stable", "version": ">=3.11"},
        "framework": {
            "torch": {"binding": "cxx", "version": ">=2.11,<2.16", "required": True},
            "jaxlib": {"git_revision": ["b" * 40, "c" * 12], "compiler": "clang 18.1.8", "cxx11_abi": False},
            "jax": {},
        },
    },
    "priority": 100,
    "resource_dir": "../share",
    "sha256": "d" * 64,
    "static_initializers": 8,
    "isolation": "process",
    "isolated": {
        "needs": ["exec", "devices"],
        "limits": {
            "memory_bytes": 2**33,
            "address_space_bytes": 2**36,
            "open_files": 100,
            "processes": 50,
            "file_bytes": 2**30,
            "cpu_seconds": 3600,
        },
        "environment": ["MYCHIP_*", "VENDOR"],
        "hang_seconds": 60,
    },
    "options": {"text": "", "count": -3, "ratio": 0.5, "on": False, "list": [1, 2]},
}


def _parse(fields: object) -> Manifest | Refusal:
    return parse_manifest(json.dumps(fields).encode(), PLACE)


def test_every_field_is_read() -> None:
    manifest = _parse(FULL)
    assert isinstance(manifest, Manifest)
    assert (manifest.path, manifest.name, manifest.platform, manifest.version) == (PLACE, "vendor", "flagos", "1.2.3")
    assert manifest.abi_version == AbiRange(AbiVersion(1, 0), AbiVersion(1, 2))
    assert (manifest.priority, manifest.static_initializers, manifest.sha256) == (100, 8, "d" * 64)
    assert manifest.isolation is Isolation.PROCESS
    assert manifest.isolated == Asked(
        needs=(Need.EXEC, Need.DEVICES),
        limits=Limits(2**33, 2**36, 100, 50, 2**30, 3600),
        environment=("MYCHIP_*", "VENDOR"),
        hang_seconds=60,
    )
    assert manifest.resource_dir == Path("/somewhere/../share")
    assert dict(manifest.options) == {"text": "", "count": -3, "ratio": 0.5, "on": False, "list": (1, 2)}
    built = manifest.built_with
    assert (built.compiler, built.cxx11_abi, built.glibc, built.git_revision) == ("gcc 12.2.0", True, "2.28", "a" * 40)
    assert built.python.abi is PythonAbi.STABLE and "3.12.1" in built.python.version
    torch, jaxlib, jax = built.frameworks
    assert (torch.binding, torch.compiler, torch.cxx11_abi, torch.required) == (Binding.CXX, "gcc 12.2.0", True, True)
    assert (jaxlib.binding, jaxlib.compiler, jaxlib.cxx11_abi) == (Binding.C, "clang 18.1.8", False)
    assert jaxlib.git_revision == ("b" * 40, "c" * 12)
    assert (jax.version, jax.git_revision, jax.compiler, jax.required) == (None, (), None, False)


def test_optional_fields_may_be_left_out() -> None:
    fields = {key: FULL[key] for key in SCHEMA["required"]}
    manifest = _parse(fields)
    assert isinstance(manifest, Manifest)
    assert (manifest.priority, manifest.resource_dir, manifest.sha256, manifest.options) == (0, None, None, ())


def test_a_field_of_a_later_format_is_refused_in_an_earlier_one() -> None:
    fields = FULL | {"file_format_version": "1.0.3"}
    refusal = _parse(fields)
    assert isinstance(refusal, Refusal) and "isolation is of the format 1.1" in refusal.fact
    assert not VALIDATOR.is_valid(fields)
    del fields["isolation"]
    refusal = _parse(fields)
    assert isinstance(refusal, Refusal) and "isolated is of the format 1.1" in refusal.fact
    assert not VALIDATOR.is_valid(fields)
    del fields["isolated"]
    manifest = _parse(fields)
    assert isinstance(manifest, Manifest) and manifest.isolation is Isolation.NONE
    assert VALIDATOR.is_valid(fields)


def test_unknown_keys_are_ignored_at_every_level() -> None:
    fields = copy.deepcopy(FULL)
    for place in (fields, fields["abi_version"], fields["built_with"], fields["built_with"]["framework"]["jax"]):
        place["from_a_later_format"] = {"deep": [None]}
    assert _parse(fields) == _parse(FULL)
    VALIDATOR.validate(fields)


@pytest.mark.parametrize(
    ("place", "field", "told"),
    [
        ((), "sha265", "sha265 (did you mean sha256?)"),
        ((), "static_initialisers", "static_initialisers (did you mean static_initializers?)"),
        (("built_with",), "git_revison", "built_with.git_revison (did you mean git_revision?)"),
        (("built_with", "python"), "versoin", "built_with.python.versoin (did you mean version?)"),
        (("built_with", "framework", "jax"), "bindings", "built_with.framework.jax.bindings (did you mean binding?)"),
        (("abi_version",), "maximum", "abi_version.maximum (did you mean max?)"),
        ((), "from_a_later_format", "from_a_later_format"),
    ],
)
def test_a_misspelt_field_is_told_with_the_nearest_known_one(place: tuple[str, ...], field: str, told: str) -> None:
    fields = copy.deepcopy(FULL)
    inner = fields
    for name in place:
        inner = inner[name]
    inner[field] = "0" * 64
    manifest = _parse(fields)
    assert isinstance(manifest, Manifest) and manifest.unknown_fields == (told,)


def test_names_that_are_the_writers_own_are_no_misspelling() -> None:
    fields = copy.deepcopy(FULL) | {"$schema": "manifest.schema.json", "_comment": "why", "description": "what"}
    fields["options"] = {"anything": 1}
    fields["built_with"]["framework"]["some_framework"] = {"version": ">=1"}
    manifest = _parse(fields)
    assert isinstance(manifest, Manifest) and manifest.unknown_fields == ()


@pytest.mark.parametrize("name", ["bare.so", "./relative.so", "/absolute/lib.so"])
def test_a_library_path_is_bare_only_without_a_slash(name: str) -> None:
    manifest = _parse(FULL | {"library_path": name})
    assert isinstance(manifest, Manifest) and manifest.library_is_bare == (name == "bare.so")


# ---- The schema and the parser agree ----


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in children for found in _paths(child, (*path, key)))]


def _changed(path: tuple[Any, ...], value: Any, *, remove: bool = False) -> Any:
    fields = copy.deepcopy(FULL)
    place = fields
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return fields


PATHS = [path for path in _paths(FULL) if path]
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**6 + 1, 2**63, -(2**63) - 1, [], [1], ["x"], [None], {}, {"x": 1}),
    *(
        "",
        "x",
        "1.0",
        "1.0.0",
        "01.0.0",
        "1.1.0",
        "2.0.0",
        "é",
        "a" * 41,
        "A" * 64,
        "f" * 64,
        "f" * 65,
        " ",
        "x" * 4097,
    ),
    *("flagos", "Flagos", "gcc", "gcc 12", "gcc 1.2.3.4.5", "GCC 12", "c", "cxx", "none", "stable", "../x", "a/b"),
    *(">=1", ">=1,<2", ">=1,", "~=1", "===1", "==1.*", ">=1.*", "1", "70000.1", "1.70000", "99999.1", "١.٠"),
]


def _agree(fields: Any) -> None:
    by_schema = VALIDATOR.is_valid(fields)
    by_parser = isinstance(_parse(fields), Manifest)
    assert by_schema == by_parser, (by_schema, _parse(fields), [e.message for e in VALIDATOR.iter_errors(fields)])


#: What a schema cannot say: relations between fields, and numbers inside strings.
BEYOND_THE_SCHEMA = {("abi_version", "min"), ("abi_version", "max"), ("built_with", "python", "version")} | {
    path for path in PATHS if path[-1] == "version" and "framework" in path
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_schema_and_parser_agree_on_every_field(path: tuple[Any, ...]) -> None:
    if isinstance(path[-1], str):
        _agree(_changed(path, None, remove=True))
    for value in WRONG:
        fields = _changed(path, value)
        if path not in BEYOND_THE_SCHEMA:
            _agree(fields)
        elif isinstance(_parse(fields), Manifest):
            VALIDATOR.validate(fields)


@pytest.mark.parametrize("path", sorted(BEYOND_THE_SCHEMA), ids=lambda path: ".".join(map(str, path)))
def test_what_the_schema_refuses_the_parser_refuses_too(path: tuple[Any, ...]) -> None:
    for value in WRONG:
        fields = _changed(path, value)
        assert VALIDATOR.is_valid(fields) or isinstance(_parse(fields), Refusal)


def test_min_above_max_is_refused() -> None:
    refusal = _parse(FULL | {"abi_version": {"min": "1.2", "max": "1.1"}})
    assert isinstance(refusal, Refusal) and "min 1.2 above max 1.1" in refusal.fact


EXAMPLES = sorted((MANIFESTS / "examples").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    manifest = read_manifest(path)
    assert isinstance(manifest, Manifest), manifest
    VALIDATOR.validate(json.loads(path.read_text("utf-8")))


def test_there_is_an_example_for_each_known_chip_family() -> None:
    known = {"nvidia", "ascend", "cambricon", "metax", "mthreads", "kunlunxin", "iluvatar", "hygon"}
    assert known <= {path.stem.removeprefix("40_flagos_") for path in EXAMPLES}


def test_the_schema_is_a_schema_and_describes_the_fields() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == set(FULL)
    assert set(SCHEMA["properties"]["built_with"]["properties"]) == set(FULL["built_with"])


# ---- No bytes raise ----

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_refusal(data: bytes) -> None:
    assert isinstance(parse_manifest(data, PLACE), Refusal)


@given(st.sampled_from(PATHS), JSON_VALUES)
def test_any_value_in_any_field_gives_a_manifest_or_a_refusal(path: tuple[Any, ...], value: Any) -> None:
    result = _parse(_changed(path, value))
    assert isinstance(result, Manifest | Refusal)
    assert "\n" not in str(result).replace("\\n", "") or isinstance(result, Manifest)


@given(st.data())
def test_any_damage_to_the_text_gives_a_manifest_or_a_refusal(data: st.DataObject) -> None:
    text = bytearray(json.dumps(FULL).encode())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    assert isinstance(parse_manifest(bytes(text), PLACE), Manifest | Refusal)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"a":' * 17 + "1" + "}" * 17, RefusalCode.MANIFEST_TOO_DEEP),
        ('{"a": "' + "[" * 1000 + '"}', RefusalCode.MANIFEST_MISSING_FIELD),
        ('{"a": "\\"' + "[" * 1000 + '"}', RefusalCode.MANIFEST_MISSING_FIELD),
        ('{"priority": ' + "9" * 5000 + "}", RefusalCode.MANIFEST_NOT_JSON),
        ('{"priority": -Infinity}', RefusalCode.MANIFEST_NOT_JSON),
        ('{"a": {"b": 1, "b": 2}}', RefusalCode.MANIFEST_DUPLICATE_KEY),
        ('{"\\ud800": 1, "\\ud800": 2}', RefusalCode.MANIFEST_DUPLICATE_KEY),
        ("\ufeff{}", RefusalCode.MANIFEST_NOT_JSON),
        ("null", RefusalCode.MANIFEST_INVALID_FIELD),
        ("{} {}", RefusalCode.MANIFEST_NOT_JSON),
        ('{"a": "\x00"}', RefusalCode.MANIFEST_NOT_JSON),
    ],
    ids=range(11),
)
def test_odd_texts(text: str, code: RefusalCode) -> None:
    refusal = parse_manifest(text.encode(), PLACE)
    assert isinstance(refusal, Refusal) and refusal.code is code


@pytest.mark.parametrize("path", ["a\0b.so", "a\nb.so", "\ud800.so", "x" * 5000, ""])
def test_odd_library_paths_are_refused(path: str) -> None:
    refusal = _parse(FULL | {"library_path": path})
    assert isinstance(refusal, Refusal) and refusal.code is RefusalCode.MANIFEST_INVALID_FIELD


def test_nan_in_an_option_is_refused() -> None:
    refusal = _parse(FULL | {"options": {"x": math.nan}})
    assert isinstance(refusal, Refusal) and refusal.code is RefusalCode.MANIFEST_NOT_JSON


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.json")
    refusal = read_manifest(tmp_path / "pipe.json")
    assert isinstance(refusal, Refusal) and refusal.code is RefusalCode.MANIFEST_UNREADABLE
