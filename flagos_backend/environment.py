"""What the variables that FlagOS' plugins share say of kernels: read here and nowhere else. Used by kernels/policy.py.

FlagOS' plugins for vLLM, SGLang, TransformerEngine and Megatron have one set of variables, each under its own prefix,
and a YAML file that replaces them. Here the prefix is FLAGOS_; theirs hold where FLAGOS_ says nothing. The order is in
docs/environment.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flagos_backend.errors import ConfigInvalid
from plugin_abi.search import is_privileged

logger = logging.getLogger("flagos_backend")

OWN: Final = "FLAGOS_"
#: Of other plugins, in the order in which they are asked.
FAMILIES: Final = ("VLLM_FL_", "SGLANG_FL_", "TE_FL_", "MG_FL_")
#: The master switch of FlagGems, in all of them.
USE_FLAGGEMS: Final = "USE_FLAGGEMS"
CONFIG: Final = "CONFIG"
#: Which provider computes what: a file replaces all of these together.
CHOICE: Final = ("PREFER", "STRICT", "PER_OP", "ALLOW_VENDORS", "DENY_VENDORS")
#: What FlagGems may compute: these go before the file's list.
LISTS: Final = ("FLAGOS_WHITELIST", "FLAGOS_BLACKLIST")
TRUE: Final = frozenset({"1", "true", "on", "yes"})
FALSE: Final = frozenset({"0", "false", "off", "no"})
_PROVIDERS: Final = frozenset({"flagos", "vendor", "reference"})
_IGNORED: Final = frozenset({"oot_blacklist"})  # operators of theirs that this project has not

_lock = threading.Lock()
_said: set[str] = set()
_files: dict[tuple[str, int], dict[str, str]] = {}


def variables(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables FLAGOS_PREFER, FLAGOS_PER_OP, …, and USE_FLAGGEMS, as all of the environment together says them.

    ``given``: instead of the process' variables. Raises ConfigInvalid for a file of FLAGOS_CONFIG that cannot be read.
    """
    source = os.environ if given is None else given
    found = {name: value for name, value in source.items() if name.startswith(OWN) or name == USE_FLAGGEMS}
    said = {key: found.get(OWN + key, "").strip() for key in (*CHOICE, *LISTS)}
    _replace_by_file(OWN, source, said)
    listed = any(said[key] for key in LISTS)
    for prefix in FAMILIES:
        family = _of_family(prefix, source)
        for key in CHOICE:
            _take(said, key, family.get(key, ""), prefix)
        if not listed:  # the one list or the other, so that both are of one family
            for key in LISTS:
                _take(said, key, family.get(key, ""), prefix)
    for key, value in said.items():
        if value:
            found[OWN + key] = value
        else:
            found.pop(OWN + key, None)
    return found


def uses_flaggems(given: Mapping[str, str]) -> bool | None:
    """What USE_FLAGGEMS says; None where it is not set. As elsewhere in FlagOS, all but 1 and true is no."""
    text = given.get(USE_FLAGGEMS, "").strip().lower()
    if not text:
        return None
    if text not in TRUE | FALSE:
        warn_once(f"{USE_FLAGGEMS} is {text!r}; it can be 1 or 0, and anything else is 0")
    return text in TRUE


def warn_once(message: str) -> None:
    """Says it the first time in this process."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.warning("%s", message)


def _take(said: dict[str, str], key: str, value: str, prefix: str) -> None:
    if not value or _normal(key, value) == _normal(key, said[key]):
        return
    if said[key]:
        warn_once(f"{prefix}{key} is {value!r} and does not count: {OWN}{key}, or another before it, is {said[key]!r}")
        return
    said[key] = value


def _normal(key: str, value: str) -> object:
    """Equal for values that mean the same."""
    text = value.strip().lower()
    if key == "STRICT":
        return text in TRUE
    if key == "PREFER":
        return text
    return frozenset(part.strip() for part in text.replace(";", ",").split(",") if part.strip())


def _of_family(prefix: str, source: Mapping[str, str]) -> dict[str, str]:
    """What another plugin's variables say, in this project's words. What they hold and is no value is left out with a
    warning: they are first of all that plugin's."""
    said = {key: source.get(prefix + key, "").strip() for key in (*CHOICE, *LISTS)}
    try:
        _replace_by_file(prefix, source, said)
    except ConfigInvalid as error:
        warn_once(str(error))
    said["PREFER"] = said["PREFER"].lower()
    if said["PREFER"] and said["PREFER"] not in _PROVIDERS:
        warn_once(f"{prefix}PREFER is {said['PREFER']!r} and does not count; it can be {', '.join(sorted(_PROVIDERS))}")
        said["PREFER"] = ""
    if said["STRICT"] and said["STRICT"].lower() not in TRUE | FALSE:
        warn_once(f"{prefix}STRICT is {said['STRICT']!r} and does not count; it can be 1 or 0")
        said["STRICT"] = ""
    said["PER_OP"] = _per_op(prefix, said["PER_OP"])
    return said


