"""What a row shares is loaded before its elements, and waited for after them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest

from support.triton_programs import bf16, f32, s32
from support.triton_sources import sources


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.take_along_axis(wide, labels[:, None], -1).mean()


def simple_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """In the order in which they run first."""
    for statement in body:
        if isinstance(statement, ast.For):
            yield from simple_statements(statement.body)
        else:
            yield statement


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function]


@pytest.mark.parametrize("length", [1000, 32000, 50257, 128256])
def test_a_label_of_each_row(length: int) -> None:
    tree = ast.parse(sources(jax.value_and_grad(cross_entropy), [bf16(4096, length), s32(4096)]))
    kernel = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    statements = list(simple_statements(kernel.body))
    loads = {n: call for n, s in enumerate(statements) for call in calls(s, "tl.load")}
    label = next(n for n, load in loads.items() if "in1" in names(load))
    row = next(n for n, load in loads.items() if {"in0", "r"} <= names(load))
    assert label < row
    loaded = statements[label]
    assert isinstance(loaded, ast.Assign) and names(loaded.value) == {"tl", "in1", "x"}
    (target,) = loaded.targets
    first_use = next(n for n in range(label + 1, len(statements)) if names(target) <= names(statements[n]))
    maximum = next(
        n
        for n, s in enumerate(statements)
        for reduce in calls(s, "tl.reduce")
        if [ast.unparse(argument) for argument in reduce.args[1:]] == ["1", "fm.maximum"]
    )
    assert first_use > maximum


def online_softmax(
    most: jax.Array, total: jax.Array, seen: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One block of keys more: what an attention over a ring of devices carries."""
    wide = jnp.where(seen, scores.astype(jnp.float32), -1e30)
    top = jnp.maximum(most, wide.max(-1))
    weights, kept = jnp.exp(wide - top[..., None]), jnp.exp(most - top)
    return top, kept, total * kept + weights.sum(-1), weights.astype(jnp.bfloat16)


@pytest.mark.parametrize("keys", [256, 1024])
def test_results_that_a_row_shares(keys: int) -> None:
    """Each is stored before anything else is made of it: Triton 3.6 does not compile the kernel otherwise."""
    mask = jax.ShapeDtypeStruct((4096, keys), jnp.bool_)
    tree = ast.parse(sources(online_softmax, [f32(4, 4096), f32(4, 4096), mask, bf16(4, 4096, keys)]))
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(kernels) == 1
    statements = list(simple_statements(kernels[0].body))
    stores = {n: calls(s, "tl.store")[0] for n, s in enumerate(statements) if calls(s, "tl.store")}
    shared = {n: names(store.args[1]).pop() for n, store in stores.items() if "r" not in names(store.args[0])}
    assert len(stores) == 4 and len(shared) == 3
    for stored, value in shared.items():
        made = next(n for n, s in enumerate(statements) if isinstance(s, ast.Assign) and names(s.targets[0]) == {value})
        between = [s for n, s in enumerate(statements) if made < n < stored and n not in stores]
        assert not any(value in names(s) for s in between)
