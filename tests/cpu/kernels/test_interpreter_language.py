"""The language is replaced once a launch, and given back after it, whatever the kernel raised."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from flagos_backend.kernels.triton import interpreter_language
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.kernels.triton.loading import prepare_triton


@triton.jit
def twice_and(x, y):
    return x * 2 + y


@triton.jit
def sum_of_row(row):
    return twice_and(tl.sum(row, 0), 0)  # tl.sum is a device function that sees tl.core alone


@triton.jit
def refuses(x):
    tl.static_assert(False, "refused")
    return x


@triton.jit
def many_calls(to, rows, calls: tl.constexpr):
    total = tl.zeros([], tl.float32)
    for row in range(calls):
        total = twice_and(total, sum_of_row(tl.load(rows + row * 16 + tl.arange(0, 16))))
    tl.store(to, total)


@triton.jit
def refusing(to):
    tl.store(to, refuses(tl.load(to)))


def of_core_alone():
    """A kernel whose globals hold ``core`` and no ``tl``."""

    def add_one(to):
        core.store(to, core.load(to) + 1)

    seen = {"core": core, "__name__": __name__, "__builtins__": __builtins__}
    made = types.FunctionType(add_one.__code__, seen, "add_one")
    made.__module__, made.__qualname__ = __name__, "add_one"
    return made


def language() -> dict[tuple[str, str], object]:
    owners = {"tl": tl, "core": core, "math": tl.math, "tensor": tl.tensor, "dtype": tl.dtype}
    return {
        (name, key): inspect.getattr_static(owner, key)
        for name, owner in owners.items()
        for key in dir(owner)
        if not key.startswith("__") or key in ("__index__", "__bool__", "__repr__", "__str__")
    }


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The modules that are walked, in order; and the language is the same before and after."""
    prepare_triton()
    walked: list[object] = []
    original = interpreter._patch_lang_core

    def count(lang: object, *rest: object) -> None:
        walked.append(lang)
        original(lang, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_core", count)
    before = language()
    yield walked
    after = language()
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if after[key] is not value] == []


@pytest.mark.parametrize("calls", [1, 2, 9])
def test_device_functions_replace_nothing_again(calls: int, replaced: list[object]) -> None:
    rows, found = torch.randint(-9, 9, (calls, 16)).float(), torch.zeros(())
    launch(many_calls, (1,), found, rows, calls)
    expected = 0.0
    for row in rows:
        expected = 2 * expected + 2 * float(row.sum())
    assert float(found) == expected
    assert [replaced.count(module) for module in (tl, core)] == [1, 1]


def test_each_launch_replaces(replaced: list[object]) -> None:
    for launches in (1, 2):
        found = torch.zeros(())
        launch(many_calls, (3,), found, torch.ones(1, 16), 1)
        assert float(found) == 32
        assert len([lang for lang in replaced if lang is tl]) == launches


def test_what_raises_gives_back(replaced: list[object]) -> None:
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError, match="refused"):
            launch(refusing, (1,), torch.zeros(()))
    found = torch.zeros(())
    launch(many_calls, (1,), found, torch.ones(1, 16), 1)
    assert float(found) == 32
    assert len([lang for lang in replaced if lang is tl]) == 3


def test_the_last_launch_of_several_threads_gives_back(replaced: list[object]) -> None:
    """The first ends while the second is in its kernel."""
    scope = interpreter._LangPatchScope
    steps = interpreter_language.Language(interpreter)
    patch = steps.once(interpreter._patch_lang.__wrapped__)
    inside, may_end, seen = threading.Event(), threading.Event(), []
    original = tl.load

    def second(_: object) -> None:
        assert isinstance(patch(many_calls.fn), scope)
        inside.set()
        may_end.wait(60)
        seen.append(tl.load is original)

    def first(_: object) -> None:
        patch(many_calls.fn).restore()
        thread.start()
        assert inside.wait(60)

    thread = threading.Thread(target=steps.within(second), args=(None,))
    steps.within(first)(None)
    assert tl.load is not original
    may_end.set()
    thread.join()
    assert seen == [False]
    assert tl.load is original


def test_kernels_that_see_other_modules(replaced: list[object]) -> None:
    """What sees the part of the language that is not replaced yet has it replaced."""
    language_of = interpreter_language.Language(interpreter)
    patch = language_of.once(interpreter._patch_lang.__wrapped__)

    def run(_: object) -> None:
        for fn in (of_core_alone(), many_calls.fn, of_core_alone(), many_calls.fn):
            patch(fn)

    language_of.within(run)(None)
    assert replaced[0] is core
    assert [replaced.count(module) for module in (tl, core)] == [1, 2]  # once for each set of modules


@pytest.mark.parametrize("missing", ["_LangPatchScope", "GridExecutor", "_patch_lang"])
def test_an_interpreter_of_another_shape_is_left_alone(missing: str) -> None:
    names = {name: getattr(interpreter, name) for name in ("_LangPatchScope", "GridExecutor", "_patch_lang", "tl")}
    names.pop(missing)
    other = types.SimpleNamespace(**names)
    before = dict(vars(other))
    assert not interpreter_language.patch_once_a_launch(other)
    assert vars(other) == before
