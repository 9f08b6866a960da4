"""Discrete Fourier transforms over the last dimensions. Inverse transforms divide by the length, as HLO says."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.attributes import FftAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import FftType, Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference import storage
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.process.torch_loading import Tensor, torch

_TRANSFORMS: dict[FftType, Callable[..., Tensor]] = {
    FftType.FFT: torch.fft.fftn,
    FftType.IFFT: torch.fft.ifftn,
    FftType.RFFT: torch.fft.rfftn,
    FftType.IRFFT: torch.fft.irfftn,
}


@kernel(Opcode.FFT, storage=Storage.SHARED)
def prepare_fft(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(FftAttributes)
    operand, result = instruction.operands[0].shape, instruction.shape
    assert isinstance(operand, ArrayShape)
    assert isinstance(result, ArrayShape)
    if 0 in (operand.num_elements, result.num_elements):
        dtype = storage.dtype_of(result.element_type)
        return lambda run, x: torch.zeros(result.dims, dtype=dtype, device=x.device)
    transform = _TRANSFORMS[attributes.fft_type]
    lengths = attributes.lengths
    dims = tuple(range(result.rank - len(lengths), result.rank))

    def run_fft(_: Run, x: Tensor) -> Tensor:
        return transform(x, s=lengths, dim=dims)

    return run_fft
