"""FlagGems for the operators of eager PyTorch programs. README.md begins."""

from flagos_backend.gems.switch import follow_environment, gems, reports

__all__ = ["follow_environment", "gems", "reports"]