def _per_op(prefix: str, text: str) -> str:
    kept = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, tokens = entry.partition("=")
        # TransformerEngine's plugin calls FlagOS' own kernels the default.
        order = ["flagos" if token.strip() == "default" else token.strip() for token in tokens.split("|")]
        if separator and all(_is_token(token) for token in order):
            kept.append(f"{name.strip()}={'|'.join(order)}")
        else:
            warn_once(
                f"{prefix}PER_OP holds {entry!r}, which does not count; entries are op=flagos|vendor:NAME|reference"
            )
    return ";".join(kept)


def _is_token(token: str) -> bool:
    kind, _, detail = token.partition(":")
    return token in _PROVIDERS or (kind in ("vendor", "impl") and bool(detail))


# ---- the file ----


def _replace_by_file(prefix: str, source: Mapping[str, str], said: dict[str, str]) -> None:
    path = source.get(prefix + CONFIG, "").strip()
    if not path or is_privileged():
        return
    config = _file(prefix + CONFIG, path)
    for key in CHOICE:
        value = config.get(key, "")
        if said[key] and _normal(key, said[key]) != _normal(key, value):
            warn_once(f"{prefix}{key} is {said[key]!r} and does not count: {prefix}{CONFIG}={path} replaces it")
        said[key] = value
    if not any(said[key] for key in LISTS):
        said["FLAGOS_BLACKLIST"] = config.get("FLAGOS_BLACKLIST", "")


def _file(variable: str, path: str) -> dict[str, str]:
    """The file's entries in the form of variables. Raises ConfigInvalid."""
    try:
        stamp = (path, Path(path).stat().st_mtime_ns)
        if stamp not in _files:
            _files[stamp] = _variables_of(variable, path, _loaded(variable, path))
        return _files[stamp]
    except OSError as error:
        raise ConfigInvalid(variable=variable, path=path, reason=error.strerror or error) from None


def _loaded(variable: str, path: str) -> Mapping[str, Any]:
    if importlib.util.find_spec("yaml") is None:
        raise ConfigInvalid(variable=variable, path=path, reason="reading it needs the package PyYAML")
    yaml: Any = importlib.import_module("yaml")
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigInvalid(variable=variable, path=path, reason=f"it is no YAML: {reason}") from None
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ConfigInvalid(variable=variable, path=path, reason="it holds no mapping")
    return config


def _variables_of(variable: str, path: str, config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for entry, value in config.items():
        reader = _ENTRIES.get(str(entry))
        if reader is not None:
            name, read = reader
            try:
                found[name] = read(value)
            except (TypeError, ValueError) as error:
                raise ConfigInvalid(variable=variable, path=path, reason=f"{entry} is {value!r}, not {error}") from None
        elif entry not in _IGNORED:
            known = ", ".join(sorted({*_ENTRIES, *_IGNORED}))
            warn_once(f"{variable}={path} has {entry!r}, which does not count; entries are {known}")
    return found


def _provider(value: Any) -> str:
    text = str(value).strip().lower()
    if text not in _PROVIDERS:
        raise ValueError(f"one of {', '.join(sorted(_PROVIDERS))}")
    return text


def _truth(value: Any) -> str:
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError("true or false")
    return "1" if value else "0"


def _names(value: Any) -> str:
    names: Iterable[Any] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    found = [str(name).strip() for name in names]
    if value is not None and not found:
        raise ValueError("a list of names")
    return ",".join(found)


def _orders(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("a mapping of operators to lists of providers")
    entries = []
    for name, order in value.items():
        tokens = order.split("|") if isinstance(order, str) else order
        if not isinstance(tokens, list) or not all(_is_token(str(token).strip()) for token in tokens):
            raise ValueError(f"a mapping to lists of flagos, vendor, vendor:NAME and reference: {name}")
        entries.append(f"{name}={'|'.join(str(token).strip() for token in tokens)}")
    return ";".join(entries)


_ENTRIES: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "prefer": ("PREFER", _provider),
    "strict": ("STRICT", _truth),
    "op_backends": ("PER_OP", _orders),
    "allow_vendors": ("ALLOW_VENDORS", _names),
    "deny_vendors": ("DENY_VENDORS", _names),
    "flagos_blacklist": ("FLAGOS_BLACKLIST", _names),
}
