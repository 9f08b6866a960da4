"""Plans that several threads ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flagos_backend.compile import compiler
from flagos_backend.devices import HOST


def plans_of(name: str, donors: tuple[int, ...] = ()) -> compiler.Plans:
    module: Any = SimpleNamespace(entry=name)
    return compiler.Plans(module, donors, torch.device("cpu"), HOST)


def in_threads(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_programs_are_planned_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both, met = threading.Barrier(2), []

    def build(entry: str, *_: object) -> str:
        both.wait(20)
        met.append(entry)
        return entry

    monkeypatch.setattr(compiler, "build_plan", build)
    one, other = plans_of("one"), plans_of("other")
    in_threads(lambda: one.donating, lambda: other.donating)
    assert sorted(met) == ["one", "other"]


def test_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made, found = threading.Barrier(3), [], []

    def build(entry: str, donors: tuple[int, ...], device: torch.device) -> object:
        made.append(donors)
        with pytest.raises(threading.BrokenBarrierError):
            asked.wait(0.1)  # nobody else comes here
        return object()

    monkeypatch.setattr(compiler, "build_plan", build)
    plans = plans_of("program", donors=(1,))
    in_threads(*[lambda: found.append(plans.keeping)] * 3)
    assert made == [()] and len({id(plan) for plan in found}) == 1 and len(found) == 3
    assert plans.donating is not plans.keeping and made == [(), (1,)]
    assert plans.choose(in_place=True) is plans.donating and plans.choose(in_place=False) is plans.keeping


def test_a_plan_that_could_not_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [ValueError("no kernel")]

    def build(*_: object) -> str:
        if left:
            raise left.pop()
        return "a plan"

    monkeypatch.setattr(compiler, "build_plan", build)
    plans = plans_of("program")
    with pytest.raises(ValueError, match="no kernel"):
        _ = plans.donating
    built: tuple[object, ...] = (plans.donating, plans.keeping)
    assert built == ("a plan", "a plan")
