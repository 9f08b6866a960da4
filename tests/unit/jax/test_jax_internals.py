"""The private names of JAX that the front end rests on: each is there, and a JAX without one is told by name."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.errors import JaxApiChanged

NAMES = re.findall(r'lookup\(\s*"([\w.]+)",\s*"([\w.]+)"', inspect.getsource(jax_internals))


def test_the_list_of_names_is_read_from_the_source() -> None:
    assert ("jax._src.xla_bridge", "register_plugin") in NAMES
    assert len(NAMES) > 30


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_private_name(module: str, name: str) -> None:
    assert jax_internals.lookup(module, name) is not None


@pytest.mark.parametrize(
    ("module", "name"), [("jax._src.gone", "x"), ("jax._src.core", "gone"), ("jaxlib._jax", "a.b")]
)
def test_a_name_that_this_jax_does_not_have_is_named_with_the_version(module: str, name: str) -> None:
    with pytest.raises(JaxApiChanged, match=re.escape(f"JAX {jax.__version__} does not have {module}.{name}")):
        jax_internals.lookup(module, name)


def test_donation_is_enabled_once() -> None:
    platforms = jax_internals.lookup("jax._src.interpreters.mlir", "_platforms_with_donation")
    jax_internals.enable_donation("flagos")
    assert platforms.count("flagos") == 1
    assert "cpu" in platforms


def test_the_compilation_cache_takes_flagos_as_it_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = jax_internals.lookup("jax._src", "compilation_cache")
    used = {}
    for platform in ("flagos", "cpu", "unheard-of"):
        monkeypatch.setattr(cache, "_cache_checked", False)
        monkeypatch.setattr(cache, "_cache_used", False)
        monkeypatch.setattr(cache, "_is_cache_enabled", lambda: True)
        used[platform] = cache.is_cache_used(SimpleNamespace(platform=platform))
    assert used == {"flagos": True, "cpu": True, "unheard-of": False}


@pytest.mark.parametrize("module", ["jax._src.callback", "jax.interpreters.mlir"])
def test_emit_python_callback_is_wrapped_once(module: str) -> None:
    emit = jax_internals.lookup(module, "emit_python_callback")
    assert emit.flagos_platform == "flagos"
    assert not hasattr(emit.__wrapped__, "flagos_platform")


def test_main_attributes_of_text_and_bytecode() -> None:
    text = b"""module { func.func public @main(%arg0: tensor<2xf32> {a.b = "x", a.n = 1 : i32}, %arg1: tensor<f32>)
      -> (tensor<2xf32> {a.c = "y"}) { return %arg0 : tensor<2xf32> } }"""
    module = jax_internals.parse_stablehlo(text)
    assert jax_internals.main_attributes(module) == ([{"a.b": "x"}, {}], [{"a.c": "y"}])


def test_a_module_without_attributes_has_empty_ones() -> None:
    text = b"module { func.func @main(%arg0: tensor<f32>) -> tensor<f32> { return %arg0 : tensor<f32> } }"
    assert jax_internals.main_attributes(jax_internals.parse_stablehlo(text)) == ([{}], [{}])


def test_rename_module_gives_the_name_before() -> None:
    module = jax_internals.parse_stablehlo(b"module @first { func.func @main() { return } }")
    assert jax_internals.rename_module(module, "second") == "first"
    assert jax_internals.rename_module(module, "third") == "second"


def test_lowering_rules_of_a_jax_without_a_primitive_are_passed_over() -> None:
    assert jax_internals.primitive("jax._src.lax.linalg", "no_such_p") is None
    assert jax_internals.primitive("jax._src.no_such_module", "no_such_p") is None


@pytest.mark.parametrize(
    ("platforms", "expected"), [("", ()), ("cpu", ("cpu",)), ("flagos, cpu", ("flagos", "cpu")), (None, ())]
)
def test_requested_platforms(monkeypatch: pytest.MonkeyPatch, platforms: Any, expected: tuple[str, ...]) -> None:
    flag = SimpleNamespace(value=platforms)
    monkeypatch.setattr(jax_internals.lookup("jax._src", "config"), "jax_platforms", flag)
    assert jax_internals.requested_platforms() == expected
