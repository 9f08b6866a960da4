"""ragged-dot: a dot whose ragged dimension of the left operand falls into groups of given sizes.

The role of the ragged dimension decides: free, each group of rows meets its own right matrix; contracting, each group
makes a result of its own; batch, elements beyond the groups' sum are zero. As StableHLO's ragged_dot specifies.
"""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.errors import UnsupportedAttribute
from flagos_backend.ir.attributes import DotAttributes, RaggedDotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.ragged_dots import ragged_dot_of
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Kernel, Run, kernel, prepare
from flagos_backend.process.torch_loading import Tensor, torch

Dot = Callable[[Run, Tensor, Tensor], Tensor]


def boundaries(sizes: Tensor, length: int) -> Tensor:
    """[..., g + 1]: where groups begin and end along a dimension of ``length``, never beyond it."""
    ends = sizes.long().clamp(min=0).cumsum(-1).clamp(max=length)
    return torch.cat((torch.zeros_like(ends[..., :1]), ends), dim=-1)


def _group_masks(sizes: Tensor, length: int) -> Tensor:
    """[..., g, length]: which positions belong to each group."""
    bounds = boundaries(sizes, length)
    positions = torch.arange(length, device=sizes.device)
    return (positions >= bounds[..., :-1, None]) & (positions < bounds[..., 1:, None])


def _plain_dot(instruction: Instruction, lhs: ArrayShape, rhs: ArrayShape, dot: DotAttributes) -> Dot:
    """A dot of these shapes, through its own reference kernel."""
    free = [d for d in range(lhs.rank) if d not in dot.lhs_batch and d not in dot.lhs_contracting]
    rhs_free = [d for d in range(rhs.rank) if d not in dot.rhs_batch and d not in dot.rhs_contracting]
    dims = [lhs.dims[d] for d in dot.lhs_batch] + [lhs.dims[d] for d in free] + [rhs.dims[d] for d in rhs_free]
    result = instruction.shape
    assert isinstance(result, ArrayShape)
    operands = tuple(
        Instruction(Opcode.PARAMETER, shape, name=f"{instruction.name}.{side}")
        for shape, side in ((lhs, "lhs"), (rhs, "rhs"))
    )
    plain = Instruction(
        Opcode.DOT, ArrayShape(result.element_type, tuple(dims)), operands, dot, name=f"{instruction.name}.dot"
    )
    return prepare(plain)


def _without(shape: ArrayShape, dimension: int) -> ArrayShape:
    return ArrayShape(shape.element_type, shape.dims[:dimension] + shape.dims[dimension + 1 :])


def _shifted(dims: tuple[int, ...], removed: int) -> tuple[int, ...]:
    return tuple(d - (d > removed) for d in dims)


class _Ragged:
    """What the three roles share: shapes, and the mask of each group laid along the left operand."""

    def __init__(self, instruction: Instruction) -> None:
        self.attributes = instruction.attributes_as(RaggedDotAttributes)
        self.dot = self.attributes.dot
        lhs, rhs, sizes = (operand.shape for operand in instruction.operands)
        assert isinstance(lhs, ArrayShape)
        assert isinstance(rhs, ArrayShape)
        assert isinstance(sizes, ArrayShape)
        self.lhs, self.rhs, self.groups = lhs, rhs, sizes.dims[-1]
        self.ragged = self.attributes.lhs_ragged[0]
        self.length = lhs.dims[self.ragged]
        # The sizes have the left operand's dimensions that stand before the ragged one, batch first; or only [g].
        self.prefix = tuple(range(sizes.rank - 1))
        self.aligned = ragged_dot_of(instruction).prefix

    def masks(self, sizes: Tensor) -> list[Tensor]:
        """For each group, which of the left operand's elements it holds; broadcastable."""
        flags = _group_masks(sizes, self.length)  # [prefix..., g, length]
        masks = []
        for group in range(self.groups):
            mask = flags.select(-2, group)
            shape = [1] * self.lhs.rank
            for axis, d in enumerate(self.aligned):
                shape[d] = mask.shape[axis]
            shape[self.ragged] = self.length
            order = sorted(range(mask.dim()), key=lambda axis: (*self.aligned, self.ragged)[axis])
            masks.append(mask.permute(order).reshape(shape))
        return masks


@kernel(Opcode.RAGGED_DOT)
def prepare_ragged_dot(instruction: Instruction) -> Kernel:
    ragged = _Ragged(instruction)
    if len(ragged.attributes.lhs_ragged) != 1:
        raise UnsupportedAttribute.at(
            instruction, attribute="lhs_ragged_dimensions", value=ragged.attributes.lhs_ragged
        )
    dot, lhs, rhs = ragged.dot, ragged.lhs, ragged.rhs
    if ragged.ragged in dot.lhs_batch:
        return _batch(ragged, _plain_dot(instruction, lhs, rhs, dot))
    if ragged.ragged in dot.lhs_contracting:
        return _contracting(ragged, _plain_dot(instruction, lhs, rhs, dot))
    group = ragged.attributes.rhs_group[0]
    one = DotAttributes(
        dot.lhs_contracting, _shifted(dot.rhs_contracting, group), dot.lhs_batch, _shifted(dot.rhs_batch, group)
    )
    return _free(ragged, group, _plain_dot(instruction, lhs, _without(rhs, group), one))


def _masked(lhs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, lhs, torch.zeros((), dtype=lhs.dtype, device=lhs.device))


def _batch(ragged: _Ragged, dot: Dot) -> Kernel:
    def run(launch: Run, lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
        inside = torch.stack([m.expand(ragged.lhs.dims) for m in ragged.masks(sizes)]).any(dim=0)
        return dot(launch, _masked(lhs, inside), rhs)

    return run


def _contracting(ragged: _Ragged, dot: Dot) -> Kernel:
    other = ragged.dot.rhs_contracting[ragged.dot.lhs_contracting.index(ragged.ragged)]
    along = [1] * ragged.rhs.rank
    along[other] = -1

    def run(launch: Run, lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
        results = []
        for mask in ragged.masks(sizes):
            # Both sides, so that nothing of another group comes in as 0 * NaN.
            right = rhs if ragged.prefix else _masked(rhs, mask.reshape(along))
            results.append(dot(launch, _masked(lhs, mask), right))
        return torch.stack(results)

    return run


def _free(ragged: _Ragged, group_dimension: int, dot: Dot) -> Kernel:
    kept = ragged.dot.lhs_batch + tuple(
        d for d in range(ragged.lhs.rank) if d not in ragged.dot.lhs_batch and d not in ragged.dot.lhs_contracting
    )

    def run(launch: Run, lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
        total: Tensor | None = None
        for mask, matrix in zip(ragged.masks(sizes), rhs.unbind(group_dimension), strict=True):
            part = dot(launch, lhs, matrix)
            rows = mask.permute(*kept, *ragged.dot.lhs_contracting).flatten(len(kept))[..., 0]
            inside = rows.reshape(rows.shape + (1,) * (part.dim() - rows.dim()))
            total = torch.where(inside, part, torch.zeros_like(part) if total is None else total)
        assert total is not None
        return total

    return run
