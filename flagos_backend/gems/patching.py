"""FlagGems in PyTorch's dispatcher: for each operator a kernel of the device's that asks decisions.py, and goes on to
the kernel that was there before. Removed whole by ``remove``."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from flagos_backend.devices.target import SIMULATED, Target
from flagos_backend.devices.vendors import product_of, vendor_of
from flagos_backend.environment import warn_once
from flagos_backend.frontends.torch.device.plan import is_tensor, name_of
from flagos_backend.gems.decisions import Decision, decide, signature_of, unsuitable
from flagos_backend.kernels.flaggems import loading
from flagos_backend.kernels.own_calls import OwnCalls, are_own
from flagos_backend.kernels.policy import Policy

# Signatures that one operator keeps; more are decided anew.
_MOST: Final = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where operators are patched: a device type of PyTorch and its dispatch key. ``unwrap`` and ``wrap`` give a tensor
    the device that FlagGems computes on, and back."""

    device_type: str
    key: str
    unwrap: Callable[[torch.Tensor], torch.Tensor] | None = None
    wrap: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_simulated(self) -> bool:
        return self.unwrap is not None

    def target(self) -> Target:
        """The first call of an operator asks: it needs the device."""
        return SIMULATED if self.is_simulated else _target(self.device_type)


@functools.cache
def _target(device_type: str) -> Target:
    return Target(device_type, vendor_of(device_type, product_of(device_type)))


@dataclass(slots=True)
class OperatorReport:
    """Calls of one operator that FlagGems computed, and those that PyTorch did, by the reason."""

    flaggems: int = 0
    native: Counter[str] = field(default_factory=Counter)


def operators(policy: Policy) -> Iterator[tuple[str, OpOverload]]:
    """What FlagGems may compute for eager programs: FlagGems' name, and PyTorch's operator.

    Left out are operators that write to their arguments or return views of them, those that draw random numbers, whose
    order would be another, those that PyTorch makes of others, and those without tensors among their arguments.
    """
    for name in loading.listed():
        names = loading.names_of(name)
        if names & policy.blacklist or (policy.whitelist and not names & policy.whitelist):
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if isinstance(operator, OpOverload) and _is_suitable(operator):
            yield name, operator


def _is_suitable(operator: OpOverload) -> bool:
    schema = operator._schema
    if not torch._C._dispatch_has_kernel(name_of(operator)):
        return False  # TorchScript's alone
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(name_of(operator), "CompositeImplicitAutograd"):
        return False
    return any("Tensor" in str(argument.type) for argument in schema.arguments)


