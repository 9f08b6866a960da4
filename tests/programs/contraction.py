"""Contractions, convolutions and library-shaped operations. Part of the corpus."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from programs.core import program

# Contractions


@program("f32[4,5]", "f32[5,6]", "f32[2,4,5]", "f32[2,5,3]")
def dots(a, b, x, y):
    return a @ b, x @ y, jnp.einsum("bij,bjk->kbi", x, y), a[0] @ b, jnp.outer(a[0], b[0]), jnp.vdot(a, a)


@program("bf16[4,5]", "bf16[5,6]", "s8[3,4]", "s8[4,2]")
def dots_mixed_types(a, b, x, y):
    return (
        lax.dot(a, b, preferred_element_type=np.float32),
        lax.dot(x, y, preferred_element_type=np.int32),
        a @ b,
        lax.dot(x, y),
    )


@program("f64[3,4]", "f64[4,3]", "c64[3,4]", "c64[4,3]", "u32[3,4]", "u32[4,3]", x64=True)
def dots_wide_types(a, b, c, d, u, v):
    return a @ b, c @ d, u @ v, lax.dot(a, b, precision="highest")


@program("f32[3,4,5,2]", "f32[5,3,2,6]")
def dot_general_batch(x, y):
    return lax.dot_general(x, y, (((2, 3), (0, 2)), ((0,), (1,)))), lax.dot_general(x, y, (((3,), (2,)), ((), ())))


@program("f32[2,8,9,3]", "f32[3,3,3,4]", "f32[3,2,3,4]")
def convolutions(image, kernel, odd):
    dims = ("NHWC", "HWIO", "NHWC")
    return (
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims),
        lax.conv_general_dilated(image, kernel, (2, 1), [(1, 2), (0, 1)], (1, 2), (2, 1), dims),
        lax.conv_general_dilated(image, odd, (1, 2), "VALID", dimension_numbers=dims),
        lax.conv_transpose(image, kernel, (2, 2), "SAME", dimension_numbers=dims),
    )


@program("f32[2,6,10]", "f32[4,3,3]", "f32[6,1,5]", "f32[4,2,2]")
def convolutions_grouped(x, grouped, depthwise, batched):
    return (
        lax.conv_general_dilated(x, grouped, (1,), "SAME", feature_group_count=2),
        lax.conv_general_dilated(x, depthwise, (2,), "VALID", feature_group_count=6),
        lax.conv_general_dilated(x[:, :2], batched, (1,), "SAME", batch_group_count=2),
    )


@program("f32[1,2,4,5,6]", "f32[3,2,2,2,3]", "f32[2,3]", "f32[4,3]")
def convolutions_other_ranks(volume, kernel, x, w):
    return (
        lax.conv_general_dilated(volume, kernel, (1, 2, 1), "SAME"),
        lax.conv_general_dilated(x, w, (), [], dimension_numbers=("NC", "OI", "NC")),
    )


@program("f32[2,6,6,3]", "f32[3,3,3,4]")
def convolution_gradients(image, kernel):
    def loss(x, k):
        y = lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).sum()

    return jax.grad(loss, (0, 1))(image, kernel)


@program("f32[8,4]", "f32[3,4,5]")
def ragged_dot(x, w):
    return lax.ragged_dot(x, w, np.array([2, 5, 1], np.int32))


# Library shaped


@program("f32[4,8]", "c64[4,8]", "f32[3,4,6]")
def ffts(x, z, cube):
    return (
        jnp.fft.fft(z),
        jnp.fft.ifft(z, axis=0),
        jnp.fft.rfft(x),
        jnp.fft.irfft(z),
        jnp.fft.rfftn(cube),
        jnp.fft.fft2(z),
    )


@program("f32[3,4,4]:spd", "c64[4,4]:spd", "f64[3,3]:spd", x64=True)
def choleskys(x, z, d):
    return lax.linalg.cholesky(x), lax.linalg.cholesky(z), lax.linalg.cholesky(d, symmetrize_input=False)


@program("f32[2,4,4]:spd", "f32[2,4,3]", "f32[3,4]")
def triangular_solves(a, b, c):
    solve = lax.linalg.triangular_solve
    return (
        solve(a, b, left_side=True, lower=True),
        solve(a, b, left_side=True, lower=False, transpose_a=True),
        solve(a[0], c, lower=True, unit_diagonal=True),
        jax.scipy.linalg.cho_solve((a[0], True), b[0]),
    )


@program("f32[4,4]:spd", "f32[4]")
def linear_algebra_in_plain_ops(a, b):
    return jax.scipy.linalg.expm(a / 16), jnp.trace(a), jnp.linalg.norm(a), jnp.kron(a[:2, :2], b[None, :2]), jnp.cov(a)


@program("u32[2]", exact=True)
def random_bits(key):
    k = jax.random.wrap_key_data(key)
    return (
        jax.random.bits(k, (5, 3)),
        jax.random.randint(k, (7,), -5, 100),
        jax.random.key_data(jax.random.split(k, 3)),
        jax.random.permutation(k, 9),
        jax.random.bernoulli(k, 0.3, (8,)),
    )


@program("u32[2]")
def random_distributions(key):
    k = jax.random.wrap_key_data(key)
    return (
        jax.random.uniform(k, (6,)),
        jax.random.normal(k, (6,)),
        jax.random.gumbel(k, (3,)),
        jax.random.gamma(k, 2.0, (2,)),
    )


@program("u32[4]", exact=True)
def rng_bit_generator(state):
    return lax.rng_bit_generator(state, (5, 4)), lax.rng_bit_generator(state, (3,), np.uint8)
