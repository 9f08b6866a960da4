"""Attention that a model writes out, in training on accelerators: its weights are computed again in the backward pass
rather than saved. Each pass then holds all of it, which passes/match makes calls of. Before backend.py partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.clone.default,
        aten.expand.default,
        aten.permute.default,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
_ARRANGEMENTS = _VIEWS | {aten._to_copy.default, aten.slice.Tensor, prims.convert_element_type.default}
# What else stands between scores and the quotient that a softmax ends with.
_OF_SCORES = _ARRANGEMENTS | {
    aten.add.Tensor,
    aten.all.dim,
    aten.amax.default,
    aten.cat.default,
    aten.div.Tensor,
    aten.eq.Scalar,
    aten.exp.default,
    aten.masked_fill.Scalar,
    aten.mul.Tensor,
    aten.neg.default,
    aten.sub.Tensor,
    aten.sum.dim_IntList,
    aten.tanh.default,
    aten.where.self,
    aten.zeros_like.default,
}


def compute_weights_again(joint: GraphModule, outputs: int) -> None:
    """Marks the scores and weights of attentions for min_cut_rematerialization_partition. ``outputs``: how many the
    forward pass has."""
    (end,) = joint.graph.find_nodes(op="output")
    given = [value for value in end.args[0][:outputs] if isinstance(value, Node)]
    forward = set(_ancestors(given))
    for product in joint.graph.find_nodes(op="call_function", target=aten.bmm.default):
        region = _weights_of(product, forward) if product in forward else []
        if region and not set(region).intersection(given):
            quotients = [] if (late := _quotient_of(product)) is None else [late]
            for node in [*region, *quotients, *_constants_beside(region), *_repeats(region, product)]:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


def _ancestors(values: Iterable[Node]) -> Iterator[Node]:
    """``values`` and all that they are made of."""
    seen = dict.fromkeys(values)
    stack = list(seen)
    while stack:
        node = stack.pop()
        yield node
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(dict.fromkeys(new))
        stack += new


def _weights_of(product: Node, forward: set[Node]) -> list[Node]:
    """The scores of an attention whose output ``product`` is, and all between; empty where it is none."""
    quotient = _quotient_of(product) or _behind_a_choice(_behind_arrangements(product.args[0]))
    if quotient.target is not aten.div.Tensor:
        return []
    scores = [node for node in _sources(quotient) if node.target is aten.bmm.default and node is not product]
    if len(scores) != 1:
        return []
    (first,) = scores
    region = _between(first, product, quotient, forward)
    known = region is not None and {node.target for node in region} >= {aten.exp.default, aten.sum.dim_IntList}
    return region if region is not None and known and _is_large(first) else []


def _quotient_of(product: Node) -> Node | None:
    """A product with exponentials, divided by their sum: the output, where the weights are not divided before."""
    exponentials = _behind_arrangements(product.args[0])
    if exponentials.target is not aten.exp.default:
        return None
    found, stack = None, [product]
    while stack:
        for user in stack.pop().users:
            if user.target in _ARRANGEMENTS:
                stack.append(user)
            elif user.target is aten.div.Tensor and isinstance(user.args[1], Node):
                total = _behind_arrangements(user.args[1])
                sums = total.target is aten.sum.dim_IntList and _behind_arrangements(total.args[0]) is exponentials
                found = user if sums and found is None else found
    return found


def _behind_arrangements(value: object) -> Node:
    assert isinstance(value, Node)
    while value.target in _ARRANGEMENTS:
        value = value.all_input_nodes[0]
    return value


def _behind_a_choice(weights: Node) -> Node:
    """The weights that ``_safe_softmax`` sets to zero in rows of which every score is -infinity."""
    if weights.target is aten.where.self and isinstance(weights.args[2], Node):
        return _behind_arrangements(weights.args[2])
    return weights


def _sources(value: Node) -> Iterator[Node]:
    """What ``value`` is made of, up to and with what is no arithmetic of scores."""
    seen, stack = {value}, [value]
    while stack:
        node = stack.pop()
        yield node
        if node.target in _OF_SCORES:
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            stack += new


def _between(scores: Node, product: Node, quotient: Node, forward: set[Node]) -> list[Node] | None:
    """``scores`` and what the forward pass makes of them before ``product``, or ``quotient`` if that is later; None
    where it makes anything else."""
    late = product in _sources(quotient)
    end = quotient if late else product
    region, stack = {scores: None}, [scores]
    while stack:
        for user in stack.pop().users:
            if user is end or user not in forward or user in region:
                continue
            if user.target not in _OF_SCORES and not (late and user is product):
                return None
            region[user] = None
            stack.append(user)
    return list(region)


def _repeats(region: list[Node], product: Node) -> list[Node]:
    """How keys and values were repeated for groups of heads, and laid out: what they were before is saved."""
    found = []
    for operand in (*product.all_input_nodes, *region[0].all_input_nodes):
        node = operand
        while node.target in _VIEWS:
            found.append(node)
            node = node.all_input_nodes[0]
    return found


def _constants_beside(region: list[Node]) -> list[Node]:
    """What masks are made of that no argument has a part in: positions, compared."""
    inside, found = set(region), []
    for node in region:
        for source in node.all_input_nodes:
            if source not in inside:
                made_of = list(_ancestors([source]))
                if all(_is_a_function(node) for node in made_of):
                    found += made_of
    return found


def _is_a_function(node: Node) -> bool:
    """Of its operands alone."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags


def _is_large(scores: Node) -> bool:
    """Whether the scores are more than what they are made of; those of unknown sizes are taken to be."""
    sizes = [node.meta["val"].numel() for node in (scores, *scores.all_input_nodes)]
    return not all(isinstance(size, int) for size in sizes) or sizes[0] > sum(sizes[1:])
