"""Programs over eight devices: partitioned by jaxlib, run together by the backend, as on JAX's own CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
Agree = Callable[[Callable[[Mesh], Any]], Any]


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((16, 32)).astype(np.float32)


@pytest.fixture
def w(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((32, 8)).astype(np.float32)


def put(array: np.ndarray, mesh: Mesh, *spec: Any, **options: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec), **options))


@pytest.mark.parametrize("spec", [("a", "b"), ("a",), (None, "b"), (("a", "b"),), ("b", "a"), ()], ids=str)
def test_transfers(agree: Agree, x: np.ndarray, spec: tuple[Any, ...]) -> None:
    agree(lambda mesh: put(x, mesh, *spec))


@pytest.mark.parametrize("left", [("a", "b"), ("a",), (None, "b"), ()], ids=str)
@pytest.mark.parametrize("right", [("b",), (None, "a"), ()], ids=str)
def test_matrix_products(agree: Agree, x: np.ndarray, w: np.ndarray, left: Any, right: Any) -> None:
    agree(lambda mesh: jax.jit(jnp.matmul)(put(x, mesh, *left), put(w, mesh, *right)))


FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "reductions": lambda x: (x.sum(), x.max(0), x.mean(1), jnp.argmax(x, 1)),
    "sort": lambda x: (jnp.sort(x, axis=0), jnp.argsort(x, axis=1)),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(32), x),
    "cumulative": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)),
    "scatter": lambda x: x.at[jnp.array([0, 5, 5])].add(1.0),
    "gather": lambda x: x[jnp.array([3, 3, 15, 0])],
    "reshape and transpose": lambda x: x.reshape(4, 4, 32).transpose(2, 0, 1),
    "pad, slice, roll": lambda x: (jnp.pad(x, 1), x[1:9, ::2], jnp.roll(x, 3, 0)),
    "while": lambda x: lax.while_loop(lambda s: s.sum() < 1e3, lambda s: s * 1.5 + 1.0, jnp.abs(x)),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: -x @ x.T, x),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)),
    "erfc": lambda x: lax.erfc(x),  # a custom call of its own: every dimension may be split
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("spec", [("a", "b"), ("a",), (None, "b")], ids=str)
def test_functions(agree: Agree, x: np.ndarray, name: str, spec: Any) -> None:
    agree(lambda mesh: jax.jit(FUNCTIONS[name])(put(x, mesh, *spec)))


def test_convolution_split_in_space(agree: Agree, rng: np.random.Generator) -> None:
    image = rng.standard_normal((4, 16, 16, 3)).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 3, 8)).astype(np.float32)
    dims = ("NHWC", "HWIO", "NHWC")
    convolve = jax.jit(lambda i: lax.conv_general_dilated(i, kernel, (1, 1), "SAME", dimension_numbers=dims))
    agree(lambda mesh: convolve(put(image, mesh, "a", "b")))


def test_gradient(agree: Agree, x: np.ndarray, w: np.ndarray) -> None:
    loss = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
    agree(lambda mesh: loss(put(w, mesh, "b", "a"), put(x, mesh, "a", "b")))


def test_random_numbers_do_not_depend_on_the_sharding(agree: Agree) -> None:
    def draw(mesh: Mesh) -> jax.Array:
        key = jax.device_put(jax.random.key(7), NamedSharding(mesh, P()))
        return jax.jit(lambda k: jax.random.normal(k, (16, 16)), out_shardings=NamedSharding(mesh, P("a", "b")))(key)

    ours = agree(draw)
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_allclose(
            np.asarray(ours), jax.random.normal(jax.random.key(7), (16, 16)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("spec", [("b", "a"), (("a", "b"),), (None, ("b", "a")), ()], ids=str)
def test_outputs_are_laid_out_as_asked(agree: Agree, x: np.ndarray, spec: Any) -> None:
    agree(lambda mesh: jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P(*spec)))(put(x, mesh, "a", "b")))


def test_resharding_between_devices(agree: Agree, x: np.ndarray) -> None:
    agree(lambda mesh: jax.device_put(put(x, mesh, "a", "b"), NamedSharding(mesh, P("b", "a"))))


def test_explicit_axes(devices: list[jax.Device], x: np.ndarray, w: np.ndarray) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x, w: x @ w)(put(x, mesh, "a", None), put(w, mesh, None, "b"))
    assert result.sharding.spec == P("a", "b")
    np.testing.assert_allclose(np.asarray(result), x @ w, rtol=1e-5, atol=1e-5)


# ---- Collectives ---------------------------------------------------------------------------------------------------

COLLECTIVES: dict[str, tuple[Callable[[jax.Array], jax.Array], Any]] = {
    "psum": (lambda y: lax.psum(y, "a"), P(None, "b")),
    "psum over both": (lambda y: lax.psum(y, ("a", "b")), P()),
    "pmax": (lambda y: lax.pmax(y, "b"), P("a", None)),
    "pmean": (lambda y: lax.pmean(y, "a"), P(None, "b")),
    "all_gather": (lambda y: lax.all_gather(y, "b", axis=1, tiled=True), P("a")),
    "psum_scatter": (lambda y: lax.psum_scatter(y, "a", scatter_dimension=0, tiled=True), P("a", "b")),
    "all_to_all": (lambda y: lax.all_to_all(y, "b", 1, 0, tiled=True), P("a", "b")),
    "ppermute": (lambda y: lax.ppermute(y, "b", [(i, (i + 1) % 4) for i in range(4)]), P("a", "b")),
    "ppermute to some": (lambda y: lax.ppermute(y, "b", [(0, 2), (3, 1)]), P("a", "b")),
    "axis_index": (lambda y: y * 0 + lax.axis_index("a") * 10 + lax.axis_index("b"), P("a", "b")),
    "axis_index_groups": (lambda y: lax.psum(y, "b", axis_index_groups=[[0, 2], [1, 3]]), P("a", "b")),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(agree: Agree, x: np.ndarray, name: str) -> None:
    function, out = COLLECTIVES[name]

    def run(mesh: Mesh) -> jax.Array:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("a", "b"), out_specs=out, check_vma=False)
        return jax.jit(mapped)(put(x, mesh, "a", "b"))

    agree(run)


def test_pbroadcast(mesh: Mesh, x: np.ndarray) -> None:
    mapped = jax.shard_map(
        lambda y: lax.pbroadcast(y, "a", 1), mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False
    )
    result = np.asarray(jax.jit(mapped)(put(x, mesh, "a")))
    np.testing.assert_array_equal(result, np.concatenate([x[8:], x[8:]]))


def test_pmap(devices: list[jax.Device], x: np.ndarray) -> None:
    result = jax.pmap(lambda y: lax.psum(y, "i"), axis_name="i", devices=devices)(x[:8])
    np.testing.assert_allclose(np.asarray(result)[3], x[:8].sum(0), rtol=1e-5, atol=1e-5)


def test_a_collective_in_a_loop(agree: Agree, x: np.ndarray) -> None:
    def step(_: jax.Array, y: jax.Array) -> jax.Array:
        return lax.pmean(y, "a") + y * 0.5

    def run(mesh: Mesh) -> jax.Array:
        spec = P("a", "b")
        loop = jax.shard_map(
            lambda y: lax.fori_loop(0, 5, step, y), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(loop)(put(x, mesh, "a", "b"))

    agree(run)


# ---- Donation, memories, devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["output sharding given", "output sharding found"])
def test_donation(agree: Agree, x: np.ndarray, told: bool) -> None:
    def run(mesh: Mesh) -> jax.Array:
        given = put(x, mesh, "a", "b")
        options = {"out_shardings": given.sharding} if told else {}
        result = jax.jit(lambda x: x * 2 + 1, donate_argnums=0, **options)(given)
        assert given.is_deleted()
        return result

    agree(run)


def test_a_donated_array_that_no_output_can_take_over_stays(agree: Agree, x: np.ndarray) -> None:
    def run(mesh: Mesh) -> jax.Array:
        given = put(x, mesh, "a")
        result = jax.jit(lambda x: (x @ x.T)[:-1], donate_argnums=0)(given)
        assert not given.is_deleted()
        return result

    agree(run)


def test_memory_kinds(agree: Agree, x: np.ndarray) -> None:
    def run(mesh: Mesh) -> jax.Array:
        host, device = (NamedSharding(mesh, P("a"), memory_kind=kind) for kind in ("pinned_host", "device"))
        there = jax.jit(lambda y: y * 2, out_shardings=host)(put(x, mesh, "a"))
        assert there.sharding.memory_kind == "pinned_host"
        return jax.jit(lambda y: jax.device_put(y, device) + 1)(there)

    agree(run)


def test_a_program_for_some_of_the_devices(devices: list[jax.Device], x: np.ndarray) -> None:
    mesh = Mesh(np.array([devices[6], devices[1], devices[3]]), ("a",))
    result = jax.jit(lambda y: y - y.mean(0))(put(x[:12], mesh, "a"))
    assert [shard.device.id for shard in result.addressable_shards] == [6, 1, 3]
    np.testing.assert_allclose(np.asarray(result), x[:12] - x[:12].mean(0), rtol=1e-5, atol=1e-5)


def test_each_device_runs_its_own_program(devices: list[jax.Device], x: np.ndarray) -> None:
    double = jax.jit(lambda y: y * 2)
    results = [double(jax.device_put(x + device.id, device)) for device in devices]
    for device, result in zip(devices, results, strict=True):
        assert result.devices() == {device}
        np.testing.assert_array_equal(np.asarray(result), (x + device.id) * 2)


def test_output_shardings_of_a_compiled_program(mesh: Mesh, x: np.ndarray) -> None:
    compiled = jax.jit(lambda x: (x, x.sum())).lower(put(x, mesh, "a", "b")).compile()
    assert [sharding.spec for sharding in jax.tree.leaves(compiled.output_shardings)] == [P("a", "b"), P()]


def test_decompositions_are_split_along_their_batch(agree: Agree, rng: np.random.Generator) -> None:
    root = rng.standard_normal((8, 5, 5)).astype(np.float32)
    spd = root @ root.swapaxes(-1, -2) + 5 * np.eye(5, dtype=np.float32)
    agree(lambda mesh: jax.jit(jnp.linalg.eigvalsh)(put(spd, mesh, "a")))


def test_custom_partitioning(agree: Agree, x: np.ndarray) -> None:
    def rows(mesh: Mesh, arguments: Any, _result: Any) -> NamedSharding:
        return NamedSharding(mesh, P(arguments[0].sharding.spec[0]))

    def partition(mesh: Mesh, arguments: Any, result: Any) -> Any:
        sharding = rows(mesh, arguments, result)
        return mesh, lambda x: jnp.sort(x, axis=-1), sharding, (sharding,)

    sort = custom_partitioning(lambda x: jnp.sort(x, axis=-1))
    sort.def_partition(partition=partition, infer_sharding_from_operands=rows, sharding_rule="i j -> i j")
    agree(lambda mesh: jax.jit(sort)(put(x, mesh, "a")))


# ---- Callbacks -----------------------------------------------------------------------------------------------------


def test_a_callback_sees_the_whole_array_once(agree: Agree, x: np.ndarray) -> None:
    def run(mesh: Mesh) -> jax.Array:
        seen: list[np.ndarray] = []

        def program(x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda a: seen.append(np.asarray(a)), x)
            return x + jax.pure_callback(lambda a: np.asarray(a) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        result = jax.jit(program)(put(x, mesh, "a", "b")).block_until_ready()
        jax.effects_barrier()
        np.testing.assert_array_equal(seen, [x])
        return result

    agree(run)


def test_a_callback_in_shard_map_runs_on_each_device(agree: Agree, x: np.ndarray) -> None:
    def run(mesh: Mesh) -> jax.Array:
        seen: list[tuple[int, ...]] = []

        def body(y: jax.Array) -> jax.Array:
            jax.debug.callback(lambda a: seen.append(a.shape), y)
            return jax.pure_callback(lambda a: np.asarray(a) + 1, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
        result = jax.jit(mapped)(put(x, mesh, "a", "b")).block_until_ready()
        jax.effects_barrier()
        assert seen == [(8, 8)] * 8
        return result

    agree(run)


def test_a_partitioned_callback_sees_the_shards(agree: Agree, x: np.ndarray) -> None:
    def run(mesh: Mesh) -> jax.Array:
        seen: list[tuple[int, ...]] = []

        def program(x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda a: seen.append(a.shape), x, partitioned=True)
            return x + 1

        result = jax.jit(program)(put(x, mesh, "a")).block_until_ready()
        jax.effects_barrier()
        assert seen == [(8, 32)] * 8
        return result

    agree(run)


def test_a_program_without_results(devices: list[jax.Device], x: np.ndarray) -> None:
    seen: list[float] = []
    mesh = Mesh(np.array(devices), ("a",))

    def program(x: jax.Array) -> None:
        jax.debug.callback(lambda a: seen.append(float(a)), x.sum())

    jax.jit(program)(put(x, mesh, "a"))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [x.sum()] * len(seen), rtol=1e-4, atol=1e-4)
    assert seen


def test_gradients_stay_unreduced_across_nested_jits(devices: list[jax.Device]) -> None:
    """Each device holds a part of the sum, which XLA's own pipeline decides; on JAX's CPU they are the same."""

    def run(devices: list[jax.Device]) -> tuple[list[np.ndarray], np.ndarray]:
        mesh = Mesh(np.array(devices[:2]), ("a",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            x = jax.reshard(jnp.arange(4.0), P(reduced={"a"}))
            parts = jax.jit(jax.grad(jax.jit(lambda x: (x + x).sum())))(x)
            return [np.asarray(shard.data) for shard in parts.addressable_shards], jax.reshard(parts, P())

    (ours, whole), (theirs, _) = run(devices), run(jax.devices("cpu"))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(whole, np.full(4, 2.0))


def test_reductions_over_the_same_devices_are_one(agree: Agree, x: np.ndarray, w: np.ndarray) -> None:
    def run(mesh: Mesh) -> Any:
        grad = jax.jit(jax.grad(lambda ws, x: jnp.mean(jnp.tanh(x @ ws[0]) @ ws[1])))
        arguments = (put(w, mesh), put(w.T.copy(), mesh)), put(x, mesh, "a")
        assert grad.lower(*arguments).compile().as_text().count("all-reduce(") == 1
        return grad(*arguments)

    agree(run)


def test_inspect_array_sharding(mesh: Mesh, x: np.ndarray) -> None:
    seen: list[Any] = []

    def program(x: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(x * 2, callback=seen.append)
        return x + 1

    jax.jit(program)(put(x, mesh, "a", "b")).block_until_ready()
    assert [sharding.spec for sharding in seen] == [P("a", "b")]


def test_a_failing_callback_on_one_device_fails_the_program_and_nothing_after_it(mesh: Mesh, x: np.ndarray) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("nothing on this device")

    program = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum())
    with pytest.raises(jax.errors.JaxRuntimeError, match="nothing on this device"):
        program(put(x, mesh, "a", "b")).block_until_ready()
    np.testing.assert_allclose(np.asarray(jax.jit(jnp.sum)(put(x, mesh, "a"))), x.sum(), rtol=1e-4, atol=1e-4)
