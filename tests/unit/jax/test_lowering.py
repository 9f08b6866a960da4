"""Every primitive of JAX lowers for flagos, and ours lower to the custom calls of kernels/reference/CUSTOM_CALLS.md."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax._src
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses
from jax.experimental import checkify, io_callback
from jax.experimental.sparse import linalg as sparse_linalg
from jax.sharding import AxisType, Mesh, PartitionSpec

import flagos_backend.kernels.reference
from flagos_backend.frontends.jax import jax_internals, lowering
from flagos_backend.frontends.jax.errors import UnsupportedParameter

Lower = Callable[..., Any]

#: Primitives that exist for one vendor's hardware: their definition is a kernel of that vendor.
VENDOR_ONLY = {
    "cudnn_fusion": "a computation for cuDNN's graph API, chosen by name",
    "dot_product_attention_fp8_fwd": "cuDNN's attention with its own scaling protocol",
    "dot_product_attention_fp8_bwd": "cuDNN's attention with its own scaling protocol",
    "mosaic_gpu": "a kernel written in NVIDIA's dialect",
    "mosaic_gpu_p": "a kernel written in NVIDIA's dialect",
    "tpu_custom_call": "a kernel written in the TPU's dialect",
}
#: Modules of JAX that define no primitive for general use, or whose import needs what is not installed.
NOT_IMPORTED = re.compile(r"test|tpu|mosaic|pallas|tools|lib\.triton|export\._export_back_compat")


@pytest.fixture(scope="module")
def primitives() -> dict[Any, frozenset[str | None]]:
    for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
        if NOT_IMPORTED.search(module.name) is None:
            importlib.import_module(module.name)
    return jax_internals.registered_primitives()


def test_every_primitive_has_a_rule_or_a_reason(primitives: dict[Any, frozenset[str | None]]) -> None:
    assert len(primitives) > 250
    without = {str(p) for p, platforms in primitives.items() if not platforms & {None, "flagos"}}
    assert sorted(without - VENDOR_ONLY.keys()) == []


def test_no_vendor_only_primitive_has_a_rule(primitives: dict[Any, frozenset[str | None]]) -> None:
    with_rule = {str(p) for p, platforms in primitives.items() if platforms & {None, "flagos"}}
    assert sorted(with_rule & VENDOR_ONLY.keys()) == []


def harnesses() -> dict[str, test_harnesses.Harness]:
    """One of JAX's own example programs for each of its groups, in float32 where the group has one."""
    chosen: dict[str, test_harnesses.Harness] = {}
    for harness in test_harnesses.all_harnesses:
        if harness.group_name not in chosen or (
            chosen[harness.group_name].dtype != np.float32 and harness.dtype == np.float32
        ):
            chosen[harness.group_name] = harness
    return chosen


HARNESSES = harnesses()


@pytest.mark.parametrize("group", HARNESSES)
def test_jax_s_own_examples_lower(lower: Lower, group: str, rng: np.random.Generator) -> None:
    harness = HARNESSES[group]
    random = np.random.RandomState(rng.integers(2**31))
    lower(harness.dyn_fun, *harness.dyn_args_maker(random))


