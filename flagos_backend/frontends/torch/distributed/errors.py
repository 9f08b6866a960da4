"""Errors of torch.distributed on the device flagos: part 66x of the catalogue, and 504 and 505 as PyTorch's users
catch them."""

from __future__ import annotations

from flagos_backend import errors
from flagos_backend.errors import FlagosBackendError, StatusCode


class NoBackendInGroup(FlagosBackendError, RuntimeError):
    number = 664
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The process group '{group}' has no backend for tensors of the device flagos, which {inner} computes for; it "
        "has those for {known}. At {place}. Make the group with 'cpu:gloo,flagos:flagos', or without naming a backend."
    )


class SeveralDevices(FlagosBackendError, ValueError):
    number = 665
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "A collective takes tensors of one device, and was given some of {devices}. At {place}. Move them to flagos."
    )


class ReductionUnsupported(FlagosBackendError, TypeError):
    number = 666
    code = StatusCode.UNIMPLEMENTED
    template = (
        "Tensors of {dtype} cannot be reduced by {reduction} over {backend}. At {place}. Reduce them as another dtype."
    )


class CollectiveFailed(errors.CollectiveFailed, RuntimeError):
    """FLAGOS-504 of an eager collective."""


class CollectiveOverdue(errors.CollectiveOverdue, RuntimeError):
    """FLAGOS-505 of an eager collective."""
