"""Which operators PyTorch runs between compiled programs, and whose arguments they may write in place.

AOTAutograd makes an operator that mutates its arguments a function: auto_functionalized gives new values of the memory
that it writes. Here that is undone where nobody reads the old values. For specialization.py and sequence.py.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from flagos_backend.frontends.torch.compile.lowering.table import Overload, rule_of
from flagos_backend.frontends.torch.compile.outputs import is_view

#: In the metadata of a node: which of its bases are written where they lie, by number.
WRITTEN_BASES = "flagos_written_bases"

_hop = torch.ops.higher_order


def runs_outside(node: Node) -> bool:
    """Whether no program has the operator: it is none of ATen's, or writes its arguments, and has no lowering. Of what
    gives numbers nobody asks."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return False
    if isinstance(target, Overload):
        return rule_of(target, on_host=True) is None and (target.namespace != "aten" or target._schema.is_mutable)
    return True


def name_of(node: Node) -> str:
    """The operator, for reports: the user's own where others wrap it."""
    call = mutating_call(node)
    if call is not None:
        return str(call.target)
    return str(node.args[1] if node.target is _hop.with_effects else node.target)


@dataclass(frozen=True, slots=True)
class View:
    """An argument: ``function`` of the base with that number and ``arguments``; without a function the base itself."""

    base: int
    function: Callable[..., torch.Tensor] | None = None
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class MutatingCall:
    """``target`` writes to ``bases``, through views of them that are its arguments. ``keywords``: all its arguments, in
    which each View stands for what it makes. ``names``: by which a base is found among the results where it is no
    number."""

    target: Any
    keywords: Mapping[str, Any]
    bases: tuple[Node | None, ...]
    names: tuple[str, ...] | None = None


def mutating_call(node: Node) -> MutatingCall | None:
    """What auto_functionalized or a user's Triton kernel does; None for anything else."""
    if node.target is _hop.triton_kernel_wrapper_functional:
        return _triton_kernel(node)
    if node.target is _hop.auto_functionalized_v2:
        return _functionalized(node, _views_of_bases)
    if node.target is _hop.auto_functionalized:
        return _functionalized(node, _arguments_as_bases)
    return None


def _triton_kernel(node: Node) -> MutatingCall:
    keywords: dict[str, Any] = dict(node.kwargs)
    names = tuple(keywords.pop("tensors_to_clone"))
    arguments: dict[str, Any] = dict(keywords["kwargs"])
    bases = tuple(arguments[name] for name in names)
    arguments |= {name: View(number) for number, name in enumerate(names)}
    return MutatingCall(_hop.triton_kernel_wrapper_mutation, {**keywords, "kwargs": arguments}, bases, names)


Described = tuple[dict[str, Any], list[Node | None]]


def _functionalized(node: Node, read: Callable[[dict[str, Any], list[str]], Described | None]) -> MutatingCall | None:
    target, keywords = node.args[0], dict(node.kwargs)
    if not isinstance(target, Overload):
        return None  # a higher-order operator, which knows itself how to copy what it writes
    mutable = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    described = read(keywords, mutable)
    return None if described is None else MutatingCall(target, described[0], tuple(described[1]))


def _arguments_as_bases(keywords: dict[str, Any], mutable: list[str]) -> Described | None:
    """Of the first version: what is written are the arguments themselves."""
    bases: list[Node | None] = []

    def view(base: Any) -> View | None:
        bases.append(base)
        return None if base is None else View(len(bases) - 1)

    for name in mutable:
        if isinstance(keywords[name], list | tuple):
            return None  # its results are lists, too
        keywords[name] = view(keywords[name])
    return keywords, bases


def _views_of_bases(keywords: dict[str, Any], mutable: list[str]) -> Described | None:
    """Of the second version: what is written are views, which its keywords describe."""
    bases: list[Node | None] = list(keywords.pop("_all_bases", ()))
    for name in mutable:
        if f"_{name}_length" in keywords:
            length = keywords.pop(f"_{name}_length")
            keywords[name] = (
                None if length is None else [_view(keywords, f"_{name}_{number}", bases) for number in range(length)]
            )
        elif f"_{name}_base_index" in keywords:
            keywords[name] = _view(keywords, f"_{name}", bases)
        else:
            return None  # an operator with arguments for its results, which describes them otherwise
    return keywords, bases


def _view(keywords: dict[str, Any], prefix: str, bases: list[Node | None]) -> View | None:
    base = keywords.pop(f"{prefix}_base_index")
    if base is None:
        return None
    if keywords.pop(f"{prefix}_alias", False):
        return View(base, torch.ops.aten.alias.default)
    if f"{prefix}_storage_offset" in keywords:
        node = bases[base]
        assert node is not None
        size, stride, offset = (keywords.pop(f"{prefix}_{part}") for part in ("size", "stride", "storage_offset"))
        return View(base, _strided, (size, stride, offset, node.meta["val"].storage_offset()))
    if f"{prefix}_slice_dim" in keywords:
        ends = tuple(keywords.pop(f"{prefix}_slice_{part}") for part in ("dim", "start", "end"))
        return View(base, torch.ops.aten.slice.Tensor, ends)
    return View(base)


def _strided(base: torch.Tensor, size: Any, stride: Any, offset: int, traced: int) -> torch.Tensor:
    """``traced``: where the base began in its memory when ``offset`` was traced."""
    return base.as_strided(size, stride, base.storage_offset() + offset - traced)


def results_before_bases(call: MutatingCall) -> int:
    """How many results precede the bases: AOTAutograd counts None as one."""
    return max(1, len(call.target._schema.returns)) if call.names is None else 0


def find_written_bases(graph: GraphModule, written: Iterable[Node]) -> None:
    """Notes at each mutating call which bases are written where they lie. That is memory of the graph's own, or of an
    input in ``written``, which the caller writes anyway; and nobody reads the old values after the call, or beside it
    through another argument."""
    _Memory(graph, frozenset(written)).find()


class _Memory:
    def __init__(self, graph: GraphModule, written: frozenset[Node]) -> None:
        self._nodes, self._written = tuple(graph.graph.nodes), written
        self._order = {node: number for number, node in enumerate(self._nodes)}
        self._root: dict[Node, Node] = {}  # whose memory a node's value lies in
        self._lie_in: defaultdict[Node, list[Node]] = defaultdict(list)

    def find(self) -> None:
        for node in self._nodes:
            call = mutating_call(node)
            if call is not None:
                node.meta[WRITTEN_BASES] = frozenset(
                    number for number, base in enumerate(call.bases) if self._is_free(node, call, base)
                )
            root = self._root[node] = self._find_root(node)
            self._lie_in[root].append(node)

    def _find_root(self, node: Node) -> Node:
        if is_view(node):
            return self._root[node.args[0]]  # type: ignore[index]
        base = written_base(node)
        return node if base is None else self._root[base]

    def _is_free(self, node: Node, call: MutatingCall, base: Node | None) -> bool:
        if base is None:
            return False
        root = self._root[base]
        if root.op == "get_attr" or (root.op == "placeholder" and root not in self._written):
            return False
        beside = [leaf for leaf in tree_leaves(dict(call.keywords)) if isinstance(leaf, Node)]
        beside += [other for other in call.bases if other is not None]
        if sum(self._root[other] is root for other in beside) > 1:
            return False
        end = self._order[node]
        return not any(self._order[user] > end for value in self._lie_in[root] for user in value.users)


def written_base(node: Node) -> Node | None:
    """The base that a result of a mutating call is, where it is written where it lies."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    place: Any = node.args[1]
    call = mutating_call(source) if isinstance(source, Node) else None
    if call is None:
        return None
    number: int = call.names.index(place) if call.names is not None else place - results_before_bases(call)
    return call.bases[number] if number in source.meta.get(WRITTEN_BASES, frozenset()) else None


def with_views(call: MutatingCall, make: Callable[[View], Any]) -> Any:
    """The call's keywords, with what ``make`` gives for each View."""
    return tree_map_only(View, make, dict(call.keywords))
