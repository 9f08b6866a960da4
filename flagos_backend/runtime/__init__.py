"""Runtime: compiled programs (plan.py) and the bridge that native code calls. Last stage of the pipeline."""

from flagos_backend.runtime import torch_loading

__all__ = ["torch_loading"]
