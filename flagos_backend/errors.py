"""The backend's catalogue of errors: class, status code, message template (fact, place, cure)."""

from __future__ import annotations


class FlagosError(Exception):
    """An error with the status code that the plugin ABI carries (the numbers of absl::StatusCode)."""

    code = 2


class UnsupportedOpcode(FlagosError):
    """An instruction that no kernel computes."""

    code = 12

    def __init__(self, opcode: str, place: str) -> None:
        super().__init__(
            f"the flagos backend has no kernel for {opcode}, at {place}; avoid it or run the program on cpu"
        )


class UnsupportedElementType(FlagosError):
    """An instruction that no kernel computes on this element type."""

    code = 12

    def __init__(self, opcode: str, element_type: str, place: str) -> None:
        super().__init__(
            f"the flagos backend has no kernel for {opcode} on {element_type}, at {place}; convert it first"
        )
