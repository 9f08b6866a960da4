"""What the backend may run on: the host CPU, or accelerators behind one interface. Below every pipeline stage."""

from flagos_backend.devices.target import HOST, Target

__all__ = ["HOST", "Target"]
