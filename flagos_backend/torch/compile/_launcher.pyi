from collections.abc import Callable
from typing import Any, NoReturn

import torch

class Launcher:
    """Runs one executable on tensors; torch/native/launcher.cc says how. May be used by several threads at once.

    ``handles``: addresses of the function table, context, memory and executable, which must outlive this object.
    ``inputs``: for each parameter (position among the inputs, or a constant tensor; a tensor of its dtype and device;
    its element type; sizes of the row-major array in memory; sizes; strides). ``results``: for each output (a tensor of
    its dtype and device, sizes, strides). ``wrap(tensor)``: a tensor of another device over a host tensor's memory.
    ``adapt(number, tensor)``: an input that does not lie as it should, laid out. ``fail(error)`` raises for an error
    handle, which it takes.
    """

    def __init__(
        self,
        handles: tuple[int, int, int, int],
        inputs: tuple[tuple[int | torch.Tensor, torch.Tensor, int, *tuple[tuple[int, ...], ...]], ...],
        results: tuple[tuple[torch.Tensor, *tuple[tuple[int, ...], ...]], ...],
        wrap: Callable[[torch.Tensor], torch.Tensor],
        adapt: Callable[[int, torch.Tensor], torch.Tensor],
        fail: Callable[[int], NoReturn],
        /,
    ) -> None: ...
    def run(self, inputs: list[Any], /) -> list[torch.Tensor]:
        """The program's outputs, once it has ended. Inputs that are numbers are passed over."""
