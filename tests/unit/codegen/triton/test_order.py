"""What a row shares is loaded before its elements, and waited for after them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest

from support.triton_programs import bf16, s32
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
