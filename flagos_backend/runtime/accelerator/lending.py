"""Arguments and outputs that collectives of a recorded plan read and write where they lie. A transport may note their
addresses where nobody patches them: it is given others, which have to be found in the graph. For capture.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.types import ArrayShape
from flagos_backend.process.torch_loading import Tensor, torch
from flagos_backend.runtime.plan import Plan, Step


class LentArrays:
    """The ``arrays`` of one capture, in storages of their own, and by number what stands in for some of them: an array
    at another address, which one operation is given. ``lent``: the numbers of those that were. Places of
    collectives/communicator.py."""

    def __init__(self, arrays: Sequence[Any], stand_ins: Mapping[int, Tensor]) -> None:
        self.arrays = arrays
        self._stand_ins = stand_ins
        self._numbers = {_storage(array): n for n, array in enumerate(arrays) if isinstance(array, torch.Tensor)}
        self._lent: set[int] = set()

    @property
    def lent(self) -> frozenset[int]:
        return frozenset(self._lent)

    def moves(self, array: Tensor) -> bool:
        return _storage(array) in self._numbers

    def stand_in(self, array: Tensor) -> Tensor | None:
        number = self._numbers[_storage(array)]
        whole, stand_in = self.arrays[number], self._stand_ins.get(number)
        is_plain = array.is_contiguous() and not array.is_conj() and not array.is_neg()
        is_whole = array.data_ptr() == whole.data_ptr() and array.nbytes == whole.nbytes
        if stand_in is None or number in self._lent or not is_whole or not is_plain or not array.nbytes:
            return None
        self._lent.add(number)
        return stand_in.view(-1).view(array.dtype).view(array.shape)

    def stands_for(self, result: Tensor, array: Tensor) -> bool:
        number = self._numbers.get(_storage(array))
        if number not in self._lent:
            return False
        assert number is not None
        return result.data_ptr() == self._stand_ins[number].data_ptr() and result.nbytes == array.nbytes


def lendable(plan: Plan) -> tuple[int, ...]:
    """The numbers, arguments first and then outputs, of what collectives of ``plan`` itself may read or make, be it
    through views."""
    read = {slot for step in plan.steps if _is_collective(step) for slot in step.operands}
    for step in reversed(plan.steps):
        if _is_view(step) and not read.isdisjoint(step.results):
            read.update(step.operands)
    made = {slot for step in plan.steps if _is_collective(step) for slot in step.results}
    homes = {plan.result_buffers[slot].slot for slot in made if slot in plan.result_buffers}
    arguments = [number for number, slot in enumerate(plan.parameters) if slot in read]
    outputs = [
        number
        for number, slot in enumerate(plan.results, len(plan.parameters))
        if slot in plan.result_buffers and plan.result_buffers[slot].slot in homes
    ]
    return tuple(number for number in (*arguments, *outputs) if _has_elements(plan, number))


def _has_elements(plan: Plan, number: int) -> bool:
    shape: ArrayShape = (*plan.shapes_of(plan.parameters), *plan.result_shapes)[number]
    return shape.num_bytes > 0


def _is_collective(step: Step) -> bool:
    return step.instruction is not None and step.instruction.opcode in COLLECTIVES


def _is_view(step: Step) -> bool:
    return not step.enqueues and len(step.operands) == 1 and len(step.results) == 1


def _storage(array: Tensor) -> int:
    return int(array.untyped_storage()._cdata)
