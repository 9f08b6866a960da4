"""Windows as HLO text."""

from __future__ import annotations

from flagos_backend.ir.attributes import WindowDimension


def window_text(window: tuple[WindowDimension, ...]) -> str:
    def joined(values: list[object]) -> str:
        return "x".join(map(str, values))

    return (
        f"window={{size={joined([w.size for w in window])} stride={joined([w.stride for w in window])}"
        f" pad={joined([f'{w.padding_low}_{w.padding_high}' for w in window])}"
        f" lhs_dilate={joined([w.base_dilation for w in window])}"
        f" rhs_dilate={joined([w.window_dilation for w in window])}}}"
    )
