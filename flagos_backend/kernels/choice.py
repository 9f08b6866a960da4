"""Which kernel computes a library instruction on a target: by the user's wish, else by measuring, else in FlagOS'
order. Between fusion and the plan; the providers' tables say what there is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flagos_backend.devices.simulated import SIMULATED
from flagos_backend.devices.target import Target
from flagos_backend.errors import FlagosBackendError, KernelRefused
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.kernels import tuning
from flagos_backend.kernels.flaggems import loading
from flagos_backend.kernels.implementation import Implementation, Provider, Variant, operation_of
from flagos_backend.kernels.policy import Policy
from flagos_backend.kernels.reference.registry import InPlaceKernel, Kernel
from flagos_backend.kernels.vendor.library import is_vendor_reference, reference_variants, runs_library

_TABLES = ("flaggems", "triton", "vendor")
# FlagOS asks for flagos, vendor, reference; our own kernels stand beside FlagGems'.
_ORDER = tuple(Provider)
# Who asks for this much time per instruction gets kernels measured that tune themselves before their first call.
THOROUGH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Choice:
    """``text``: why this kernel, and what the others lacked, for explain. ``into``, ``in_place``: as of Variant."""

    kernel: Kernel
    provider: Provider
    text: str
    into: Kernel | None = None
    in_place: InPlaceKernel | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The kernels that may compute an instruction. ``warm_ups``: by name, what ``choose`` waits for where it measures
    them, and else what the first run of the one that it takes would do; as of Variant. ``several``: whether it may
    measure."""

    warm_ups: Mapping[str, Callable[[], object]]
    choose: Callable[[], Choice]
    several: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    implementation: Implementation
    variants: Sequence[Variant]


@functools.cache
def _tables() -> Mapping[str, tuple[Implementation, ...]]:
    found: dict[str, list[Implementation]] = {}
    for name in _TABLES:
        table = importlib.import_module(f"flagos_backend.kernels.{name}.table")
        for operation, implementation in table.IMPLEMENTATIONS:
            found.setdefault(operation, []).append(implementation)
    return {operation: tuple(implementations) for operation, implementations in found.items()}


def implementations_of(operation: str) -> tuple[Implementation, ...]:
    """Everything registered for ``operation``, in FlagOS' order; ``aten::*`` stands for all of that namespace."""
    namespace, separator, _ = operation.partition("::")
    found = _tables().get(operation, ()) + (_tables().get(f"{namespace}::*", ()) if separator else ())
    return tuple(sorted((*found, _REFERENCE), key=lambda one: _ORDER.index(one.provider)))


def choose(instruction: Instruction, target: Target, policy: Policy | None = None) -> Choice:
    """The kernel of a library instruction. Raises what ``candidates`` raises."""
    return candidates(instruction, target, policy).choose()


def candidates(instruction: Instruction, target: Target, policy: Policy | None = None) -> Candidates:
    """What may compute a library instruction. Nothing is measured or warmed up yet, so that those of many instructions
    can be warmed up at once.

    Raises KernelRefused when the user's policy leaves none, and what the reference kernel raises for what nobody has.
    """
    policy = policy or Policy.from_environment()
    operation = operation_of(instruction)
    allowed, reasons, failures, denied = _allowed(instruction, target, operation, policy)
    for wish in policy.wishes(operation):
        found = [offer for offer in allowed if wish.meets(offer.implementation, target)]
        if found:
            return _first(found[0], [f"{wish} is preferred"], instruction, target, policy)
        reasons.append(f"{wish} is preferred and has no kernel")
    if policy.strict and policy.wishes(operation):
        raise KernelRefused.at(instruction, operation=operation, reasons="; ".join(reasons))
    if not allowed:
        if failures and not denied:
            raise failures[-1]
        raise KernelRefused.at(instruction, operation=operation, reasons="; ".join(reasons))
    contenders = _contenders(allowed, reasons, instruction, policy)
    if len(contenders) == 1 and len(contenders[0].variants) == 1:
        return _chosen(contenders[0], contenders[0].variants[0], reasons)
    return _fastest(contenders, reasons, instruction, target, policy)


def _allowed(
    instruction: Instruction, target: Target, operation: str, policy: Policy
) -> tuple[list[_Offer], list[str], list[FlagosBackendError], bool]:
    """Offers that can run and may, why the others do not, the errors of those that failed to prepare, and whether the
    policy excluded any."""
    offers: list[_Offer] = []
    reasons: list[str] = []
    failures: list[FlagosBackendError] = []
    denied = False
    for implementation in implementations_of(operation):
        if implementation is _REFERENCE and runs_library(instruction, target):
            implementation = _REFERENCE_ON_LIBRARY
        names = _names(operation, instruction) if policy.whitelist or policy.blacklist else ()
        reason = policy.denies(operation, implementation, target, names)
        denied = denied or bool(reason)
        reason = reason or _unasked(implementation, target, operation, policy)
        reason = reason or implementation.unsupported(instruction, target)
        if not reason:
            try:
                offers.append(_Offer(implementation, implementation.variants(instruction, target)))
                continue
            except FlagosBackendError as error:
                reason = str(error)
                failures.append(error)
        reasons.append(f"not {implementation.identifier}: {reason}")
    return offers, reasons, failures, denied


