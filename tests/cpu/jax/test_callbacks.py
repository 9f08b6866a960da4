"""Programs that call back into Python: results, order, transformations, failures, lifetimes."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)
X = np.arange(4, dtype=np.float32)


def test_pure_callback(agree: Callable[..., Any]) -> None:
    agree(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, F32, x) + 1, X)


def test_pure_callback_with_several_types_and_a_tree(agree: Callable[..., Any]) -> None:
    shapes = {"n": jax.ShapeDtypeStruct((), jnp.int32), "b": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16)}

    def host(x: Any, flag: Any) -> Any:
        return {"n": np.int32(np.sum(x) + bool(flag)), "b": np.full((2, 2), x[1], jnp.bfloat16)}

    agree(lambda x, flag: jax.pure_callback(host, shapes, x, flag), X, np.bool_(True))


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_vmap_of_a_callback(agree: Callable[..., Any], method: str) -> None:
    def one(x: jax.Array) -> jax.Array:
        return jax.pure_callback(
            lambda a: np.sin(np.asarray(a)), jax.ShapeDtypeStruct((), x.dtype), x, vmap_method=method
        )

    agree(jax.vmap(one), X)


def test_gradient_through_a_callback(agree: Callable[..., Any]) -> None:
    @jax.custom_vjp
    def cube(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda a: np.asarray(a) ** 3, F32, x)

    def backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        return (jax.pure_callback(lambda a, b: 3 * np.asarray(a) ** 2 * np.asarray(b), F32, x, g),)

    cube.defvjp(lambda x: (cube(x), x), backward)
    agree(jax.grad(lambda x: cube(x).sum()), X)


def test_a_callback_without_results_runs() -> None:
    seen: list[Any] = []
    jax.jit(lambda x: jax.debug.callback(lambda a: seen.append(np.asarray(a)), x))(X)
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [X])


def test_io_callbacks_of_a_loop_come_in_order_also_across_programs() -> None:
    seen: list[int] = []

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
        return x + 1

    program = jax.jit(lambda start, x: jax.lax.fori_loop(start, start + 3, body, x))
    for start in (0, 10, 20):
        program(start, 0.0)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_debug_print(capsys: pytest.CaptureFixture[str]) -> None:
    def program(x: jax.Array) -> jax.Array:
        for i in range(3):
            jax.debug.print("line {i}: {x}", i=i, x=x[i], ordered=True)
        return x

    jax.jit(program)(X)
    jax.effects_barrier()
    assert capsys.readouterr().out.splitlines() == ["line 0: 0.0", "line 1: 1.0", "line 2: 2.0"]


@pytest.mark.parametrize("ordered", [False, True])
def test_all_else_is_native(ordered: bool, emitted: Callable[[str], str], rng: np.random.Generator) -> None:
    """In order between what goes before and after, in a loop and in a branch, with arguments of their moment."""
    x, seen = rng.uniform(0, 1, 100).astype(np.float32), []

    def program(x: jax.Array) -> jax.Array:
        def tell(name: str, value: jax.Array) -> None:
            jax.debug.callback(lambda v: seen.append((name, np.asarray(v))), value, ordered=ordered)

        def iteration(n: jax.Array, y: jax.Array) -> jax.Array:
            tell("iteration", y)
            jax.lax.cond(n == 1, lambda y: tell("branch", y * 2), lambda y: None, y)
            return jnp.sin(y) + y * 0.5

        tell("before", x + 1)
        y = jax.lax.fori_loop(0, 3, iteration, x)
        tell("after", y)
        return y * y

    result = jax.jit(program)(x)
    jax.effects_barrier()
    iterations = [x]
    for _ in range(3):
        iterations.append(np.sin(iterations[-1]) + iterations[-1] * 0.5)
    expected = [
        ("before", x + 1),
        ("iteration", iterations[0]),
        ("iteration", iterations[1]),
        ("branch", iterations[1] * 2),
    ]
    expected += [("iteration", iterations[2]), ("after", iterations[3])]
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (_, ours), (name, exact) in zip(seen, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(result, iterations[3] ** 2, rtol=1e-5)
    assert "native steps" in emitted("jit_program")


def test_only_the_branch_that_is_taken_calls() -> None:
    seen: list[str] = []

    def branch(name: str) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda: seen.append(name))
            return x

        return run

    program = jax.jit(lambda p, x: jax.lax.cond(p, branch("yes"), branch("no"), x))
    program(True, 1.0)
    program(False, 1.0)
    jax.effects_barrier()
    assert seen == ["yes", "no"]


def test_an_exception_ends_the_program_with_its_traceback_and_nothing_else() -> None:
    def culprit(_: Any) -> Any:
        raise LookupError("nothing here")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"LookupError: nothing here(?s:.*)in culprit"):
        jax.jit(lambda x: jax.pure_callback(culprit, F32, x))(X).block_until_ready()
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x + 1)(X)), X + 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_exception_is_heard_at_the_call_and_by_no_later_program(ordered: bool) -> None:
    """No token of a program that failed is handed on."""

    def culprit(_: Any) -> None:
        raise LookupError("nothing here")

    heard: list[float] = []
    failing = jax.jit(lambda x: (io_callback(culprit, None, x, ordered=ordered), x + 1)[1])
    working = jax.jit(lambda x: (io_callback(lambda a: heard.append(float(a[0])), None, x, ordered=ordered), x + 1)[1])
    for n in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: nothing here"):
            failing(X)
        jax.effects_barrier()
        np.testing.assert_array_equal(working(X + n), X + n + 1)
        jax.effects_barrier()
    assert heard == [0, 1]


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Incorrect output shape for return value #0"):
        jax.jit(lambda x: jax.pure_callback(lambda a: np.zeros(5, np.float32), F32, x))(X).block_until_ready()


def test_callbacks_of_successive_launches_come_in_order() -> None:
    heard: list[tuple[float, str]] = []

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda a: heard.append((float(a[0]), "first")), x + 0.0)
        y = jax.pure_callback(lambda a: np.asarray(a) * 2, F32, x)
        jax.debug.callback(lambda a: heard.append((float(a[0]) / 2, "last")), y)
        return y

    for n in range(50):
        program(X + n)
    jax.effects_barrier()
    assert [n for n, _ in heard] == sorted(n for n, _ in heard) and len(heard) == 100


def test_a_callback_may_run_a_program_with_a_callback() -> None:
    inner = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, F32, x))
    outer = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(inner(np.asarray(a))) * 10, F32, x))
    results = [outer(X + n) for n in range(5)]
    for n, result in enumerate(results):
        np.testing.assert_array_equal(result, (X + n + 1) * 10)


def test_the_barrier_waits_for_a_callback_that_a_later_program_overtook() -> None:
    heard: list[float] = []

    def slow(a: np.ndarray) -> None:
        time.sleep(0.2 if not heard and float(a[0]) == 0 else 0)
        heard.append(float(a[0]))

    program = jax.jit(lambda x: (jax.debug.callback(slow, x + 0.0), x * 2)[1])
    for n in range(4):
        program(X + n)
    jax.effects_barrier()
    assert sorted(heard) == [0, 1, 2, 3]


def test_arguments_may_be_kept() -> None:
    kept: list[np.ndarray] = []
    program = jax.jit(lambda x: (jax.debug.callback(lambda a: kept.append(np.asarray(a)), x + 0.0), x * 2)[1])
    for n in range(20):
        program(X + n)
    jax.effects_barrier()
    np.testing.assert_array_equal(np.sort(np.stack(kept), axis=0), X + np.arange(20, dtype=np.float32)[:, None])


def test_a_function_goes_with_its_program() -> None:
    class Function:
        def __call__(self, x: Any) -> Any:
            return np.asarray(x)

    function = Function()
    watched = weakref.ref(function)
    jax.jit(lambda x, function=function: jax.pure_callback(function, F32, x))(X).block_until_ready()
    del function
    jax.clear_caches()
    gc.collect()
    assert watched() is None


def test_a_function_stays_while_its_program_runs() -> None:
    def start() -> jax.Array:
        def program(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 50, lambda _, y: jax.pure_callback(lambda a: np.asarray(a) + 1, F32, y), x)

        return jax.jit(program)(X)

    results = [start() for _ in range(5)]
    jax.clear_caches()
    gc.collect()
    for result in results:
        np.testing.assert_array_equal(np.asarray(result), X + 50)


def test_checkify() -> None:
    def program(x: jax.Array) -> jax.Array:
        checkify.check(jnp.all(x < 3), "too large: {}", x[3])
        return x

    error, _ = jax.jit(checkify.checkify(program))(X)
    with pytest.raises(checkify.JaxRuntimeError, match=r"too large: 3\.0"):
        error.throw()


def test_a_program_with_callbacks_is_not_exported() -> None:
    exported = jax.export.export(jax.jit(lambda x: jax.pure_callback(np.sin, F32, x)))
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        exported(X)
