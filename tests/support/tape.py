"""A recording of what torch's operators do to memory, with loops and branches that data decides: a graph of a device,
over host memory. Played again it reads and writes the same places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_GARBAGE = 0xA5
# They bring a value to the host, which a graph cannot.
_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


@dataclass(frozen=True, slots=True)
class Kernel:
    """``call`` reads and writes ``tensors``, or others that are like them."""

    name: str
    call: Callable[[Sequence[torch.Tensor]], None]
    tensors: Sequence[torch.Tensor]

    def play(self) -> None:
        self.call(self.tensors)


@dataclass(slots=True)
class Body:
    """``again``: for a loop, what says whether there is another iteration."""

    flag: torch.Tensor
    nodes: list[Kernel | Body] = field(default_factory=list)
    again: torch.Tensor | None = None
    iterations: int = 0

    def play(self) -> None:
        holds = bool(self.flag)
        self.iterations = 0
        while holds:
            _play(self.nodes)
            self.iterations += 1
            holds = self.again is not None and bool(self.again)


def _play(nodes: Sequence[Kernel | Body]) -> None:
    for node in nodes:
        node.play()


class Tape(TorchDispatchMode):
    """Records what is done while it is entered. Memory that is allocated meanwhile stays."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Kernel | Body] = []
        self._into = self.nodes
        self._foreign: dict[int, torch.UntypedStorage] = {}
        self._own: dict[int, torch.UntypedStorage] = {}

    def add(self, kernel: Kernel) -> None:
        self._into.append(kernel)

    @property
    def own_storages(self) -> list[torch.UntypedStorage]:
        return list(self._own.values())

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own

    def play(self) -> None:
        """Whatever lies in memory of its own was not there when it was recorded."""
        for storage in self._own.values():
            storage.fill_(_GARBAGE)
        with torch.inference_mode():
            _play(self.nodes)

    def run_if(self, chosen: torch.Tensor, body: Callable[[], None]) -> None:
        with self._inside(Body(chosen)):
            body()

    def run_while(self, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        with self._inside(Body(another)) as loop:
            loop.again = body()

    @contextlib.contextmanager
    def _inside(self, body: Body) -> Iterator[Body]:
        self._into.append(body)
        around, self._into = self._into, body.nodes
        yield body
        self._into = around

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = operator.name().split(".")[0]
        if name in _READS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        leaves, tree = tree_flatten((tuple(args), dict(kwargs or {})))
        outcome = operator(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._note([leaves[place] for place in places], outputs)

        def call(tensors: Sequence[torch.Tensor]) -> None:
            replaced = list(leaves)
            for place, tensor in zip(places, tensors, strict=False):
                replaced[place] = tensor
            again_args, again_kwargs = tree_unflatten(replaced, tree)
            again = tree_leaves(operator(*again_args, **again_kwargs))
            results = [leaf for leaf in again if isinstance(leaf, torch.Tensor)]
            for result, output in zip(results, tensors[len(places) :], strict=True):
                if result.data_ptr() != output.data_ptr():
                    output.copy_(result)

        self.add(Kernel(name, call, [*(leaves[place] for place in places), *outputs]))
        return outcome

    def _note(self, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for tensor in operands:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._foreign[storage._cdata] = storage
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._foreign:
                self._own[storage._cdata] = storage

    def generated(self, kernel: Callable[..., None], inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Runs and records a kernel that is no operator of torch."""
        count = len(inputs)

        def call(tensors: Sequence[torch.Tensor]) -> None:
            kernel(list(tensors[:count]), list(tensors[count:]))

        with _disable_current_modes():
            kernel(inputs, outputs)
        self.add(Kernel("generated", call, [*inputs, *outputs]))
