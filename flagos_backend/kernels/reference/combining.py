"""Combining many updates into an array at positions that may repeat; scatter and select-and-scatter end here.

Updates of one position apply in their order, so a combiner that is not commutative gives XLA's sequential result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flagos_backend.ir.hlo import Computation
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.computations import plain_combiner, returned_parameter
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.scalar_functions import ScalarFunction, scalar_function
from flagos_backend.process.torch_loading import Tensor, torch

# combine(run, targets, rows, updates, valid): targets [positions, width] are updated in place with updates [n, width],
# row by row at ``rows`` [n] (int64); those that are not ``valid`` [n] (None: all are) lie anywhere and are left out.
Combine = Callable[[Run, list[Tensor], Tensor, list[Tensor], Tensor | None], None]

# A table of all positions is quicker than sorting the updates, up to this many positions an update.
_TABLE_RATIO = 16

_REDUCE = {Opcode.ADD: "sum", Opcode.MULTIPLY: "prod", Opcode.MAXIMUM: "amax", Opcode.MINIMUM: "amin"}
_REDUCE_PRED = {
    Opcode.ADD: "amax",
    Opcode.OR: "amax",
    Opcode.MAXIMUM: "amax",
    Opcode.MULTIPLY: "amin",
    Opcode.AND: "amin",
    Opcode.MINIMUM: "amin",
}


@dataclass(frozen=True, slots=True)
class Combiner:
    """``apply`` reduces rows; ``function`` is the combiner itself, on arrays."""

    apply: Combine
    function: ScalarFunction


def prepare_combiner(computation: Computation, element_types: tuple[ElementType, ...], unique: bool) -> Combiner:
    """The combiner of one scatter. ``unique`` promises that no position repeats."""
    function = scalar_function(computation)
    if len(element_types) == 1:
        if returned_parameter(computation) == 1:
            return Combiner(_assign(unique), function)
        opcode = plain_combiner(computation)
        reduction = opcode and _native_reduction(opcode, element_types[0])
        if reduction:
            return Combiner(_reduce(reduction, element_types[0], opcode in (Opcode.MAXIMUM, Opcode.MINIMUM)), function)
    return Combiner(_apply_once(function) if unique else _apply_in_rounds(function), function)


def _native_reduction(opcode: Opcode, element_type: ElementType) -> str | None:
    """torch's name for the reduction, where its result is XLA's."""
    if element_type is ElementType.PRED:
        return _REDUCE_PRED.get(opcode)
    if element_type.bits < 8 or (element_type.is_float and element_type.bits == 8):
        return None  # storage is not arithmetic
    if element_type.is_complex and opcode is not Opcode.ADD:
        return None  # accelerators multiply no complex numbers in place
    return _REDUCE.get(opcode)


def _reduce(reduction: str, element_type: ElementType, ordering: bool) -> Combine:
    flips = ordering and element_type.is_unsigned and element_type.bits > 8
    pred = element_type is ElementType.PRED

    def apply(run: Run, targets: list[Tensor], rows: Tensor, updates: list[Tensor], valid: Tensor | None) -> None:
        if valid is not None and not run.asynchronous:
            rows, updates, valid = *_kept(rows, updates, valid), None
        target, update = targets[0], updates[0]
        if pred:
            target, update = target.view(torch.uint8), update.to(torch.uint8)
        if flips:  # signed storage of unsigned values: turning the top bit makes signed order the unsigned one
            top = torch.iinfo(target.dtype).min
            target.bitwise_xor_(top)
            update = update ^ top
        if valid is not None:  # choosing them would wait for how many there are
            rows = torch.where(valid, rows, 0)
            update = torch.where(valid.unsqueeze(1), update, _neutral(reduction, update.dtype))
        if update.shape[1] == 1:
            target, update, index = target.squeeze(1), update.squeeze(1), rows
        else:
            index = rows.unsqueeze(1).expand_as(update)
        if reduction == "sum":
            target.scatter_add_(0, index, update)
        else:
            target.scatter_reduce_(0, index, update, reduction)
        if flips:
            target.bitwise_xor_(top)

    return apply


def _kept(rows: Tensor, updates: list[Tensor], valid: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Those that are valid."""
    return (rows, updates) if valid.all() else (rows[valid], [update[valid] for update in updates])


