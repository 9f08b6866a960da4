"""Kernels of the collectives: they find their group, and leave the rest to the launch's Communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagos_backend.collectives.communicator import Communicator, Reducer, Rendezvous
from flagos_backend.collectives.in_process import InProcessCommunicator
from flagos_backend.errors import CollectiveGroupMismatch
from flagos_backend.ir.attributes import CollectiveAttributes, CollectivePermuteAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import Position, group_mode, participants_of
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.computations import plain_combiner
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, kernel
from flagos_backend.kernels.reference.scalar_functions import scalar_function
from flagos_backend.process.torch_loading import Tensor, torch

FindRendezvous = Callable[[Run], Rendezvous | None]
Arrays = tuple[Tensor, ...]


def _position(run: Run) -> Position:
    return Position(run.replica_id, run.partition_id, run.num_replicas, run.num_partitions)


# For a group of one, which needs nobody else.
_ALONE = InProcessCommunicator()


def _communicator(instruction: Instruction, run: Run, rendezvous: Rendezvous) -> Communicator:
    if run.communicator is not None:
        return run.communicator
    if rendezvous.size > 1:
        raise _mismatch(instruction, run, "the launch has no communicator")
    return _ALONE


def _mismatch(instruction: Instruction, run: Run, fact: str) -> CollectiveGroupMismatch:
    return CollectiveGroupMismatch.at(instruction, fact=fact, replicas=run.num_replicas, partitions=run.num_partitions)


def _checked(instruction: Instruction, run: Run, participants: tuple[int, ...]) -> tuple[int, ...]:
    devices = run.num_replicas * run.num_partitions
    if any(not 0 <= participant < devices for participant in participants):
        raise _mismatch(instruction, run, f"a group has the participants {list(participants)}")
    return participants


def _rendezvous(instruction: Instruction) -> FindRendezvous:
    """Finds the rendezvous of a launch: None for a device that is in no group."""
    attributes = instruction.attributes_as(CollectiveAttributes)
    channel = f"%{instruction.name}"

    def find(run: Run) -> Rendezvous | None:
        position = _position(run)
        participants = _checked(instruction, run, participants_of(instruction.opcode, attributes, position))
        if not participants:
            return None
        return Rendezvous(channel, participants, position.flattened, attributes.channel_id)

    return find


def _required(instruction: Instruction) -> Callable[[Run], tuple[Communicator, Rendezvous]]:
    find = _rendezvous(instruction)

    def meet(run: Run) -> tuple[Communicator, Rendezvous]:
        rendezvous = find(run)
        if rendezvous is None:
            raise _mismatch(instruction, run, f"no group holds the device {_position(run).flattened}")
        return _communicator(instruction, run, rendezvous), rendezvous

    return meet


def _result(instruction: Instruction, arrays: Sequence[Tensor]) -> Tensor | Arrays:
    return arrays[0] if isinstance(instruction.shape, ArrayShape) else tuple(arrays)


def _reducer(instruction: Instruction) -> Callable[[Run], Reducer]:
    function, opcode = scalar_function(instruction.called[0]), plain_combiner(instruction.called[0])
    return lambda run: Reducer(lambda a, b: function(run, [a, b])[0].expand_as(a), opcode)


def _dimension(instruction: Instruction) -> int:
    dimension = instruction.attributes_as(CollectiveAttributes).dimension
    assert dimension is not None
    return dimension


@kernel(Opcode.ALL_REDUCE, storage=Storage.FRESH)
def prepare_all_reduce(instruction: Instruction) -> Kernel:
    meet, reducer = _required(instruction), _reducer(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | Arrays:
        communicator, rendezvous = meet(launch)
        return _result(instruction, communicator.all_reduce(rendezvous, operands, reducer(launch)))

    return run


@kernel(Opcode.ALL_GATHER, storage=Storage.FRESH)
def prepare_all_gather(instruction: Instruction) -> Kernel:
    meet, dimension = _required(instruction), _dimension(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | Arrays:
        communicator, rendezvous = meet(launch)
        return _result(instruction, communicator.all_gather(rendezvous, operands, dimension))

    return run


@kernel(Opcode.REDUCE_SCATTER, storage=Storage.FRESH)
def prepare_reduce_scatter(instruction: Instruction) -> Kernel:
    meet, dimension, reducer = _required(instruction), _dimension(instruction), _reducer(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | Arrays:
        communicator, rendezvous = meet(launch)
        return _result(instruction, communicator.reduce_scatter(rendezvous, operands, reducer(launch), dimension))

    return run


@kernel(Opcode.ALL_TO_ALL, storage=Storage.FRESH)
def prepare_all_to_all(instruction: Instruction) -> Kernel:
    """With a dimension: one array, split and joined along it. Without: one operand and one result a participant."""
    meet = _required(instruction)
    dimension = instruction.attributes_as(CollectiveAttributes).dimension

    def of_tuple(launch: Run, *operands: Tensor) -> Arrays:
        communicator, rendezvous = meet(launch)
        if len(operands) != rendezvous.size:
            raise _mismatch(instruction, launch, f"{len(operands)} operands for a group of {rendezvous.size}")
        return tuple(communicator.all_to_all(rendezvous, operands))

    def of_array(launch: Run, operand: Tensor) -> Tensor:
        assert dimension is not None
        communicator, rendezvous = meet(launch)
        return communicator.exchange_along(rendezvous, operand, dimension)

    return of_tuple if dimension is None else of_array


@kernel(Opcode.COLLECTIVE_BROADCAST, storage=Storage.FRESH)
def prepare_collective_broadcast(instruction: Instruction) -> Kernel:
    """Every member of a group gets its first one's arrays; a device in no group gets zeros."""
    find = _rendezvous(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor | Arrays:
        rendezvous = find(launch)
        if rendezvous is None:
            return _result(instruction, [torch.zeros_like(operand) for operand in operands])
        received = _communicator(instruction, launch, rendezvous).broadcast(rendezvous, operands)
        return _result(instruction, received)

    return run


@kernel(Opcode.COLLECTIVE_PERMUTE, storage=Storage.FRESH)
def prepare_collective_permute(instruction: Instruction) -> Kernel:
    """The target of each pair gets its source's arrays; a device that is no target gets zeros."""
    attributes = instruction.attributes_as(CollectivePermuteAttributes)
    mode = group_mode(instruction.opcode, attributes.channel_id, use_global_device_ids=False)
    pairs = attributes.source_target_pairs
    members = tuple(sorted({number for pair in pairs for number in pair}))
    source = {target: members.index(origin) for origin, target in pairs}
    source_of = [source.get(number) for number in members]
    channel = f"%{instruction.name}"

    def run(launch: Run, *operands: Tensor) -> Tensor | Arrays:
        position = _position(launch)
        received = None
        if position.own_number(mode) in members:
            participants = tuple(device for number in members for device in position.flatten(mode, number))
            participants = _checked(instruction, launch, participants)
            rendezvous = Rendezvous(channel, participants, position.flattened, attributes.channel_id)
            received = _communicator(instruction, launch, rendezvous).permute(rendezvous, operands, source_of)
        return _result(instruction, received or [torch.zeros_like(operand) for operand in operands])

    return run


@kernel(Opcode.RAGGED_ALL_TO_ALL, storage=Storage.FRESH)
def prepare_ragged_all_to_all(instruction: Instruction) -> Kernel:
    """Operands: input, output, then for each receiver (k entries each when there are k times as many): where its slice
    begins in the input, its length, where it goes in the receiver's output, and the length to receive from each sender.
    Slices go along dimension 0; what no slice covers keeps the output operand's values."""
    meet = _required(instruction)

    def run(launch: Run, *operands: Tensor) -> Tensor:
        communicator, rendezvous = meet(launch)
        size = rendezvous.size

        def combine(contributions: Sequence[Sequence[Tensor]]) -> list[Tensor]:
            results = [given[1].clone(memory_format=torch.contiguous_format) for given in contributions]
            for array, _, input_offsets, send_sizes, output_offsets, _ in contributions:
                rows = zip(input_offsets.tolist(), send_sizes.tolist(), output_offsets.tolist(), strict=True)
                each = len(input_offsets) // size
                for entry, (start, length, target) in enumerate(rows):
                    results[entry // each][target : target + length] = array[start : start + length]
            return results

        result: Tensor = communicator.exchange(rendezvous, operands, combine)
        return result

    return run
