"""Conditionals: branches that pass arrays through or change them where they stand, against XLA, and the copies left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import compile, get, put, run, run_function
from flagos_backend.compile.compiler import compile_program
from flagos_backend.devices.target import Target
from flagos_backend.importer import schema
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.region import Load, Region
from plugin_abi.host import Artifact, Context, Memory
from programs import hlo_bytes, run_on_xla
from support.compiled_programs import with_nested

_ROWS, _COLUMNS = _DIMS = 96, 32
_ITERATIONS = 7


@pytest.fixture(autouse=True)
def every_branch_is_taken_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is cheap enough to be computed without being taken."""
    monkeypatch.setattr(Target, "untaken_operations", 0)


Pair = tuple[jax.Array, jax.Array]


def _loop(step: Callable[..., Any], *arrays: jax.Array) -> Any:
    """``step(iteration, *arrays)`` for each iteration."""
    return lax.fori_loop(0, _ITERATIONS, lambda i, carried: step(i, *carried), arrays)


def _keep(*arrays: jax.Array) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays


def _set(i: Any, value: int = 2) -> Callable[[jax.Array], jax.Array]:
    return lambda a: a.at[i].set(value)


def _updated(a: jax.Array) -> jax.Array:
    return lax.fori_loop(0, _ITERATIONS, lambda i, a: lax.cond(i % 3 == 0, _set(i), _keep, a), a)


def _scattered(a: jax.Array, b: jax.Array) -> jax.Array:
    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return a.at[b[:5, 0] % _ROWS].add(b[:5])

    return _loop(lambda i, a, b: (lax.cond(a[i, i] % 2 == 0, add, lambda a, b: a, a, b), b), a, b)[0]