@pytest.mark.parametrize("primitive", ["psend", "precv"])
def test_point_to_point_transfers_are_gpu_only_in_jax(lower: Lower, primitive: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",), axis_types=(AxisType.Auto,))

    def transfer(x: jax.Array) -> jax.Array:
        if primitive == "psend":
            jax.lax.psend(x, "a", [(0, 1)])
            return x
        return jax.lax.precv(jax.lax.create_token(), jax.ShapeDtypeStruct(x.shape, x.dtype), "a", [(0, 1)])

    spec = PartitionSpec("a")
    mapped = jax.shard_map(transfer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(NotImplementedError, match="only implemented on GPU"):
        lower(mapped, jax.ShapeDtypeStruct((8,), jnp.float32))


@pytest.mark.parametrize("rule", lowering.RULES, ids=lambda rule: rule.primitive)
def test_the_primitive_of_each_rule_exists(rule: Any) -> None:
    assert jax_internals.primitive(rule.module, rule.primitive) is not None


def documented_targets() -> set[str]:
    folder = Path(flagos_backend.kernels.reference.__file__).parent
    return set(re.findall(r"`(flagos\.\w+)`", (folder / "CUSTOM_CALLS.md").read_text()))


def test_every_target_is_documented() -> None:
    assert {*lowering.linear_algebra.TARGETS, *lowering.sparse.TARGETS} <= documented_targets()


# ---- Linear algebra ------------------------------------------------------------------------------------------------

A = jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)
WIDE = jax.ShapeDtypeStruct((3, 5), jnp.complex64)

DECOMPOSITIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, dict[str, Any]]] = {
    "eigh": (jnp.linalg.eigh, (A,), "flagos.eigh", {"lower": True}),
    "eigh upper": (
        lambda a: jax.lax.linalg.eigh(a, lower=False, symmetrize_input=False),
        (A,),
        "flagos.eigh",
        {"lower": False},
    ),
    "eigh subset": (
        lambda a: jax.lax.linalg.eigh(a, subset_by_index=(1, 3)),
        (A,),
        "flagos.eigh",
        {"lower": True, "subset": [1, 3]},
    ),
    "eig": (jnp.linalg.eig, (A,), "flagos.eig", {"left": False, "right": True}),
    "eigvals": (jnp.linalg.eigvals, (A,), "flagos.eig", {"left": False, "right": False}),
    "schur": (jax.lax.linalg.schur, (A,), "flagos.schur", {"vectors": True}),
    "schur form": (
        lambda a: jax.lax.linalg.schur(a, compute_schur_vectors=False),
        (A,),
        "flagos.schur",
        {"vectors": False},
    ),
    "hessenberg": (jax.lax.linalg.hessenberg, (A,), "flagos.hessenberg", {}),
    "tridiagonal": (lambda a: jax.lax.linalg.tridiagonal(a, lower=False), (A,), "flagos.tridiagonal", {"lower": False}),
    "pivoted qr": (lambda a: jax.lax.linalg.qr(a, pivoting=True), (A,), "flagos.geqp3", {}),
    "qr": (jnp.linalg.qr, (WIDE,), "flagos.geqrf", {}),
    "q": (jnp.linalg.qr, (WIDE,), "flagos.householder_product", {}),
    "lu": (jax.lax.linalg.lu, (WIDE,), "flagos.lu", {}),
    "svd": (jnp.linalg.svd, (WIDE,), "flagos.svd", {"compute_uv": True, "full_matrices": True}),
    "thin svd": (
        lambda a: jnp.linalg.svd(a, full_matrices=False),
        (WIDE,),
        "flagos.svd",
        {"compute_uv": True, "full_matrices": False},
    ),
    "singular values": (
        lambda a: jnp.linalg.svd(a, compute_uv=False),
        (WIDE,),
        "flagos.svd",
        {"compute_uv": False, "full_matrices": True},
    ),
    "ormqr": (
        lambda a, t, c: jax.lax.linalg.ormqr(a, t, c, left=False, transpose=True),
        (A, jax.ShapeDtypeStruct((2, 4), jnp.float32), A),
        "flagos.ormqr",
        {"left": False, "transpose": True},
    ),
}


def calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The targets and JSON configs of custom calls in StableHLO text."""
    found = re.findall(r'stablehlo\.custom_call @([\w.]+)\(.*?backend_config = "(.*?)"', text)
    return [(target, json.loads(config.replace("\\22", '"') or "{}")) for target, config in found]


@pytest.mark.parametrize("case", DECOMPOSITIONS)
def test_decomposition(lower: Lower, case: str) -> None:
    function, arguments, target, config = DECOMPOSITIONS[case]
    assert target in documented_targets()
    assert (target, config) in calls(lower(function, *arguments).as_text())


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (lambda a: jax.lax.linalg.eigh(a, implementation=jax.lax.linalg.EighImplementation.JACOBI), "JACOBI"),
        (lambda a: jax.lax.linalg.svd(a, algorithm=jax.lax.linalg.SvdAlgorithm.POLAR), "POLAR"),
        (lambda a: jax.lax.linalg.svd(a, full_matrices=False, subset_by_index=(0, 2)), "subset_by_index"),
        (lambda a: jax.lax.linalg.schur(a, sort_eig_vals=True), "sort_eig_vals"),
        (lambda a: jax.lax.linalg.lu(a.astype(jnp.bfloat16)), "Unsupported dtype bfloat16"),
    ],
    ids=["eigh algorithm", "svd algorithm", "svd subset", "sorted schur", "element type"],
)
def test_what_no_kernel_computes_is_refused_at_lowering(lower: Lower, function: Lower, parameter: str) -> None:
    with pytest.raises(UnsupportedParameter, match=parameter):
        lower(function, A)


def test_symbolic_batch_sizes_lower(lower: Lower) -> None:
    (batch,) = jax.export.symbolic_shape("b")
    text = lower(jnp.linalg.eigvalsh, jax.ShapeDtypeStruct((batch, 4, 4), jnp.float32)).as_text()
    assert "flagos.eigh" in text


# ---- Sparse matrices -----------------------------------------------------------------------------------------------

DATA, INDEX = jax.ShapeDtypeStruct((6,), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.int32)
POINTER = jax.ShapeDtypeStruct((4,), jnp.int32)


@pytest.mark.parametrize("name", ["csr_spmv", "csr_spmm", "coo_spmv", "coo_spmm"])
def test_sparse_product(lower: Lower, name: str) -> None:
    primitive = jax_internals.primitive("jax.experimental.sparse._lowerings", f"{name}_p")
    dense = jax.ShapeDtypeStruct((3, 2) if name.endswith("mm") else (3,), jnp.float32)
    second = POINTER if name.startswith("csr") else INDEX
    text = lower(
        lambda *args: primitive.bind(*args, shape=(3, 5), transpose=True), DATA, INDEX, second, dense
    ).as_text()
    assert f"flagos.{name}" in documented_targets()
    assert calls(text) == [(f"flagos.{name}", {"shape": [3, 5], "transpose": True})]


def test_sparse_solve(lower: Lower) -> None:
    b = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert calls(lower(sparse_linalg.spsolve, DATA, INDEX, POINTER, b).as_text()) == [("flagos.spsolve", {})]


# ---- Scaled products and collectives -------------------------------------------------------------------------------


def test_scaled_matmul_is_computed_from_its_parts(lower: Lower) -> None:
    primitive = jax_internals.primitive("jax._src.cudnn.scaled_matmul_stablehlo", "_scaled_matmul_p")
    values = jax.ShapeDtypeStruct((1, 8, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((1, 8, 2), jnp.float8_e8m0fnu)
    text = lower(
        lambda *args: primitive.bind(*args, preferred_element_type=jnp.bfloat16), values, values, scales, scales
    ).as_text()
    assert "custom_call" not in text
    assert "tensor<1x8x8xbf16>" in text


def test_pbroadcast_is_a_collective_broadcast(lower: Lower) -> None:
    mesh = Mesh(np.array(jax.devices()), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")
    function = jax.shard_map(
        lambda x: jax.lax.pbroadcast(x, "a", 3), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    assert "stablehlo.collective_broadcast" in lower(function, jax.ShapeDtypeStruct((8,), jnp.float32)).as_text()


# ---- Callbacks -----------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((4,), jnp.float32)
CALLBACKS: dict[str, Callable[[jax.Array], Any]] = {
    "debug.print": lambda x: jax.debug.print("{}", x),
    "debug.callback": lambda x: jax.debug.callback(lambda _: None, x),
    "pure_callback": lambda x: jax.pure_callback(np.sin, X, x),
    "io_callback": lambda x: io_callback(np.sin, X, x),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(lower: Lower, name: str) -> None:
    ((target, config),) = calls(lower(CALLBACKS[name], X).as_text())
    assert target == "flagos.host_callback"
    assert config.keys() == {"id"}


def test_a_check_that_is_not_functionalized_is_a_callback_where_the_user_allows_it(lower: Lower) -> None:
    def check(x: jax.Array) -> None:
        checkify.check(jnp.all(x > 0), "must be positive")

    with pytest.raises(ValueError, match="not functionalized"):
        lower(check, X)
    with jax_internals.lookup("jax._src.config", "xla_runtime_errors")(True):
        ((target, _),) = calls(lower(check, X).as_text())
    assert target == "flagos.host_callback"


def test_ordered_callbacks_pass_a_token_on(lower: Lower) -> None:
    def function(x: jax.Array) -> None:
        for _ in range(2):
            io_callback(lambda _: None, None, x, ordered=True)

    text = lower(function, X).as_text()
    first, second = re.findall(r"(%\w+)(?::\d+)? = stablehlo.custom_call @flagos.host_callback\((.*?)\)", text)
    assert first[0] in second[1]


def test_a_program_for_two_platforms_takes_jax_s_own_rule(lower: Lower) -> None:
    with pytest.raises(NotImplementedError, match="multi-platform"):
        jax.jit(CALLBACKS["pure_callback"]).trace(X).lower(lowering_platforms=("flagos", "cpu"))


def test_other_platforms_keep_jax_s_own_callbacks() -> None:
    text = jax.jit(CALLBACKS["pure_callback"]).lower(X).as_text()
    assert "xla_ffi_python_cpu_callback" in text
