"""Takes loops and branches that data decides into a graph under capture, as conditional nodes: what capture.py gives
those of control_flow.py. The driver's part is native/cuda/conditionals.cc."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.accelerator.memory import BodyMemory

# The driver's (node, handle, body graph): as Captures::Conditional of native/replay.h.
ConditionalNode = tuple[int, int, int]
# Of the device at the first address; streams and flags are addresses too. All raise RuntimeError.
# Fails where graphs have no such nodes; before any capture.
NativePrepare = Callable[[int], None]
# (accelerator, stream, flag, repeats, inside): a node on ``stream``, whose body is captured on ``inside`` from then on
NativeOpen = Callable[[int, int, int, int, int], ConditionalNode]
# (accelerator, inside, handle, flag): ends the body, which runs again if the flag holds; no flag: 0
NativeClose = Callable[[int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class NativeConditionals:
    """``accelerator``: the address of the device's native side."""

    accelerator: int
    prepare: NativePrepare
    open: NativeOpen
    close: NativeClose


class ConditionalRecorder:
    """Conditionals of a launch that is being captured. ``nodes``: in the order they were captured in, those inside
    others too. ``has_lost_body``: whether the driver gave up a body, and destroyed it."""

    def __init__(self, native: NativeConditionals, memory: BodyMemory, device: torch.device) -> None:
        self.nodes: list[ConditionalNode] = []
        self.has_lost_body = False
        self._native = native
        self._memory = memory
        self._device = device
        self._depth = 0  # how many bodies what is captured now is in

    def run_if(self, chosen: torch.Tensor, body: Callable[[], None]) -> None:
        with self._node(chosen, repeats=False) as (inside, handle):
            body()
            self._native.close(self._native.accelerator, inside, handle, 0)

    def run_while(self, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        with self._node(another, repeats=True) as (inside, handle):
            again = body()
            self._native.close(self._native.accelerator, inside, handle, again.data_ptr())

    @contextlib.contextmanager
    def _node(self, flag: torch.Tensor, repeats: bool) -> Iterator[tuple[int, int]]:
        """The stream that the body is captured on, and the node's handle."""
        native, around = self._native, torch.cuda.current_stream(self._device).cuda_stream
        stream = self._memory.stream(self._depth)
        inside = stream.cuda_stream
        node = native.open(native.accelerator, around, flag.data_ptr(), int(repeats), inside)
        self.nodes.append(node)
        # Memory belongs to the thread, so that bodies inside this one have it already.
        memory = contextlib.nullcontext() if self._depth else self._memory.pool.entered()
        self._depth += 1
        try:
            with self._ended_if_it_breaks(inside), torch.cuda.stream(stream), memory:
                yield inside, node[1]
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def _ended_if_it_breaks(self, inside: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            try:
                self._native.close(self._native.accelerator, inside, 0, 0)
            except RuntimeError:  # what broke the capture is what is reported
                self.has_lost_body = True
            raise