class Patch:
    """FlagGems' operators at one place, from ``install`` to ``remove``."""

    def __init__(self, place: Place, policy: Policy) -> None:
        self.place, self.policy = place, policy
        self.reports: dict[str, OperatorReport] = {}
        self._library: Any = None

    def install(self) -> None:
        """Over whatever computes the operators now; what comes after stays over it."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, operator in operators(self.policy):
                native = _native(operator, self.place.key)
                if native is None:
                    continue
                kernel = self._kernel(name, operator, native, self.reports.setdefault(name, OperatorReport()))
                short = name_of(operator).removeprefix("aten::")
                library.impl(short, kernel, self.place.key, with_keyset=True, allow_override=True)
        self._library = library

    def remove(self) -> None:
        """Gives the operators back to the kernels that they had."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _kernel(self, name: str, operator: OpOverload, previous: Any, report: OperatorReport) -> Callable[..., Any]:
        native = _taking_numbers(operator, previous)
        decisions: dict[Hashable, Decision] = {}

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if are_own():
                return native(keyset, args, kwargs)
            if torch.are_deterministic_algorithms_enabled():
                report.native["deterministic algorithms are asked for"] += 1
                return native(keyset, args, kwargs)
            signature = signature_of((args, *kwargs.items()))
            decision = decisions.get(signature)
            if decision is None:
                if len(decisions) >= _MOST:
                    decisions.clear()
                decision = self._decided(name, operator, args, kwargs)
                decisions[signature] = decision
            if decision.compute is None or (not decision.has_run and self._is_capturing()):
                report.native[decision.reason or "it would be compiled while a graph is captured"] += 1
                return native(keyset, args, kwargs)
            try:
                result = self._computed(decision.compute, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self.policy.strict:
                    raise
                reason = f"FlagGems' {name} fails: {type(error).__name__}: {' '.join(str(error).split())}"
                warn_once(f"{reason}. PyTorch's own kernel computes it instead, from now on")
                decisions[signature] = Decision(None, reason)
                report.native[reason] += 1
                return native(keyset, args, kwargs)
            decision.has_run = True
            report.flaggems += 1
            return result

        return kernel

    def _decided(self, name: str, operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Decision:
        reason = unsuitable(args, kwargs)
        if reason:
            return Decision(None, reason)
        given, named = self._unwrapped(args), self._unwrapped(kwargs)
        return decide(name, operator, given, named, self.place.target(), self.policy)

    def _computed(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._device_of(args):
            result = compute(*self._unwrapped(args), **self._unwrapped(kwargs))
        return result if self.place.wrap is None else tree_map_only(torch.Tensor, self.place.wrap, result)

    def _unwrapped(self, value: Any) -> Any:
        """Lists of tensors may hold None."""
        return value if self.place.unwrap is None else tree_map_only(torch.Tensor, self.place.unwrap, value)

    def _device_of(self, args: tuple[Any, ...]) -> Any:
        """Kernels are launched on the current device, and PyTorch sets it in its own kernels only."""
        if self.place.is_simulated:
            return nullcontext()
        module = torch.get_device_module(self.place.device_type)
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if first is None or first.device.index in (None, module.current_device()):
            return nullcontext()
        return module.device(first.device.index)

    def _is_capturing(self) -> bool:
        if self.place.is_simulated:
            return False
        module = torch.get_device_module(self.place.device_type)
        return hasattr(module, "is_current_stream_capturing") and bool(module.is_current_stream_capturing())


def _native(operator: OpOverload, key: str) -> Any:
    """The kernel that computes the operator without FlagGems; None where there is none."""
    try:
        return torch.library.get_kernel(operator, key)
    except RuntimeError:
        return None


# ---- numbers in the place of tensors ----

# PyTorch makes a tensor of a number that stands beside tensors, and gives kernels in Python the number itself.
_WIDEST: Final[Mapping[type, torch.dtype]] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def _taking_numbers(operator: OpOverload, kernel: Any) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]:
    """A native kernel that gets tensors where its schema has them."""
    arguments = operator._schema.arguments
    places = tuple(n for n, argument in enumerate(arguments) if is_tensor(argument.type) and not argument.kwarg_only)

    def call(keyset: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if any(n < len(args) and type(args[n]) in _WIDEST for n in places):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            made = {n: _tensor_of(args[n], tensors) for n in places if n < len(args) and type(args[n]) in _WIDEST}
            args = tuple(made.get(n, arg) for n, arg in enumerate(args))
        return kernel.call_boxed(keyset, *args, **kwargs)

    return call


def _tensor_of(number: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor without dimensions, beside which others give results of the type that they give beside ``number``. Where
    a tensor with dimensions decides on it, it is as wide as can be, so that it keeps its digits."""
    widest = _WIDEST[type(number)]
    beside = max(tensors, key=lambda tensor: (_category(tensor.dtype), tensor.dim() > 0), default=None)
    with OwnCalls():
        if beside is None or (beside.dim() and _category(beside.dtype) >= _category(widest)):
            return torch.tensor(number, dtype=widest, device="cpu")
        return torch.tensor(number, dtype=torch.result_type(beside, number), device="cpu")


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1 if dtype is not torch.bool else 0
