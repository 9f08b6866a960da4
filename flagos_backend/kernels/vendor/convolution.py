"""convolution through ATen: the maker's library, f16 and bf16 on its matrix units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import ConvolutionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Precision
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.convolution import Engine, prepare_with


def unsupported(instruction: Instruction, target: Target) -> str:
    return "the host has no vendor" if target.is_host else ""


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    # HLO's default precision lets f32 be rounded to TF32, as XLA does on GPUs.
    allowed = instruction.attributes_as(ConvolutionAttributes).precision is Precision.DEFAULT
    forward: Callable[..., Any] = torch.convolution
    backward: Callable[..., Any] = torch.ops.aten.convolution_backward
    if target.device_type == "cuda":
        forward, backward = _with_tensor_float(forward, allowed), _with_tensor_float(backward, allowed)
    engine = Engine(forward, halves=target.device_type != "cpu", backward=backward)
    return (Variant("", prepare_with(instruction, engine)),)


def _with_tensor_float(function: Callable[..., Any], allowed: bool) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        switch = torch.backends.cudnn
        before = switch.allow_tf32
        switch.allow_tf32 = allowed
        try:
            return function(*arguments)
        finally:
            switch.allow_tf32 = before

    return call