def _neutral(reduction: str, dtype: torch.dtype) -> complex | float | int:
    """What changes nothing: minus zero, as it keeps both zeros what they are."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    if dtype.is_floating_point:
        return {"sum": -0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}[reduction]
    limits = torch.iinfo(dtype)
    return {"sum": 0, "prod": 1, "amax": limits.min, "amin": limits.max}[reduction]


def _assign(unique: bool) -> Combine:
    def apply(run: Run, targets: list[Tensor], rows: Tensor, updates: list[Tensor], valid: Tensor | None) -> None:
        if run.asynchronous:
            _assign_without_waiting(targets[0], rows, updates[0], valid, unique)
            return
        if valid is not None:
            rows, updates = _kept(rows, updates, valid)
        target, update = targets[0], updates[0]
        if not unique and len(rows) > 1:
            last = _last_of_each(rows, len(target))
            if not last.all():
                rows, update = rows[last], update[last]
        target.index_put_((rows,), update)

    return apply


def _assign_without_waiting(target: Tensor, rows: Tensor, update: Tensor, valid: Tensor | None, unique: bool) -> None:
    """Every update writes what the last one of its position has; those that are not valid repeat one that is, or what
    is there."""
    number = torch.arange(len(rows), device=rows.device)
    if valid is not None:
        # [1] throughout: an index without dimensions would be read on the host.
        one = valid.to(torch.uint8).argmax(0, keepdim=True)
        some = valid.index_select(0, one)
        place = torch.where(some, rows.index_select(0, one), 0)
        there = target.index_select(0, place)
        rows, number = torch.where(valid, rows, place), torch.where(valid, number, one)
        update = torch.where(some.view([1] * update.dim()), update, there)
    if not unique or valid is not None:
        update = update.index_select(0, _latest(rows, number, len(target)))
    target.index_put_((rows,), update)


def _latest(rows: Tensor, number: Tensor, positions: int) -> Tensor:
    """For each update the greatest ``number`` of those of its position."""
    if positions <= _TABLE_RATIO * len(rows):
        latest = torch.zeros(positions, dtype=torch.int64, device=rows.device)
        return latest.scatter_reduce_(0, rows, number, "amax")[rows]
    ordered, order = rows.sort(stable=True)
    # Numbers rise within a position, but for those that repeat another: the greatest so far, spread back from its end.
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    group = first.cumsum(0) - 1
    latest = torch.zeros_like(number).scatter_reduce_(0, group, number[order], "amax")
    return torch.empty_like(number).scatter_(0, order, latest[group])


def _last_of_each(rows: Tensor, positions: int) -> Tensor:
    """Which updates no later one of the same position overwrites."""
    number = torch.arange(len(rows), device=rows.device)
    if positions <= _TABLE_RATIO * len(rows):
        latest = torch.zeros(positions, dtype=torch.int64, device=rows.device)
        return latest.scatter_reduce_(0, rows, number, "amax")[rows] == number
    ordered, order = rows.sort(stable=True)
    last = torch.ones_like(rows, dtype=torch.bool)
    last[order[:-1]] = ordered[1:] != ordered[:-1]
    return last


def _apply_once(function: ScalarFunction) -> Combine:
    def apply(run: Run, targets: list[Tensor], rows: Tensor, updates: list[Tensor], valid: Tensor | None) -> None:
        if valid is not None:
            rows, updates = _kept(rows, updates, valid)
        current = [target.index_select(0, rows) for target in targets]
        for target, update, value in zip(targets, updates, function(run, current + updates), strict=True):
            target.index_put_((rows,), value.expand_as(update))

    return apply


def _apply_in_rounds(function: ScalarFunction) -> Combine:
    """Round k applies the k-th update of every position that has one."""
    once = _apply_once(function)

    def apply(run: Run, targets: list[Tensor], rows: Tensor, updates: list[Tensor], valid: Tensor | None) -> None:
        if valid is not None:
            rows, updates = _kept(rows, updates, valid)
        for chosen in _rounds(rows):
            once(run, targets, rows[chosen], [update[chosen] for update in updates], None)

    return apply


def _rounds(rows: Tensor) -> tuple[Tensor, ...]:
    """Splits the update numbers so that each part holds no position twice and the parts keep each position's order."""
    if len(rows) < 2:
        return (torch.arange(len(rows), device=rows.device),)
    ordered, order = rows.sort(stable=True)
    number = torch.arange(len(rows), device=rows.device)
    starts = torch.zeros_like(number)
    starts[1:] = torch.where(ordered[1:] != ordered[:-1], number[1:], 0)
    occurrence = number - starts.cummax(0).values
    by_round = occurrence.sort(stable=True).indices
    return torch.split(order[by_round], occurrence.bincount().tolist())
