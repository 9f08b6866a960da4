"""What is known of the programs of this process, for front ends, which do not know the stages that compile. bridge.py
says who answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_answers: Callable[[str], Any] | None = None


def answered_by(function: Callable[[str], Any]) -> None:
    """``function(fingerprint)``: compile/explanation.py's Explanation, or None of programs that it does not know."""
    global _answers
    _answers = function


def explanation(fingerprint: str) -> Any:
    """The Explanation of a program; None where another backend compiled it, or a process of its own."""
    return None if _answers is None else _answers(fingerprint)
