"""torch.compile on PyTorch's own device of the accelerator; FLAGOS_TEST_DEVICE names its type."""

from __future__ import annotations

import os

os.environ["FLAGOS_DEVICE"] = os.environ.get("FLAGOS_TEST_DEVICE", "cuda")
