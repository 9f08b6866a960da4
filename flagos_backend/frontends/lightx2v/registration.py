"""Which keys stand in which table of LightX2V. Each value is a factory that imports its class at the first use: modules
of LightX2V that are imported before a device is chosen keep None for it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Final

from flagos_backend.frontends.lightx2v import hooks

#: The line of LightX2V that this is tested with.
TESTED_LINE: Final = "the main branch of August 2026 (f8aee98)"
#: Another distribution with the same keys.
OTHER_PLUGIN: Final = "lightx2v-plugin-fl"

_REGISTRY = "lightx2v_platform.registry_factory"
_FINAL_REGISTRY = "lightx2v.utils.registry_factory"
_HERE = "flagos_backend.frontends.lightx2v"

logger = logging.getLogger("flagos.lightx2v")


@dataclass(frozen=True)
class Table:
    """A table of LightX2V. ``final``: the one that it is copied to when LightX2V's own registry is imported."""

    name: str
    final: str
    entries: dict[str, tuple[str, str]]
    """Key to module, in this package, and class."""


#: Devices are looked up by PLATFORM and used through static methods: the class itself stands in the table.
DEVICE_KEYS: Final = ("flagos", "fl")
DEVICE_TABLE: Final = "PLATFORM_DEVICE_REGISTER"
TABLES: Final = (
    Table(
        "PLATFORM_ATTN_WEIGHT_REGISTER",
        "ATTN_WEIGHT_REGISTER",
        {"flagos_flash_attn": ("attention", "FlashAttention")},
    ),
    Table(
        "PLATFORM_MM_WEIGHT_REGISTER",
        "MM_WEIGHT_REGISTER",
        {
            "flagos": ("products", "Product"),
            "flagos-fp8": ("products", "Fp8Product"),
            "flagos-int8": ("products", "Int8Product"),
        },
    ),
    Table("PLATFORM_RMS_WEIGHT_REGISTER", "RMS_WEIGHT_REGISTER", {"flagos_rms_norm": ("norms", "RmsNorm")}),
    Table("PLATFORM_LAYERNORM_WEIGHT_REGISTER", "LN_WEIGHT_REGISTER", {"flagos_layer_norm": ("norms", "LayerNorm")}),
    Table("PLATFORM_ROPE_REGISTER", "ROPE_REGISTER", {"flagos_rope": ("rope", "Rope")}),
)


def factory(key: str, module: str, name: str) -> Callable[..., Any]:
    """What stands in a table: makes an object of the class, which is imported by the first call."""

    def make(*arguments: Any, **keywords: Any) -> Any:
        return _class_of(key, module, name)(*arguments, **keywords)

    make.__name__ = make.__qualname__ = name
    return make


def _class_of(key: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{key}: LightX2V lacks what it is made of ({error}). This front end is tested with {TESTED_LINE}; take a "
            "LightX2V of that line, or another key."
        ) from error


def register() -> None:
    """Puts the keys of FlagOS into the tables of LightX2V. Called a second time, or beside another plugin with the same
    keys, it leaves the tables alone, and says so.

    Raises RuntimeError for a LightX2V whose registry is another one; nothing is registered then.
    """
    registry = importlib.import_module(_REGISTRY)
    tables = {table.name: _table(registry, table.name) for table in TABLES}
    devices = _table(registry, DEVICE_TABLE)
    if (other := _in_force(devices, tables)) is not None:
        logger.log(*other)
        return
    from flagos_backend.frontends.lightx2v.device import FlagosDevice

    for key in DEVICE_KEYS:
        devices.register(FlagosDevice, key=key)
    copied_already = sys.modules.get(_FINAL_REGISTRY)
    for table in TABLES:
        for key, (module, name) in table.entries.items():
            make = factory(key, module, name)
            tables[table.name].register(make, key=key)
            if copied_already is not None:
                _table(copied_already, table.final).register(make, key=key)
    hooks.install()
    logger.info("LightX2V has the platform flagos")


def _table(registry: ModuleType, name: str) -> Any:
    table = getattr(registry, name, None)
    if not callable(getattr(table, "register", None)):
        raise RuntimeError(
            f"{registry.__name__} has no table {name}, so the platform flagos is not registered. It is tested with "
            f"{TESTED_LINE}; take a LightX2V of that line."
        )
    return table


def _in_force(devices: Any, tables: dict[str, Any]) -> tuple[int, str] | None:
    """Why nothing is to be registered, with a level of logging."""
    present = devices.get(DEVICE_KEYS[0])
    if present is not None and getattr(present, "__module__", "").startswith(_HERE):
        return logging.DEBUG, "the platform flagos is registered already"
    taken = [key for key in DEVICE_KEYS if key in devices]
    taken += [key for table in TABLES for key in table.entries if key in tables[table.name]]
    if taken:
        owner = getattr(present, "__module__", None) or "another plugin"
        return logging.WARNING, f"{owner} has the keys {', '.join(taken)} of LightX2V, and is in force"
    if _is_installed(OTHER_PLUGIN):
        cure = "uninstall it to have the one of the distribution flagos"
        return logging.WARNING, f"the platform flagos of LightX2V is that of {OTHER_PLUGIN}; {cure}"
    return None


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
