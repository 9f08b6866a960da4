"""convolution through ATen: the vendor's library, f16 and bf16 on its matrix units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flagos_backend.devices import tensor_float
from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import ConvolutionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Precision
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.convolution import Engine, prepare_with
from flagos_backend.kernels.reference.movement import array_shape
from flagos_backend.kernels.vendor.dot import MAX_CONTRACTED_INTEGERS, integer_product
from flagos_backend.process.torch_loading import torch


def unsupported(instruction: Instruction, target: Target) -> str:
    if target.is_host:
        return "the host has no vendor"
    attributes = instruction.attributes_as(ConvolutionAttributes)
    weight = array_shape(instruction.operands[1])
    window = weight.num_elements // max(1, weight.dims[attributes.kernel_output_feature])
    if weight.element_type.is_integer and window > MAX_CONTRACTED_INTEGERS:
        return f"sums of {window} integer products are not exact in f64"
    return ""


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    forward: Callable[..., Any] = torch.convolution
    backward: Callable[..., Any] = torch.ops.aten.convolution_backward
    # HLO's default precision lets f32 be rounded to TF32, as XLA does on GPUs, and so does cuDNN by default.
    may_round = instruction.attributes_as(ConvolutionAttributes).precision is Precision.DEFAULT
    if target.has_tensor_float_switches and not may_round:
        forward, backward = _exact_convolution, _exact_backward
    # Accelerators have no integer matrix products; one of 32 bits needs fewer digits.
    width = ElementType.S64 if array_shape(instruction).element_type.bits > 32 else ElementType.S32
    integers = integer_product(ElementType.S64, ElementType.S64, width)
    half_floats = target.device_type != "cpu"
    engine = Engine(forward, half_floats=half_floats, backward=backward, multiply_integers=integers)
    return (Variant("", prepare_with(instruction, engine)),)


def _exact_convolution(*arguments: Any) -> Any:
    """torch.convolution, which asks the process's switches, by the one function that is told."""
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    with tensor_float.products(False):  # what cuDNN has not is a matrix product
        return torch.ops.aten._convolution(*arguments, cudnn.benchmark, deterministic, cudnn.enabled, False)


def _exact_backward(*arguments: Any) -> Any:
    with tensor_float.exact_convolutions():
        return torch.ops.aten.convolution_backward(*arguments)