def _names(operation: str, instruction: Instruction) -> Collection[str]:
    """What else the lists may call an operation."""
    if not isinstance(instruction.attributes, CustomCallAttributes) or not operation.startswith("aten::"):
        return ()
    if loading.missing():
        return (operation.removeprefix("aten::"),)
    return loading.names_of(instruction.attributes.target.removeprefix("aten::").removesuffix(".default"))


def _unasked(implementation: Implementation, target: Target, operation: str, policy: Policy) -> str:
    """Why kernels that the simulated device could run, in seconds each, must be asked for, or ""."""
    if implementation.provider is not Provider.FLAGOS or target.vendor != SIMULATED:
        return ""
    asked = any(wish.meets(implementation, target) for wish in policy.wishes(operation))
    return "" if asked else "Triton's interpreter runs FlagGems where FLAGOS_PREFER=flagos asks for it"


def _contenders(allowed: list[_Offer], reasons: list[str], instruction: Instruction, policy: Policy) -> list[_Offer]:
    """The offers worth measuring; ``reasons`` gets why the others are not."""
    kept = []
    for offer in allowed:
        implementation = offer.implementation
        if implementation is _REFERENCE_ON_LIBRARY:
            reasons.append(f"not {implementation.identifier}: it takes more than one call")
        elif implementation.tunes_itself(instruction) and policy.tune_seconds < THOROUGH_SECONDS:
            wanted = f"FLAGOS_AUTOTUNE_SECONDS={THOROUGH_SECONDS:g} measures it"
            reasons.append(f"not {implementation.identifier}: it tunes itself for seconds a shape; {wanted}")
        else:
            kept.append(offer)
    return kept or allowed


def _first(offer: _Offer, reasons: list[str], instruction: Instruction, target: Target, policy: Policy) -> Candidates:
    """The wished provider's kernel; of several of its own the fastest."""
    if len(offer.variants) == 1:
        return _chosen(offer, offer.variants[0], reasons)
    return _fastest([offer], reasons, instruction, target, policy)


def _fastest(
    offers: list[_Offer], reasons: list[str], instruction: Instruction, target: Target, policy: Policy
) -> Candidates:
    entries = {_label(offer, variant): (offer, variant) for offer in offers for variant in offer.variants}
    kernels = {name: variant.kernel for name, (_, variant) in entries.items()}
    compiled = frozenset(name for name, (offer, _) in entries.items() if _starts_at_once(offer.implementation))
    warm_ups = {name: variant.warm_up for name, (_, variant) in entries.items() if variant.warm_up}
    checked = frozenset(name for name, (offer, _) in entries.items() if offer.implementation.is_checked(instruction))
    task = tuning.Task.of(instruction)

    def measured() -> Choice:
        outcome = tuning.fastest(task, target, kernels, policy.tune_seconds, compiled, warm_ups, checked)
        return _choice(*entries[outcome.name], [outcome.text, *reasons])

    return Candidates(tuning.awaited(task, target, kernels, policy.tune_seconds, warm_ups), measured, several=True)


def _starts_at_once(implementation: Implementation) -> bool:
    return implementation.library or implementation.provider is Provider.REFERENCE


def _chosen(offer: _Offer, variant: Variant, reasons: list[str]) -> Candidates:
    warm_ups = {_label(offer, variant): variant.warm_up} if variant.warm_up else {}
    return Candidates(warm_ups, functools.partial(_choice, offer, variant, reasons))


def _choice(offer: _Offer, variant: Variant, reasons: list[str]) -> Choice:
    text = "; ".join([_label(offer, variant), *reasons])
    return Choice(variant.kernel, offer.implementation.provider, text, variant.into, variant.in_place)


def _label(offer: _Offer, variant: Variant) -> str:
    identifier = offer.implementation.identifier
    return f"{identifier} ({variant.name})" if variant.name else identifier


def _reference_unsupported(instruction: Instruction, target: Target) -> str:
    return "it is the vendor's library" if is_vendor_reference(instruction, target) else ""


_REFERENCE = Implementation("aten", Provider.REFERENCE, _reference_unsupported, reference_variants)
_REFERENCE_ON_LIBRARY = replace(_REFERENCE, library=True)
