"""Errors of torch.compile(backend="flagos"): part 65x of the backend's catalogue."""

from __future__ import annotations

from flagos_backend.errors import FlagosBackendError, StatusCode


class UnknownOption(FlagosBackendError):
    number = 651
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "torch.compile has no {kind} {value} for the backend flagos. At torch.compile. Leave it out, or choose one of: "
        "{known}."
    )


class UnsupportedTensor(FlagosBackendError):
    number = 652
    code = StatusCode.UNIMPLEMENTED
    template = (
        "A tensor with {fact} cannot enter a program. At {place}. Convert it first, or keep this part out of the graph "
        "with torch.compiler.disable."
    )


class UnsupportedNode(FlagosBackendError):
    number = 653
    code = StatusCode.UNIMPLEMENTED
    template = (
        "{target} cannot be part of a program: {reason}. At {place}. Keep it out of the graph with "
        "torch.compiler.disable."
    )


class FallbackRefused(FlagosBackendError):
    number = 654
    code = StatusCode.UNIMPLEMENTED
    template = (
        "{target} has no lowering and would run as itself, which options={{'fallback': 'error'}} refuses. At {place}. "
        "Allow it, or write the model without it."
    )


class BackendUnavailable(FlagosBackendError):
    number = 655
    code = StatusCode.UNAVAILABLE
    template = "torch.compile found no backend: {reason} At torch.compile. See `flagos doctor`."


class UnexpectedResult(FlagosBackendError):
    number = 656
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "An operator was traced to give {traced} and gave {given}. At {place}. Its fake implementation must say what "
        "the operator does: sizes, dtype, strides, and that no result shares memory with an argument."
    )


class UndeclaredWrite(FlagosBackendError):
    number = 657
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "An operator wrote to its argument {argument}, which its schema does not name as written. At {place}. "
        "Declare it: mutates_args of torch.library.custom_op, or Tensor(a!) in the schema."
    )


class ArtifactRefused(FlagosBackendError):
    number = 658
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "A saved compiled graph {fact}. At the load of an artifact of torch.compile. Compile the model again, and "
        "save it with the versions that load it."
    )


class NoLoweringError(Exception):
    """This case of an operator has no HLO form: it runs as itself, and no user meets this."""
