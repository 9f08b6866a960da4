"""Errors of the JAX front end: part 6xx of the backend's catalogue."""

from __future__ import annotations

from flagos_backend.errors import FlagosBackendError, StatusCode


class JaxApiChanged(FlagosBackendError):
    number = 601
    code = StatusCode.FAILED_PRECONDITION
    template = (
        "JAX {version} does not have {name} as this front end knows it: {reason}. At {place}. Install a release of JAX "
        "from 0.10 to 0.12, or a newer flagos."
    )


class MalformedCompileOptions(FlagosBackendError):
    number = 602
    code = StatusCode.INVALID_ARGUMENT
    # The first sentence is what PJRT's own conformance test looks for.
    template = (
        "PJRT_Client_Compile: failed to deserialize CompileOptionsProto. {reason}. At the compile options of the "
        "program. Pass what jaxlib's CompileOptions serializes to."
    )


class UnknownProgramFormat(FlagosBackendError):
    number = 603
    code = StatusCode.INVALID_ARGUMENT
    template = "Unknown program format '{format}'. At compile. Pass a program in the format 'mlir' or 'hlo'."


class MalformedGraph(FlagosBackendError):
    number = 604
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "The program is not valid {format}: {reason}. At compile. Pass a StableHLO artifact of jaxlib {version} or one "
        "that it can read."
    )


class UnknownCompileOption(FlagosBackendError):
    number = 605
    code = StatusCode.INVALID_ARGUMENT
    # The first sentence is XLA's, so that programs which catch it keep working.
    template = (
        "No such compile option: '{name}'. At compiler_options of the program. Leave it out; flagos knows {known}."
    )


class InvalidCompileOption(FlagosBackendError):
    number = 606
    code = StatusCode.INVALID_ARGUMENT
    template = "The compile option is refused: {reason}. At compiler_options of the program. Correct its value."


class UnsupportedPartitioning(FlagosBackendError):
    number = 607
    code = StatusCode.UNIMPLEMENTED
    template = "A program for {partitions} partitions is not supported: {reason}. At compile. {cure}."


class PartitioningFailed(FlagosBackendError):
    number = 608
    code = StatusCode.INVALID_ARGUMENT
    template = (
        "XLA's partitioner refuses the program for {partitions} partitions: {reason}. At compile. Correct the "
        "shardings that the reason names."
    )


class UnsupportedArrayLayout(FlagosBackendError):
    number = 609
    code = StatusCode.UNIMPLEMENTED
    template = (
        "The layout {layout} is not supported: flagos keeps arrays row major. At {place}. Ask for the default layout."
    )


class HostCallbackGone(FlagosBackendError):
    number = 610
    code = StatusCode.NOT_FOUND
    template = (
        "The Python function behind host callback {id} is not in this process. At {place}. Compile the program in the "
        "process that runs it: programs with callbacks cannot be carried over."
    )


class HostCallbackFailed(FlagosBackendError):
    number = 611
    code = StatusCode.INTERNAL
    template = "A host callback raised {exception}. At the traceback below. Correct the function.\n{traceback}"


class UnsupportedParameter(FlagosBackendError, NotImplementedError):
    number = 612
    code = StatusCode.UNIMPLEMENTED
    template = "{primitive} with {parameter} is not supported on flagos: {reason}. At its lowering. {cure}."