def _nested(a: jax.Array) -> jax.Array:
    def inner(i: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda a: lax.switch(i % 3, [_set(i, 5), _keep, _set(i + 1)], a)

    def outer(j: jax.Array, a: jax.Array) -> tuple[jax.Array]:
        return (lax.fori_loop(0, 5, lambda i, a: lax.cond((i ^ j) % 2 == 0, inner(i), _set(j, 9), a), a),)

    return _loop(outer, a)[0]


def _loops_in_branches(a: jax.Array) -> jax.Array:
    def rows(i: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda a: lax.fori_loop(i, i + 4, lambda j, a: a.at[j].add(a[j - 1]), a)

    return _loop(lambda i, a: (lax.cond(i % 2 == 0, rows(i), _keep, a),), a)[0]


def _between_updates(a: jax.Array) -> jax.Array:
    def step(i: jax.Array, a: jax.Array) -> tuple[jax.Array]:
        a = a.at[i].add(1)
        a = lax.cond(i % 2 == 0, _set(i + 1), _set(i + 2), a)
        return (lax.cond(i % 3 == 0, _keep, _set(i + 3), a.at[i].add(3)),)

    return _loop(step, a)[0]


def _one_computes_afresh(a: jax.Array) -> jax.Array:
    afresh = lambda a: jnp.full_like(a, 7)  # noqa: E731
    constant = lambda a: jnp.arange(a.size, dtype=a.dtype).reshape(a.shape)  # noqa: E731
    twice = lambda a: a * 2  # noqa: E731
    return _loop(lambda i, a: (lax.switch((i * 3) % 5, [_set(i), twice, _keep, afresh, constant], a),), a)[0]


def _two_arrays(a: jax.Array, b: jax.Array) -> Pair:
    first = lambda a, b: (a.at[0].set(b[1]), b)  # noqa: E731
    second = lambda a, b: (a, b.at[0].set(a[1]))  # noqa: E731
    return _loop(lambda i, a, b: lax.cond(i % 2 == 0, first, second, a + i, b - i), a, b)


def _of_the_array(a: jax.Array) -> jax.Array:
    return _loop(lambda i, a: (lax.cond(jnp.sum(a) % 2 == 0, _set(i), _set(i + 1, 5), a),), a)[0]


def _of_temporaries(a: jax.Array) -> jax.Array:
    return lax.cond(a[0, 0] % 2 == 0, _set(3), _keep, a * 3)


def _of_nothing(a: jax.Array, nothing: jax.Array) -> Pair:
    return _loop(
        lambda i, a, n: lax.cond(i % 2 == 0, lambda a, n: (a, n + 1), lambda a, n: (_set(i)(a), n), a, n), a, nothing
    )


def _accepted(a: jax.Array) -> jax.Array:
    return _loop(lambda i, a: (lax.cond(a[0, i] % 2 == 0, lambda new, a: new, lambda new, a: a, a * 3 + i, a),), a)[0]


def _one_rolls(a: jax.Array) -> jax.Array:
    rolled = lambda a: jnp.roll(a, 1, 0)  # noqa: E731
    return _loop(lambda i, a: (lax.switch(i % 3, [_set(i), rolled, _keep], a),), a)[0]


def _swapped(a: jax.Array, b: jax.Array) -> Pair:
    return _loop(lambda i, a, b: lax.cond(i % 3 == 0, lambda a, b: (b, a), lambda a, b: (a, _set(i)(b)), a, b), a, b)


def _rotated(a: jax.Array, b: jax.Array) -> Any:
    rotate = lambda a, b, c: (b, c, a)  # noqa: E731
    return _loop(lambda i, a, b, c: lax.cond(i % 2 == 0, rotate, _keep, a, b, c.at[i].add(1)), a, b, a + b)


def _one_array_twice(a: jax.Array) -> Pair:
    return lax.cond(a[0, 0] % 2 == 0, lambda a, b: (_set(1)(a), b), lambda a, b: (a, _set(2)(b)), *(a * 3,) * 2)


def _read_afterwards(a: jax.Array) -> Pair:
    def step(i: jax.Array, a: jax.Array, b: jax.Array) -> Pair:
        return lax.cond(i % 2 == 0, _set(i), _keep, a), b + a

    return _loop(step, a, a + 1)


def _old_beside_new(a: jax.Array, b: jax.Array) -> Pair:
    both = lambda a, b: (_set(1)(a), b + a[::-1])  # noqa: E731
    return _loop(lambda i, a, b: lax.cond(i % 2 == 0, both, lambda a, b: (_set(i)(a), b), a, b), a, b)


def _result_twice(a: jax.Array) -> Pair:
    return _loop(lambda i, a, b: (lax.cond(i % 2 == 0, _set(i), _keep, a + b),) * 2, a, a)


def _argument(a: jax.Array) -> jax.Array:
    return lax.cond(a[0, 0] % 2 == 0, _set(3), _keep, a)


# With how many copies of whole arrays remain, in all branches together.
_PROGRAMS: list[tuple[Callable[..., Any], int]] = [
    *((_updated, 0), (_scattered, 0), (_nested, 0), (_loops_in_branches, 0), (_between_updates, 0)),
    *((_one_computes_afresh, 0), (_two_arrays, 0), (_of_the_array, 0), (_of_temporaries, 0), (_of_nothing, 0)),
    *((_accepted, 1), (_one_rolls, 1), (_swapped, 3), (_rotated, 4), (_one_array_twice, 2), (_read_afterwards, 1)),
    *((_old_beside_new, 1), (_result_twice, 1), (_argument, 1)),
]


def _copies(function: Callable[..., Any], arguments: Sequence[np.ndarray]) -> int:
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo_bytes(function, *arguments))
    native = compile_program(message.SerializeToString(), "tests", can_call_host=False).native
    assert native is not None
    nests = [note.item for note in with_nested(native.code.notes) if isinstance(note.item, Region)]
    stores = [store for nest in nests if prod(nest.dims) == _ROWS * _COLUMNS for store in nest.stores]
    return sum(store.target.opcode is Opcode.COPY and isinstance(store.value, Load) for store in stores)


@pytest.mark.parametrize(("function", "copies"), _PROGRAMS, ids=lambda p: getattr(p, "__name__", ""))
def test_branches_copy_what_they_must(
    function: Callable[..., Any], copies: int, context: Context, rng: np.random.Generator
) -> None:
    shapes = [(0, 3) if name == "nothing" else _DIMS for name in function.__annotations__ if name != "return"]
    for _ in range(2):
        arguments = [rng.integers(-99, 99, shape, np.int32) for shape in shapes]
        ours, text = run_function(context, function, *arguments)
        for mine, theirs in zip(ours, run_on_xla(hlo_bytes(function, *arguments), arguments), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert "native conditional" in text
    assert _copies(function, arguments) == copies, text


def test_complex_numbers_of_two_doubles(context: Context, rng: np.random.Generator) -> None:
    """Loops copy no arrays of them, so a result that a call makes has a place of its own."""

    def function(a: jax.Array) -> jax.Array:
        return _loop(lambda i, a: (lax.cond(i % 2 == 0, lambda a: jnp.cumsum(a, 0), _set(i), a),), a)[0]

    with jax.enable_x64(True):
        arguments = [rng.integers(-9, 9, _DIMS).astype(np.complex128)]
        (mine,), text = run_function(context, function, *arguments)
        (theirs,) = run_on_xla(hlo_bytes(function, *arguments), arguments)
    np.testing.assert_array_equal(mine, theirs)
    assert "native conditional" in text


_EITHER = """
set {
  a = f32[1000] parameter(0)
  value = f32[1] constant({7})
  at = s32[] constant(5)
  ROOT changed = f32[1000] dynamic-update-slice(a, value, at)
}
keep {
  ROOT a = f32[1000] parameter(0)
}
ENTRY main {
  a = f32[1000] parameter(0)
  which = s32[] parameter(1)
  ROOT b = f32[1000] conditional(which, a, a), branch_computations={set, keep}
}"""


def test_a_donated_argument_is_changed_where_it_stands(context: Context, memory: Memory) -> None:
    executable = compile(context, f"HloModule either, input_output_alias={{ {{}}: (0, {{}}, must-alias) }}\n{_EITHER}")
    assert ".copy over" not in executable.artifact(Artifact.EXPLANATION).decode()
    for which, values in ((0, [0, 7, 0]), (1, [0, 0, 0])):
        number = put(memory, np.array(which, np.int32))
        a = put(memory, np.zeros(1000, np.float32))
        address = a.pointer_address()
        (kept,) = run(executable, a, number, non_donatable=[0])
        assert not get(a).any()
        assert kept.pointer_address() != address
        (changed,) = run(executable, a, number)
        assert a.is_deleted
        assert changed.pointer_address() == address
        for result in (kept, changed):
            assert get(result)[4:7].tolist() == values


def test_other_arguments_are_left_alone(context: Context, memory: Memory) -> None:
    executable = compile(context, _EITHER)
    for which, values in ((0, [0, 7, 0]), (1, [0, 0, 0])):
        a = put(memory, np.zeros(1000, np.float32))
        (b,) = run(executable, a, put(memory, np.array(which, np.int32)))
        assert get(b)[4:7].tolist() == values
        assert not get(a).any()
        assert a.pointer_address() != b.pointer_address()


def test_branches_take_operands_of_their_own(context: Context, memory: Memory) -> None:
    """Arrays that one branch passes through, another changes, and a third does not take; the number among them."""
    text = """
pass { p = (s32[900], s32[900]) parameter(0)  b = s32[900] get-tuple-element(p), index=1  two = s32[] constant(2)
  ROOT r = (s32[900], s32[]) tuple(b, two) }
set { p = (s32[], s32[900]) parameter(0)  n = s32[] get-tuple-element(p), index=0  value = s32[1] reshape(n)
  a = s32[900] get-tuple-element(p), index=1
  changed = s32[900] dynamic-update-slice(a, value, n)  ROOT r = (s32[900], s32[]) tuple(changed, n) }
count { n = s32[] parameter(0)  count = s32[900] iota(), iota_dimension=0
  ROOT r = (s32[900], s32[]) tuple(count, n) }
ENTRY main {
  x = s32[900] parameter(0)  which = s32[] parameter(1)  zero = s32[] constant(0)  n = s32[] add(which, zero)
  tripled = s32[900] add(x, x)  a = s32[900] add(tripled, x)  b = s32[900] multiply(a, x)
  pair = (s32[900], s32[900]) tuple(a, b)  set_pair = (s32[], s32[900]) tuple(n, a)
  ROOT r = (s32[900], s32[]) conditional(n, pair, set_pair, n), branch_computations={pass, set, count} }"""
    executable = compile(context, text)
    x = np.arange(-450, 450, dtype=np.int32)
    changed = 3 * x
    changed[1] = 1
    for which, expected in enumerate([(3 * x * x, 2), (changed, 1), (np.arange(900), 2)]):
        array, number = map(get, run(executable, put(memory, x), put(memory, np.array(which, np.int32))))
        np.testing.assert_array_equal(array, expected[0])
        assert number == expected[1]


def test_branches_share_their_work_and_call_libraries(context: Context, rng: np.random.Generator) -> None:
    """Arrays that are long enough for several threads, changed by loops, copies and a call."""

    def sort(a: jax.Array) -> jax.Array:
        """Of complex numbers, which a library sorts."""
        return jnp.sort(a.astype(jnp.complex64), 0).real.astype(jnp.int32)

    def function(a: jax.Array) -> jax.Array:
        branches = [sort, lambda a: jnp.roll(a, 1, 0), lambda a: a * 2 + 1, _set(1), _keep]
        return _loop(lambda i, a: (lax.switch(i % 5, branches, a),), a)[0]

    arguments = [rng.integers(-99, 99, (3000, 50), np.int32)]
    (mine,), text = run_function(context, function, *arguments)
    (theirs,) = run_on_xla(hlo_bytes(function, *arguments), arguments)
    np.testing.assert_array_equal(mine, theirs)
    assert "call sort" in text


def test_an_array_may_be_two_operands(context: Context, memory: Memory) -> None:
    """A branch changes one of them, and returns the other beside it."""
    text = """
either { p = (s32[900], s32[900]) parameter(0)  a = s32[900] get-tuple-element(p), index=0
  b = s32[900] get-tuple-element(p), index=1  value = s32[1] constant({5})  at = s32[] constant(1)
  changed = s32[900] dynamic-update-slice(a, value, at)  ROOT r = (s32[900], s32[900]) tuple(changed, b) }
keep { ROOT p = (s32[900], s32[900]) parameter(0) }
ENTRY main {
  x = s32[900] parameter(0)  which = s32[] parameter(1)  a = s32[900] add(x, x)  pair = (s32[900], s32[900]) tuple(a, a)
  ROOT r = (s32[900], s32[900]) conditional(which, pair, pair), branch_computations={either, keep} }"""
    executable = compile(context, text)
    x = np.arange(900, dtype=np.int32)
    for which, first in ((0, 5), (1, 2)):
        results = [get(r)[1] for r in run(executable, put(memory, x), put(memory, np.array(which, np.int32)))]
        assert results == [first, 2]
