"""JAX's own test files, run by pytest on the platform and on JAX's CPU from a checkout that the caller gives."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tools.conformance.device import of_platform
from tools.conformance.pytest_files import OFFSET, STRIDE, Peer, Side, run_files
from tools.conformance.records import ResultFile

# What is not about another vendor's hardware or a build system.
FILES = (
    "ann_test.py",
    "aot_test.py",
    "api_test.py",
    "api_util_test.py",
    "array_test.py",
    "batching_test.py",
    "blocked_sampler_test.py",
    "buffer_callback_test.py",
    "checkify_test.py",
    "cholesky_update_test.py",
    "compilation_cache_test.py",
    "core_test.py",
    "custom_api_test.py",
    "custom_linear_solve_test.py",
    "custom_partitioning_test.py",
    "custom_root_test.py",
    "debug_nans_test.py",
    "debugging_primitives_test.py",
    "dtypes_test.py",
    "eigh_test.py",
    "error_check_test.py",
    "experimental_rnn_test.py",
    "export_back_compat_test.py",
    "export_harnesses_multi_platform_test.py",
    "export_test.py",
    "ffi_test.py",
    "fft_test.py",
    "generated_fun_test.py",
    "image_test.py",
    "jax_jit_test.py",
    "jax_numpy_error_test.py",
    "jet_test.py",
    "key_reuse_test.py",
    "lax_autodiff_test.py",
    "lax_control_flow_test.py",
    "lax_numpy_einsum_test.py",
    "lax_numpy_indexing_test.py",
    "lax_numpy_operators_test.py",
    "lax_numpy_reducers_test.py",
    "lax_numpy_setops_test.py",
    "lax_numpy_test.py",
    "lax_numpy_ufuncs_test.py",
    "lax_numpy_vectorize_test.py",
    "lax_scipy_sparse_test.py",
    "lax_scipy_special_functions_test.py",
    "lax_scipy_spectral_dac_test.py",
    "lax_scipy_test.py",
    "lax_test.py",
    "lax_vmap_op_test.py",
    "lax_vmap_test.py",
    "layout_test.py",
    "linalg_sharding_test.py",
    "linalg_test.py",
    "lobpcg_test.py",
    "memories_test.py",
    "multi_device_test.py",
    "mutable_array_test.py",
    "nn_test.py",
    "ode_test.py",
    "optimizers_test.py",
    "pickle_test.py",
    "pjit_test.py",
    "pmap_test.py",
    "polynomial_test.py",
    "python_callback_test.py",
    "qdwh_test.py",
    "ragged_collective_test.py",
    "random_impl_test.py",
    "random_lax_test.py",
    "random_test.py",
    "scaled_dot_test.py",
    "scipy_fft_test.py",
    "scipy_interpolate_test.py",
    "scipy_ndimage_test.py",
    "scipy_optimize_test.py",
    "scipy_signal_test.py",
    "scipy_spatial_test.py",
    "scipy_stats_test.py",
    "shape_poly_test.py",
    "shard_alike_test.py",
    "shard_map_test.py",
    "sparse_bcoo_bcsr_test.py",
    "sparse_test.py",
    "sparsify_test.py",
    "state_test.py",
    "stateful_rng_test.py",
    "stax_test.py",
    "svd_test.py",
    "transfer_guard_test.py",
    "x64_context_test.py",
)


def run(
    platform: str,
    out: Path,
    checkout: Path,
    files: list[str] | None,
    *,
    only: str,
    stride: int,
    offset: int,
    resume: bool,
    timeout: float,
) -> ResultFile:
    """Records of each ``stride``-th test of ``files`` on ``platform``, from number ``offset`` on; tests that JAX's CPU
    fails too are not applicable."""
    results = ResultFile(out, "jax tests", platform, of_platform(platform), resume=resume)
    names = files or [f for f in FILES if (checkout / "tests" / f).exists()]
    paths = [checkout / "tests" / name for name in names]
    peer = Peer("JAX's CPU", _side("cpu")) if platform != "cpu" else None
    ours = _side(platform)
    ours = replace(ours, environment={**ours.environment, STRIDE: str(stride), OFFSET: str(offset)})
    return run_files(results, paths, ours, peer, only=only, timeout=timeout)


def _side(platform: str) -> Side:
    return Side(
        {
            "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu",
            "JAX_NUM_GENERATED_CASES": os.environ.get("JAX_NUM_GENERATED_CASES", "10"),
            "JAX_SKIP_SLOW_TESTS": "true",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "FLAGOS_NUM_CPU_DEVICES": "8",
        }
    )
