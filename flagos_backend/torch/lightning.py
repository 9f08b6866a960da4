"""Public: ``strategy`` is what Lightning's Trainer takes."""

from flagos_backend.frontends.torch.lightning import strategy

__all__ = ["strategy"]
