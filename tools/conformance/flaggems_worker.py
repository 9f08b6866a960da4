"""Worker of the FlagGems suite: each case through the provider that programs use, on operands as they lie and on
operands of other strides, compared with ATen's results on the CPU. Started by flaggems.py."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flagos_backend.devices.target import Target
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.ir.hlo import Instruction
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Implementation, Provider, operation_of
from flagos_backend.kernels.reference.registry import Run
from tools.conformance import tensors
from tools.conformance.aten_calls import Call, load
from tools.conformance.flaggems import prepare_device
from tools.conformance.records import SIMULATED, Status
from tools.conformance.worker import serve

_MESSAGE = 1500
_PARTLY = "refused in part: guards keep some of their inputs from FlagGems"

# Where the inputs' integers are moved to: f32 has each 64th of those that follow.
_LARGE = 1 << 30
_WIDE_INTEGERS = frozenset({torch.int32, torch.int64})
_REDUCTIONS = frozenset({"amax", "amin", "cumsum", "prod", "sum"})
# They add up: what cancels leaves the roundings of what was added.
_SUMS = frozenset(
    {
        *("addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"),
        *("conv1d", "conv2d", "conv3d", "convolution", "cumsum", "mean", "sum"),
    }
)
# By as many bits as there are none.
_SHIFTS = frozenset({"bitwise_left_shift", "bitwise_right_shift"})
# What FlagGems' functions say of tensors of the host, and what interpreted kernels cannot be given.
_COMPILED_ONLY = re.compile("CUDA (tensor|device)|CPU only|a reinterpreted buffer")


def flaggems_of(instruction: Instruction) -> Implementation:
    """FlagGems' implementation of an instruction."""
    (found,) = (i for i in implementations_of(operation_of(instruction)) if i.provider is Provider.FLAGOS)
    return found


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Equal elements, every second place in memory."""
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


@dataclass(frozen=True)
class Runner:
    """``cases``: the calls of each."""

    cases: dict[str, list[Call]]
    target: Target
    device: torch.device

    def __call__(self, name: str) -> tuple[Status, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _joined([self.judge(call) for call in self.cases[name]])

    def judge(self, call: Call) -> tuple[Status, str]:
        """Whether FlagGems computes what ATen does."""
        expected = call.run()
        if not _tensors(expected):
            return Status.NOT_APPLICABLE, "it returns no tensor"
        if self.is_simulated and any(t.dtype is torch.bfloat16 for t in (*call.tensors, *_tensors(expected))):
            return Status.SKIPPED, "Triton's interpreter computes with the bits of bfloat16"
        try:
            instruction = call.instruction(expected)
        except NoLoweringError as error:
            return Status.NOT_APPLICABLE, f"it cannot be compiled: {error}"
        implementation = flaggems_of(instruction)
        reason = implementation.unsupported(instruction, self.target)
        if reason:
            return Status.REFUSED, reason
        if not self.is_simulated and implementation.tunes_itself(instruction):
            return Status.SKIPPED, "it tunes itself for seconds a shape"
        (variant,) = implementation.variants(instruction, self.target)
        for tried, operands in self._trials(call):
            try:
                given = [tensor.detach().clone().to(self.device) for tensor in operands]
                found = tree_leaves(variant.kernel(Run(device=self.device), *given))
            except Exception as error:  # whatever it raises is the result of the test
                cause = _cause(error)
                if self.is_simulated and _COMPILED_ONLY.search(cause):
                    return Status.NOT_APPLICABLE, f"Triton's interpreter cannot: {cause}"
                return Status.FAILED, f"{call} raises {cause}"
            difference = _difference([tensor.cpu() for tensor in found], tried)
            if difference:
                large = " of large integers" if tried is not call else ""
                return Status.FAILED, f"{call} differs{large}: {difference}"
        return Status.PASSED, ""

    def _trials(self, call: Call) -> Iterator[tuple[Call, Sequence[torch.Tensor]]]:
        """What is computed, with the operands of which it is."""
        yield call, call.tensors
        yield call, [spread(tensor) for tensor in call.tensors]
        if _is_of_values(call) and any(map(_is_wide_integer, call.tensors)):
            moved = call.mapped(lambda leaf: leaf + _LARGE if _is_wide_integer(leaf) else leaf)
            yield moved, moved.tensors

    @property
    def is_simulated(self) -> bool:
        return self.device.type == "cpu"

    def probe(self) -> None:
        """Raises if the device computes no more."""
        (torch.ones(2, device=self.device) + 1).sum().item()


def _is_of_values(call: Call) -> bool:
    """Whether integers of it are values, and neither places nor sizes."""
    operator = call.name.partition(".")[0]
    return operator in _REDUCTIONS or (torch.Tag.pointwise in call.operator.tags and operator not in _SHIFTS)


def _is_wide_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDE_INTEGERS


def _difference(found: Sequence[torch.Tensor], call: Call) -> str:
    """From ATen's results, or, where that is less, from the same in wider types: ATen's may be the worse ones."""

    def truth() -> list[torch.Tensor]:
        return _tensors(tensors.truth_of(call.run))

    expected = _tensors(call.run())
    if not any(tensor.dtype in tensors.WIDER for tensor in expected):
        return tensors.compare(found, expected)
    difference = tensors.compare(found, expected, truth, scale=_magnitude(call))
    if not difference:
        return ""
    exact = [t.to(e.dtype) for t, e in zip(truth(), expected, strict=True)]
    return difference if tensors.compare(found, exact) else ""


def _magnitude(call: Call) -> float:
    """The largest sum of what is added up, each with a positive sign; 0 of what adds nothing up."""
    if call.name.partition(".")[0] not in _SUMS:
        return 0.0
    sums = _tensors(call.run(lambda leaf: leaf.abs() if isinstance(leaf, torch.Tensor) else leaf))
    largest = [torch.nan_to_num(total.double(), 0.0, 0.0).max().item() for total in sums if total.numel()]
    return max(largest, default=0.0)


def _tensors(value: Any) -> list[torch.Tensor]:
    """On the host, also where a call names the device of its result."""
    return [leaf.cpu() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _cause(error: BaseException) -> str:
    """The error that began it: the interpreter, and FlagOS, wrap what a kernel raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _joined(outcomes: Sequence[tuple[Status, str]]) -> tuple[Status, str]:
    """Of a case, of those of its calls."""
    by_status = {status: [message for each, message in outcomes if each is status] for status in Status}
    if by_status[Status.FAILED]:
        return Status.FAILED, "\n".join(dict.fromkeys(by_status[Status.FAILED]))[:_MESSAGE]
    if by_status[Status.PASSED]:
        return Status.PASSED, _PARTLY if by_status[Status.REFUSED] else ""
    status = next(s for s in (Status.REFUSED, Status.SKIPPED, Status.NOT_APPLICABLE) if by_status[s])
    return status, "\n".join(dict.fromkeys(by_status[status]))[:_MESSAGE]


def _target(device: str) -> tuple[Target, torch.device]:
    if device == SIMULATED.kind:
        return Target("cpu", SIMULATED.kind), torch.device("cpu")
    from flagos_backend.devices.accelerator import TorchAccelerator

    accelerator = TorchAccelerator(device, 0)
    return accelerator.target, accelerator.device


if __name__ == "__main__":
    prepare_device(sys.argv[2])
    runner = Runner(load(sys.argv[1]), *_target(sys.argv[2]))
    with tensors.exact_products():
        serve(runner, runner.probe)
