"""What the user wants of kernel choice: FlagOS' environment variables, read once per compile. Read by choice.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flagos_backend import environment
from flagos_backend.devices.target import Target
from flagos_backend.errors import KernelPolicyInvalid
from flagos_backend.kernels.implementation import Implementation, Provider

DEFAULT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """One entry of FLAGOS_PREFER or FLAGOS_PER_OP: ``flagos``, ``vendor:nvidia``, ``impl:triton.attention``."""

    provider: Provider | None = None
    vendor: str = ""
    identifier: str = ""

    @classmethod
    def parse(cls, text: str, variable: str) -> Wish:
        kind, _, detail = text.strip().partition(":")
        if kind == "impl" and detail:
            return cls(identifier=detail)
        try:
            return cls(Provider(kind), detail)
        except ValueError:
            wanted = f"{', '.join(Provider)}, vendor:NAME or impl:NAME"
            raise KernelPolicyInvalid(variable=variable, value=text, wanted=wanted) from None

    def meets(self, implementation: Implementation, target: Target) -> bool:
        if self.identifier:
            return implementation.identifier == self.identifier
        return implementation.provider is self.provider and self.vendor in ("", target.vendor, target.device_type)

    def __str__(self) -> str:
        return f"impl:{self.identifier}" if self.identifier else f"{self.provider}{self.vendor and ':' + self.vendor}"


@dataclass(frozen=True, slots=True)
class Policy:
    """``prefer`` and ``per_op``: tried in order before measuring; ``strict``: nothing else may run. ``allow`` and
    ``deny``: vendors whose libraries may (not) run, ``*`` for all. ``whitelist`` and ``blacklist``: operations that
    FlagGems may (not) compute. ``flaggems``: whether it may compute any. ``tune_seconds``: what measuring one
    instruction may cost; 0 measures nothing."""

    prefer: tuple[Wish, ...] = ()
    per_op: Mapping[str, tuple[Wish, ...]] = field(default_factory=dict)
    strict: bool = False
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    whitelist: frozenset[str] = frozenset()
    blacklist: frozenset[str] = frozenset()
    flaggems: bool = True
    tune_seconds: float = DEFAULT_SECONDS

    @classmethod
    def from_environment(cls, given: Mapping[str, str] | None = None) -> Policy:
        """``given``: instead of the process' variables. Raises KernelPolicyInvalid for a value that is none, and
        ConfigInvalid."""
        variables = environment.variables(given)
        prefer = variables.get("FLAGOS_PREFER", "")
        if variables.get("FLAGOS_FLAGOS_WHITELIST") and variables.get("FLAGOS_FLAGOS_BLACKLIST"):
            raise KernelPolicyInvalid(
                variable="FLAGOS_FLAGOS_BLACKLIST",
                value=variables["FLAGOS_FLAGOS_BLACKLIST"],
                wanted="possible beside FLAGOS_FLAGOS_WHITELIST, which excludes all that it does not name",
            )
        return cls(
            _wishes(prefer, "FLAGOS_PREFER") if prefer else (),
            _per_op(variables.get("FLAGOS_PER_OP", "")),
            _flag(variables, "FLAGOS_STRICT"),
            allow=_names(variables, "FLAGOS_ALLOW_VENDORS"),
            deny=_names(variables, "FLAGOS_DENY_VENDORS"),
            whitelist=_names(variables, "FLAGOS_FLAGOS_WHITELIST"),
            blacklist=_names(variables, "FLAGOS_FLAGOS_BLACKLIST"),
            flaggems=environment.uses_flaggems(variables) is not False,
            tune_seconds=_seconds(variables),
        )

    def wishes(self, operation: str) -> tuple[Wish, ...]:
        return self.per_op.get(operation, self.prefer)

    def denies(
        self, operation: str, implementation: Implementation, target: Target, names: Collection[str] = ()
    ) -> str:
        """Why the user does not want ``implementation`` to run, or "". ``names``: what FlagGems calls the operation."""
        vendor = target.vendor if implementation.library else ""
        vendors = {vendor, target.device_type} if vendor else frozenset()  # FlagOS' plugins say cuda for NVIDIA
        if vendor and (vendors & self.deny or "*" in self.deny):
            return f"FLAGOS_DENY_VENDORS excludes the libraries of {vendor}"
        if vendor and self.allow and not vendors & self.allow and "*" not in self.allow:
            return f"FLAGOS_ALLOW_VENDORS does not name {vendor}"
        if implementation.provider is Provider.FLAGOS:
            if not self.flaggems:
                return f"{environment.USE_FLAGGEMS} is 0"
            known = {operation, *names}
            if known & self.blacklist:
                return "FLAGOS_FLAGOS_BLACKLIST names it"
            if self.whitelist and not known & self.whitelist:
                return "FLAGOS_FLAGOS_WHITELIST does not name it"
        return ""


def _wishes(text: str, variable: str) -> tuple[Wish, ...]:
    return tuple(Wish.parse(part, variable) for part in text.split("|"))


def _per_op(text: str) -> dict[str, tuple[Wish, ...]]:
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, wishes = entry.partition("=")
        if not separator:
            raise KernelPolicyInvalid(variable="FLAGOS_PER_OP", value=entry, wanted="op=provider|provider;op=...")
        found[name.strip()] = _wishes(wishes, "FLAGOS_PER_OP")
    return found


def _names(variables: Mapping[str, str], variable: str) -> frozenset[str]:
    return frozenset(name.strip() for name in variables.get(variable, "").split(",") if name.strip())


def _flag(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "").strip().lower()
    if value and value not in environment.TRUE | environment.FALSE:
        raise KernelPolicyInvalid(variable=name, value=value, wanted="1 or 0")
    return value in environment.TRUE


def _seconds(variables: Mapping[str, str]) -> float:
    text = variables.get("FLAGOS_AUTOTUNE_SECONDS", "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise KernelPolicyInvalid(variable="FLAGOS_AUTOTUNE_SECONDS", value=text, wanted="seconds, 0 for none")
    return seconds
