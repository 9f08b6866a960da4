"""Errors of the PyTorch device: part 66x of the backend's catalogue."""

from __future__ import annotations

from flagos_backend.errors import FlagosBackendError, StatusCode


class DeviceUnavailable(FlagosBackendError, RuntimeError):
    number = 661
    code = StatusCode.UNAVAILABLE
    template = "PyTorch's device flagos cannot be used: {reason} At its first use. See `flagos doctor`."


class NoInnerDevice(FlagosBackendError, RuntimeError):
    number = 662
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "The backend does not say which of PyTorch's devices computes for its own. At {place}. Have it give the "
        "device the attribute {attribute}."
    )


class BufferRefused(FlagosBackendError, RuntimeError):
    number = 663
    code = StatusCode.INVALID_ARGUMENT
    template = "A tensor and a buffer cannot share {fact}. At flagos_backend.frontends.torch.device.buffers. {cure}"
