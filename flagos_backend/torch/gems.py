"""Public: FlagGems for the operators of eager programs; torch.flagos.gems where the device flagos is."""

from flagos_backend.gems import gems, reports

__all__ = ["gems", "reports"]
