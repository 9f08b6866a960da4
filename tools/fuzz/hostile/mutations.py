"""Changes to bytes and to JSON trees, and the numbers and texts that readers fail on. First stage."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, Final

#: Limits of the fixed-width types and their neighbours, and what is far from both ends.
_BITS: Final = (0, 7, 8, 15, 16, 31, 32, 40, 62, 63, 64)
NUMBERS: Final = tuple(
    sorted({s * ((1 << bits) + by) for bits, by, s in itertools.product(_BITS, (-1, 0, 1), (1, -1))})
)
TEXTS: Final = (
    *("", "\0", "a\0b", "\x1b[2J", "\ud800", "é" * 300, "x" * 300, "x" * 70_000, "../" * 40, "/", "%s%n", "0" * 5000),
    *(
        "1.0.0",
        "-1",
        "1e999",
        "NaN",
        "f32",
        "(" * 500,
        "[" * 5000,
        "{}",
        '{"a":' * 2000,
        "1.0.0" * 50,
        "libm.so.6",
        "\n",
    ),
)


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes or bits are others, or a piece is left out, repeated, moved, overwritten; or the end is missing."""
    changed = bytearray(data)
    for _ in range(1 + rng.randrange(4)):
        if not changed:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(9)))
        at, length = rng.randrange(len(changed)), rng.choice((1, 2, 4, 8, 16, 64, 1024))
        match rng.randrange(8):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                source = rng.randrange(len(changed))
                changed[at : at + length] = changed[source : source + length]
            case 5:
                width = rng.choice((2, 4, 8))
                value = rng.choice(NUMBERS) % (1 << 8 * width)
                changed[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 6:
                changed[at:at] = bytes((rng.choice((0, 0x41, 0xFF)),)) * length
            case _:
                if not rng.randrange(3):
                    del changed[at:]
    return bytes(changed)


# ---- JSON ----

#: What JSON's text can say and Python's trees cannot, or not without their own limits.
_VERBATIM: Final = (
    *("NaN", "-Infinity", "Infinity", "1e999", "-0", "1" * 5000, "1" + "0" * 400 + ".5", "1e-400", ""),
    *("[" * depth + "]" * depth for depth in (14, 17, 300, 20_000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (14, 17, 300, 10_000)),
)


class _Trees:
    """Makes JSON values; what only a text can say stands in them as a mark."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._marks: dict[str, str] = {}

    def value(self, depth: int = 0) -> Any:
        """A value of any type; some are long, deep, or beyond what a number may be."""
        rng = self._rng
        match rng.randrange(9):
            case 0:
                return rng.choice((None, True, False))
            case 1 | 2:
                return rng.choice(NUMBERS)
            case 3:
                return rng.choice((0.5, -1e300, 1e-320, 1e16))
            case 4 | 5:
                return rng.choice(TEXTS)
            case 6:
                mark = f"@{len(self._marks)}@"
                self._marks[mark] = rng.choice(_VERBATIM)
                return mark
            case 7 if depth < 3:
                return [self.value(depth + 1) for _ in range(rng.choice((0, 1, 3, 2 if depth else 300)))]
            case _ if depth < 3:
                return {rng.choice(TEXTS): self.value(depth + 1) for _ in range(rng.randrange(4))}
        return 0

    def change(self, tree: list[Any]) -> None:
        """One value, key or branch of what the list holds."""
        rng = self._rng
        container, key = rng.choice(_places(tree))
        old = container[key]
        match rng.randrange(7):
            case 0:
                other, other_key = rng.choice(_places(tree))
                container[key] = json.loads(json.dumps(other[other_key]))
            case 1 if isinstance(container, dict):
                container[rng.choice((*TEXTS, key + "s", key[:-1], key.upper()))] = container.pop(key)
            case 2 if container is not tree:
                del container[key]
            case 3 if isinstance(old, str):
                at = rng.randrange(len(old) + 1)
                container[key] = old[:at] + rng.choice(TEXTS) + old[at:]
            case 4 if isinstance(old, int | float):
                container[key] = old + rng.choice((-1, 1, 1 << 31, -(1 << 40)))
            case _:
                container[key] = self.value()

    def text(self, tree: list[Any]) -> bytes:
        (value,) = tree
        text = json.dumps(value, ensure_ascii=self._rng.random() < 0.7)
        for mark, verbatim in self._marks.items():
            text = text.replace(f'"{mark}"', verbatim)
        return text.encode("utf-8", "surrogatepass")


def changed_json(rng: random.Random, text: bytes) -> bytes:
    """The JSON text with values, keys and whole branches changed, a key twice, or bytes changed as well."""
    trees, tree = _Trees(rng), [json.loads(text)]
    for _ in range(1 + rng.randrange(3)):
        trees.change(tree)
    changed = trees.text(tree)
    if not rng.randrange(10) and changed.startswith(b'{"'):
        end = changed.find(b":")
        changed = changed[: end + 1] + b"1, " + changed[1:]
    return changed_bytes(rng, changed) if not rng.randrange(6) else changed


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below the tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < 2000:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found
