"""The device's generators: generators of the inner device, which is where random numbers are drawn."""

from __future__ import annotations

from typing import Any, Final

import torch

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

#: The seed that PyTorch's generators begin with.
DEFAULT_SEED: Final = 67280421310721
_HostGenerator = torch._C.Generator


#: The device's generators by PyTorch's number: operators are given another object for the same generator.
_numbers: Final[set[int]] = set()


def is_of_device(generator: torch.Generator) -> bool:
    """Whether a generator, as an operator is given it, is the device's."""
    return _number_of(generator) in _numbers


def _number_of(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]  # missing in PyTorch's stubs


class DeviceGenerator(_HostGenerator):
    """A generator that says of itself that it is the device's."""

    def __new__(cls, device: torch.device) -> DeviceGenerator:
        made = super().__new__(cls, device)  # type: ignore[call-arg]
        _numbers.add(_number_of(made))
        return made

    def __del__(self) -> None:
        _numbers.discard(_number_of(self))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE_TYPE, 0)

    def clone_state(self) -> DeviceGenerator:
        clone = DeviceGenerator(super().device)
        clone.set_state(self.get_state())
        return clone

    def __repr__(self) -> str:
        return f"<torch.Generator of {self.device}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.initial_seed(), self.get_state())


def new_generator(inner: torch.device) -> DeviceGenerator:
    """A generator of the device with PyTorch's default seed; ``inner`` computes for the device."""
    generator = DeviceGenerator(inner)
    generator.manual_seed(DEFAULT_SEED)
    return generator


#: What the default generator begins with.
_first_seed = DEFAULT_SEED


def seed_first(seed: int) -> None:
    """Seeds the default generator before there is one."""
    global _first_seed
    _first_seed = seed


def default_generator(inner: torch.device) -> DeviceGenerator:
    """The device's default generator."""
    generator = new_generator(inner)
    generator.manual_seed(_first_seed)
    return generator


def _restore(seed: int, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(DEVICE_TYPE)
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator
