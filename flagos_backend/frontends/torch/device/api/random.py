"""torch.flagos: the device's default generator, and seeds. A seed that is given before the first use waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device import generator
from flagos_backend.frontends.torch.device.api.devices import DeviceLike, device_count, opened
from flagos_backend.frontends.torch.device.opening import is_open
from flagos_backend.frontends.torch.device.sharing import is_in_bad_fork


def _generator(device: DeviceLike = None) -> torch.Generator:
    return opened(device).generator


def default_generators() -> tuple[torch.Generator, ...]:
    """The default generator of each device."""
    return (_generator(),)


def get_rng_state(device: DeviceLike = None) -> Tensor:
    """The state of the default generator: uint8, on the cpu."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: Tensor, device: DeviceLike = None) -> None:
    """Puts the default generator into a state that get_rng_state gave."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Sequence[Tensor]) -> None:
    """Puts all devices' default generators into the states that get_rng_state_all gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seeds the current device's default generator."""
    if is_open():
        _generator().manual_seed(int(seed))
    else:
        generator.seed_first(int(seed))


manual_seed_all = manual_seed


def seed() -> int:
    """Seeds the default generator with a number that is not repeatable, and returns it."""
    return _generator().seed()


seed_all = seed


def initial_seed() -> int:
    """The seed of the default generator."""
    return _generator().initial_seed()


def _is_in_bad_fork() -> bool:
    """Whether this is a forked process that cannot use the device."""
    return is_in_bad_fork()
