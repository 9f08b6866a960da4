"""Public: the fusible operations."""

from flagos_backend.frontends.torch.ops import *  # noqa: F403
from flagos_backend.frontends.torch.ops import __all__ as __all__
