"""Whose random numbers a running program draws: the device flagos has a generator of its own, and PyTorch's operators
on its memory take the inner device's. For executable.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Held again where an operator inside a launch launches another program.
_selecting = threading.RLock()


class _Lent:
    """Random numbers that a launch draws for the device: the inner generator's own state meanwhile."""

    state: torch.Tensor | None = None


_lent = _Lent()


@contextmanager
def rng_of_flagos() -> Iterator[None]:
    """Has random numbers of the inner device drawn from the generator of the device flagos.

    PyTorch's operators that draw without being given a generator take the inner device's own, whose state is put aside
    meanwhile: what other threads draw from it then is not what they would have drawn.
    """
    with _selecting:
        if _lent.state is not None:
            yield
            return
        _lend()
        try:
            yield
        finally:
            _take_back()


def _lend() -> None:
    generator, inner = _generators()
    _lent.state = inner.get_state()
    inner.set_state(generator.get_state())


def _take_back() -> None:
    generator, inner = _generators()
    assert _lent.state is not None
    generator.set_state(inner.get_state())
    inner.set_state(_lent.state)
    _lent.state = None


def _generators() -> tuple[torch.Generator, torch.Generator]:
    """The default generators of the device flagos and of its inner device."""
    from flagos_backend.frontends.torch.device.api import random
    from flagos_backend.frontends.torch.device.runtime import runtime

    (generator,) = random.default_generators()
    return generator, _default_generator(runtime().inner)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator
