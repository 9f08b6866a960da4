"""Graphs of torch.compile on the device: compiled as graphs of the inner device, over the same memory.

The seam between this package and flagos_backend.torch.compile, which knows tensors of the inner device only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from flagos_backend.torch.device.memory import DEVICE_TYPE, unwrap, wrap
from flagos_backend.torch.device.runtime import runtime


@dataclass(frozen=True, slots=True)
class DeviceGraph:
    """What of a graph was on the device. ``outputs``: for each output whether it was; ``is_random``: whether the graph
    draws random numbers."""

    outputs: tuple[bool, ...]
    is_random: bool


def move_to_inner(graph: GraphModule) -> DeviceGraph | None:
    """Has a traced graph compute on the inner device, in place; None where nothing in it is on the device."""
    outputs = graph.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    there = tuple(isinstance(output, Node) and _is_here(output.meta.get("val")) for output in outputs)
    if not _move_nodes(graph):
        return None
    seeded = torch.Tag.nondeterministic_seeded
    is_random = any(seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)
    return DeviceGraph(there, is_random)


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE_TYPE


def _move_nodes(graph: GraphModule) -> bool:
    found = sum(_move_node(graph, node) for node in graph.graph.nodes) > 0
    graph.recompile()
    return found


def _move_node(graph: GraphModule, node: Node) -> bool:
    """Moves a node's traced value and the devices that it names; whether there was anything to move."""
    found = False

    def moved(value: Any) -> Any:
        nonlocal found
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            found = True
            return runtime().inner
        if not _is_here(value):
            return value
        found = True
        return _fake_inner(value) if isinstance(value, FakeTensor) else unwrap(value)

    if "val" in node.meta:
        node.meta["val"] = tree_map(moved, node.meta["val"])
    if node.op == "get_attr":
        found |= _move_attribute(graph, str(node.target), moved)
    else:
        node.args, node.kwargs = (tree_map(moved, given) for given in (node.args, node.kwargs))
    return found


def _move_attribute(graph: GraphModule, target: str, moved: Callable[[Any], Any]) -> bool:
    """A constant of the graph, or the body of a higher-order operator."""
    *path, name = target.split(".")
    owner = graph.get_submodule(".".join(path))
    value = getattr(owner, name)
    if isinstance(value, GraphModule):
        return _move_nodes(value)
    replaced = moved(value)
    if replaced is not value:
        delattr(owner, name)
        setattr(owner, name, replaced)
    return replaced is not value


def _fake_inner(value: FakeTensor) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=runtime().inner)


def on_device(compiled: Callable[[list[Any]], list[Any]], graph: DeviceGraph) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph of the inner device that takes and returns tensors on the device; copies nothing."""

    def run(inputs: list[Any]) -> list[Any]:
        inner = [unwrap(value) if isinstance(value, Tensor) else value for value in inputs]
        originals = {id(one): value for one, value in zip(inner, inputs, strict=True) if one is not value}
        inputs.clear()
        with random_numbers() if graph.is_random else contextlib.nullcontext():
            outputs = compiled(list(inner))
        return [
            (originals.get(id(output)) if id(output) in originals else wrap(output))
            if here and output is not None
            else output
            for output, here in zip(outputs, graph.outputs, strict=True)
        ]

    return run


_random_lock = threading.Lock()


@contextlib.contextmanager
def random_numbers() -> Iterator[None]:
    """Has what draws from the inner device's default generator continue the device's stream instead."""
    opened = runtime()
    shared = torch.default_generator if opened.inner.type == "cpu" else _default_generator(opened.inner)
    with _random_lock:
        kept = shared.get_state()
        shared.set_state(opened.generator.get_state())
        try:
            yield
        finally:
            opened.generator.set_state(shared.get_state())
            shared.set_state(kept)


def _default_generator(inner: torch.device) -> torch.Generator:
    found: torch.Generator = torch.get_device_module(inner).default_generators[inner.index or 0]
    return found
