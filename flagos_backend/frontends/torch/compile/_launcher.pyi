from collections.abc import Callable
from typing import Any, NoReturn

import torch

class Launcher:
    """Runs one executable on tensors, from any thread; frontends/torch/native/launcher.cc says how.

    ``handles``: addresses of the function table, context, memory and executable, which must outlive this object.
    ``device``: the address of the device to run on, or 0 for the one that the executable names; ``prototype``: a tensor
    of PyTorch's in its memory.
    ``inputs``: for each parameter (position among the inputs, or a constant tensor; a tensor of its dtype and device;
    its element type; sizes of the row-major array in memory; sizes; strides). ``results``: for each output (a tensor of
    its dtype and device; sizes; strides; the number of the input whose memory it is written to, or -1).
    ``move(number, tensor)``: a result that belongs on another device, there. ``adapt(number, tensor)``: an input that
    does not lie as it should, laid out. ``fail(error)`` raises for an error handle, which it takes.
    ``observe(launch, inputs)``: as ``launch(inputs)``; ``run`` is that while PyTorch's profiler listens.
    """

    def __init__(
        self,
        handles: tuple[int, int, int, int],
        device: int,
        prototype: torch.Tensor,
        inputs: tuple[tuple[int | torch.Tensor, torch.Tensor, int, *tuple[tuple[int, ...], ...]], ...],
        results: tuple[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int], ...],
        move: Callable[[int, torch.Tensor], torch.Tensor],
        adapt: Callable[[int, torch.Tensor], torch.Tensor],
        fail: Callable[[int], NoReturn],
        observe: Callable[[Callable[[list[Any]], list[Any]], list[Any]], list[Any]],
        /,
    ) -> None: ...
    def run(self, inputs: list[Any], /) -> list[Any]:
        """The program's outputs, None for those that were written to an input: on the host once it has ended, else in
        the order of the device's stream for programs. Inputs that are numbers are passed over."""
    def launch(self, inputs: list[Any], /) -> list[Any]:
        """As ``run``, unseen by PyTorch's profiler."""
