"""Of wild.py: lattices and meshes, sparse and dense linear algebra, integers, images, geometry, statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

_Arrays = tuple[jax.Array, ...]


# ---- Lattices and meshes


def lattice_boltzmann(density: jax.Array) -> jax.Array:
    """Nine velocities, twenty steps of streaming and relaxation."""
    cx, cy = jnp.array([0, 1, 0, -1, 0, 1, -1, -1, 1]), jnp.array([0, 0, 1, 0, -1, 1, 1, -1, -1])
    weights = jnp.array([4 / 9, *[1 / 9] * 4, *[1 / 36] * 4])
    shifts = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]

    def balance(rho: jax.Array, ux: jax.Array, uy: jax.Array) -> jax.Array:
        along = 3 * (cx[:, None, None] * ux + cy[:, None, None] * uy)
        return weights[:, None, None] * rho * (1 + along + 0.5 * along**2 - 1.5 * (ux**2 + uy**2))

    def step(_: int, f: jax.Array) -> jax.Array:
        f = jnp.stack([jnp.roll(f[i], shift, (0, 1)) for i, shift in enumerate(shifts)])
        rho = f.sum(0)
        ux, uy = jnp.tensordot(cx, f, 1) / rho, jnp.tensordot(cy, f, 1) / rho
        return f + 0.6 * (balance(rho, ux, uy) - f)

    start = balance(1 + 0.01 * density, jnp.zeros_like(density), jnp.zeros_like(density))
    return lax.fori_loop(0, 20, step, start).sum(0)


def reaction_diffusion(u: jax.Array, v: jax.Array) -> Any:
    """Gray and Scott's, by a padded stencil."""
    u, v = 1 - 0.1 * jnp.abs(u), 0.1 * jnp.abs(v)

    def laplacian(x: jax.Array) -> jax.Array:
        p = jnp.pad(x, 1, mode="wrap")
        return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x

    def step(state: _Arrays, _: None) -> tuple[_Arrays, None]:
        u, v = state
        uvv = u * v * v
        return (u + 0.16 * laplacian(u) - uvv + 0.035 * (1 - u), v + 0.08 * laplacian(v) + uvv - 0.095 * v), None

    return lax.scan(step, (u, v), None, length=50)[0]


def pressure_projection(u: jax.Array, v: jax.Array) -> Any:
    """A step of semi-Lagrangian advection and forty Jacobi iterations."""
    n = len(u)
    y, x = jnp.meshgrid(jnp.arange(n), jnp.arange(n), indexing="ij")

    def advect(field: jax.Array) -> jax.Array:
        return jax.scipy.ndimage.map_coordinates(field, [y - 0.1 * v, x - 0.1 * u], 1, mode="wrap")

    u, v = advect(u), advect(v)
    divergence = (jnp.roll(u, -1, 1) - jnp.roll(u, 1, 1) + jnp.roll(v, -1, 0) - jnp.roll(v, 1, 0)) / 2

    def jacobi(_: int, p: jax.Array) -> jax.Array:
        around = jnp.roll(p, 1, 0) + jnp.roll(p, -1, 0) + jnp.roll(p, 1, 1) + jnp.roll(p, -1, 1)
        return (around - divergence) / 4

    p = lax.fori_loop(0, 40, jacobi, jnp.zeros_like(u))
    return u - (jnp.roll(p, -1, 1) - jnp.roll(p, 1, 1)) / 2, v - (jnp.roll(p, -1, 0) - jnp.roll(p, 1, 0)) / 2


def shallow_water(height: jax.Array) -> jax.Array:
    """Edges written in place after each of thirty leapfrog steps."""

    def step(state: _Arrays, _: None) -> tuple[_Arrays, None]:
        h, u, v = state
        u = u.at[1:-1, 1:-1].add(-0.1 * (h[2:, 1:-1] - h[:-2, 1:-1]))
        v = v.at[1:-1, 1:-1].add(-0.1 * (h[1:-1, 2:] - h[1:-1, :-2]))
        u, v = u.at[0].set(0.0).at[-1].set(0.0), v.at[:, 0].set(0.0).at[:, -1].set(0.0)
        flux = u[2:, 1:-1] - u[:-2, 1:-1] + v[1:-1, 2:] - v[1:-1, :-2]
        return (h.at[1:-1, 1:-1].add(-0.1 * flux), u, v), None

    return lax.scan(step, (height, jnp.zeros_like(height), jnp.zeros_like(height)), None, length=30)[0][0]


def hanging_cloth(points: jax.Array) -> jax.Array:
    """Verlet integration; constraints of neighbours relaxed in turn."""

    def relax(x: jax.Array, axis: int) -> jax.Array:
        a, b = lax.slice_in_dim(x, 0, -1, axis=axis), lax.slice_in_dim(x, 1, None, axis=axis)
        apart = b - a
        length = jnp.linalg.norm(apart, axis=-1, keepdims=True) + 1e-6
        fix = 0.25 * apart * (1 - 1 / length)
        pad = [(0, 0)] * 3
        first, second = list(pad), list(pad)
        first[axis], second[axis] = (0, 1), (1, 0)
        return x + jnp.pad(fix, first) - jnp.pad(fix, second)

    def step(state: _Arrays, _: None) -> tuple[_Arrays, None]:
        x, old = state
        moved = 2 * x - old + jnp.array([0.0, 0.0, -1e-3])
        for _sweep in range(4):
            moved = relax(relax(moved, 0), 1)
        return (moved.at[0].set(x[0]), x), None

    return lax.scan(step, (points, points), None, length=25)[0][0]


def finite_elements(u: jax.Array, cells: jax.Array) -> jax.Array:
    """Matrix-free products of a stiffness matrix: gathered by cell, summed by node, in forty steps of descent."""
    stiffness = jnp.array([[2.0, -1.0, -1.0], [-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]) / 2

    def apply(u: jax.Array) -> jax.Array:
        return jnp.zeros_like(u).at[cells].add(u[cells] @ stiffness)

    return lax.fori_loop(0, 40, lambda _, u: u - 0.05 * (apply(u) - 1e-3), u)


# ---- Linear algebra


def sparse_product(values: jax.Array, columns: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
    """Ten products of a sparse matrix by its coordinates with a block of vectors, normalised."""

    def step(_: int, x: jax.Array) -> jax.Array:
        y = jax.ops.segment_sum(values[:, None] * x[columns], rows, len(x), indices_are_sorted=True)
        return y / jnp.linalg.norm(y, axis=0)

    return lax.fori_loop(0, 10, step, x)


def krylov_solver(a: jax.Array, b: jax.Array) -> jax.Array:
    matrix = a @ a.T / len(a) + 4 * jnp.eye(len(a))
    return jax.scipy.sparse.linalg.gmres(lambda x: matrix @ x, b, maxiter=3, restart=10)[0]


def levenberg_marquardt(x: jax.Array, y: jax.Array) -> jax.Array:
    """A curve of four parameters, by Jacobians in forward mode and small solves."""

    def residual(p: jax.Array) -> jax.Array:
        return p[0] * jnp.exp(-(p[1] ** 2) * x**2) + p[2] * jnp.sin(p[3] * x) - y

    def step(state: _Arrays, _: None) -> tuple[_Arrays, None]:
        p, damping = state
        r, jacobian = residual(p), jax.jacfwd(residual)(p)
        normal = jacobian.T @ jacobian + damping * jnp.eye(4)
        new = p - jnp.linalg.solve(normal, jacobian.T @ r)
        better = (residual(new) ** 2).sum() < (r**2).sum()
        return (jnp.where(better, new, p), jnp.where(better, damping / 3, damping * 2)), None

    return lax.scan(step, (jnp.array([1.0, 0.5, 0.5, 1.0]), jnp.float32(1.0)), None, length=30)[0][0]


def power_components(x: jax.Array) -> jax.Array:
    """Principal components by orthogonal iteration."""
    centred = x - x.mean(0)

    def step(_: int, q: jax.Array) -> jax.Array:
        return jnp.linalg.qr(centred.T @ (centred @ q))[0]

    return jnp.abs(lax.fori_loop(0, 5, step, jnp.eye(x.shape[1], 8)))


def whitened_logdet_gradient(a: jax.Array) -> Any:
    """In float64 where the process has it."""

    def loss(a: jax.Array) -> jax.Array:
        lower = jnp.linalg.cholesky(a @ a.T / a.shape[1] + jnp.eye(len(a)))
        return (
            2 * jnp.log(jnp.diagonal(lower)).sum()
            + (jax.scipy.linalg.solve_triangular(lower, a, lower=True) ** 2).sum()
        )

    return jax.value_and_grad(loss)(a)


def limited_memory_steps(x: jax.Array) -> jax.Array:
    """L-BFGS' two loops over a history of eight, on Rosenbrock's function."""

    def f(x: jax.Array) -> jax.Array:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    def step(state: _Arrays, k: jax.Array) -> tuple[_Arrays, jax.Array]:
        x, g, s, y = state
        rho = jnp.where(jnp.abs((s * y).sum(1)) > 1e-10, 1 / ((s * y).sum(1) + 1e-20), 0)
        order = (k - 1 - jnp.arange(8)) % 8

        def first(q: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            alpha = rho[i] * (s[i] @ q)
            return q - alpha * y[i], alpha

        q, alphas = lax.scan(first, g, order)

        def second(r: jax.Array, now: _Arrays) -> tuple[jax.Array, None]:
            i, alpha = now
            return r + s[i] * (alpha - rho[i] * (y[i] @ r)), None

        direction = lax.scan(second, 1e-3 * q, (order, alphas), reverse=True)[0]
        new = x - jnp.clip(direction, -0.1, 0.1)
        gradient = jax.grad(f)(new)
        return (new, gradient, s.at[k % 8].set(new - x), y.at[k % 8].set(gradient - g)), f(new)

    history = jnp.zeros((8, len(x)))
    return lax.scan(step, (x, jax.grad(f)(x), history, history), jnp.arange(30))[1]


# ---- Integers, images, geometry


def game_of_life(cells: jax.Array) -> jax.Array:
    def step(_: int, x: jax.Array) -> jax.Array:
        around = sum(jnp.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
        return ((around == 3) | ((x == 1) & (around == 2))).astype(x.dtype)

    return lax.fori_loop(0, 50, step, cells)


def escape_times(corner: jax.Array) -> jax.Array:
    y, x = jnp.meshgrid(jnp.linspace(-1.2, 1.2, 128), jnp.linspace(-2.0, 0.6, 128), indexing="ij")
    c = (x + 1j * y).astype(jnp.complex64) + 1e-3 * corner[0]

    def step(_: int, state: _Arrays) -> _Arrays:
        z, count = state
        z = jnp.where(jnp.abs(z) <= 2, z * z + c, z)
        return z, count + (jnp.abs(z) <= 2)

    return lax.fori_loop(0, 50, step, (jnp.zeros_like(c), jnp.zeros(c.shape, jnp.int32)))[1]


def bilateral_filter(image: jax.Array) -> jax.Array:
    padded = jnp.pad(image, 3, mode="reflect")
    total, weights = jnp.zeros_like(image), jnp.zeros_like(image)
    for i in range(7):
        for j in range(7):
            near = lax.dynamic_slice(padded, (i, j), image.shape)
            w = jnp.exp(-((i - 3) ** 2 + (j - 3) ** 2) / 8 - (near - image) ** 2 / 0.5)
            total, weights = total + w * near, weights + w
    return total / weights


def edges_of_image(image: jax.Array) -> jax.Array:
    """Blurred, differentiated, thinned along the gradient."""
    gauss = jnp.exp(-(jnp.arange(-2, 3) ** 2) / 2.0)
    gauss = gauss / gauss.sum()
    blur = jax.scipy.signal.convolve2d(image, jnp.outer(gauss, gauss), mode="same")
    sobel = jnp.array([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    gx, gy = (jax.scipy.signal.convolve2d(blur, k, mode="same") for k in (sobel, sobel.T))
    size, angle = jnp.hypot(gx, gy), jnp.round(jnp.arctan2(gy, gx) / (jnp.pi / 4)).astype(jnp.int32) % 4
    shifts = [((0, 1), (0, -1)), ((1, 1), (-1, -1)), ((1, 0), (-1, 0)), ((1, -1), (-1, 1))]
    largest = jnp.stack([jnp.maximum(*(jnp.roll(size, s, (0, 1)) for s in pair)) for pair in shifts])
    return jnp.where(size >= jnp.take_along_axis(largest, angle[None], 0)[0], size, 0)


def equalised_histogram(image: jax.Array) -> jax.Array:
    levels = jnp.clip((image * 32 + 128), 0, 255).astype(jnp.int32)
    share = jnp.cumsum(jnp.bincount(levels.reshape(-1), length=256)) / levels.size
    return share[levels]


def ray_marched_spheres(centres: jax.Array) -> jax.Array:
    """Signed distances, forty steps a ray, shaded by a normal from the gradient."""

    def distance(p: jax.Array) -> jax.Array:
        return (jnp.linalg.norm(p - centres, axis=-1) - 0.5).min()

    y, x = jnp.meshgrid(jnp.linspace(-1, 1, 48), jnp.linspace(-1, 1, 48), indexing="ij")
    rays = jnp.stack([x, y, jnp.ones_like(x)], -1).reshape(-1, 3)
    rays = rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)

    def shade(ray: jax.Array) -> jax.Array:
        def march(_: int, far: jax.Array) -> jax.Array:
            return far + distance(far * ray - jnp.array([0.0, 0.0, 4.0]))

        point = lax.fori_loop(0, 40, march, jnp.float32(0)) * ray - jnp.array([0.0, 0.0, 4.0])
        return jax.grad(distance)(point) @ jnp.array([0.5, 0.7, -0.5])

    return jax.vmap(shade)(rays).reshape(x.shape)


def nearest_neighbours(points: jax.Array, asked: jax.Array) -> Any:
    square = (asked**2).sum(1)[:, None] - 2 * asked @ points.T + (points**2).sum(1)
    near, which = lax.top_k(-square, 10)
    return jnp.sqrt(jnp.clip(-near, 0)), points[which].mean(1)


def time_warping(a: jax.Array, b: jax.Array) -> jax.Array:
    """The least cost of aligning two series, along anti-diagonals."""
    cost = jnp.abs(a[:, None] - b)
    n = len(a)
    skewed = (
        jnp.full((2 * n - 1, n), jnp.inf).at[jnp.arange(n)[:, None] + jnp.arange(n), jnp.arange(n)[:, None]].set(cost)
    )

    def step(state: _Arrays, now: jax.Array) -> tuple[_Arrays, None]:
        before, last = state
        shifted = lambda x: jnp.concatenate([jnp.array([jnp.inf]), x[:-1]])  # noqa: E731
        best = jnp.minimum(jnp.minimum(last, shifted(last)), shifted(before))
        return (last, now + best), None

    start = jnp.full(n, jnp.inf)
    return lax.scan(step, (start, start.at[0].set(cost[0, 0])), skewed[1:])[0][1][-1]


# ---- Statistics


def metropolis_chains(data: jax.Array, key: jax.Array) -> jax.Array:
    """Sixty-four chains of a mean and a logarithm of a deviation."""

    def density(p: jax.Array) -> jax.Array:
        return -0.5 * (((data - p[0]) / jnp.exp(p[1])) ** 2).sum() - len(data) * p[1] - 0.5 * (p**2).sum()

    def step(state: _Arrays, key: jax.Array) -> tuple[_Arrays, jax.Array]:
        p, old = state
        move, accept = random.split(key)
        proposed = p + 0.1 * random.normal(move, p.shape)
        new = jax.vmap(density)(proposed)
        taken = jnp.log(random.uniform(accept, new.shape)) < new - old
        p = jnp.where(taken[:, None], proposed, p)
        return (p, jnp.where(taken, new, old)), p[:, 0]

    start = jnp.zeros((64, 2))
    keys = random.split(random.wrap_key_data(key), 100)
    return lax.scan(step, (start, jax.vmap(density)(start)), keys)[1].mean(0)


def particle_filter(seen: jax.Array, key: jax.Array) -> jax.Array:
    """A thousand particles, resampled by the cumulated weights at each step."""

    def step(state: _Arrays, y: jax.Array) -> tuple[_Arrays, jax.Array]:
        x, key = state
        key, move, choose = random.split(key, 3)
        x = 0.9 * x + 0.3 * random.normal(move, x.shape)
        weights = jax.nn.softmax(-0.5 * (y - x) ** 2 / 0.25)
        places = (jnp.arange(len(x)) + random.uniform(choose)) / len(x)
        chosen = jnp.searchsorted(jnp.cumsum(weights), places)
        return (x[jnp.clip(chosen, 0, len(x) - 1)], key), (weights * x).sum()

    return lax.scan(step, (jnp.zeros(1000), random.wrap_key_data(key)), seen)[1]


def mixture_of_gaussians(x: jax.Array) -> Any:
    """Twenty rounds of expectation and maximisation."""

    def step(state: _Arrays, _: None) -> tuple[_Arrays, jax.Array]:
        means, spread, share = state
        logits = -0.5 * (((x[:, None] - means) / spread) ** 2 + 2 * jnp.log(spread)).sum(-1) + jnp.log(share)
        top = jax.nn.logsumexp(logits, 1)
        r = jnp.exp(logits - top[:, None])
        count = r.sum(0) + 1e-6
        means = (r.T @ x) / count[:, None]
        spread = jnp.sqrt(jnp.einsum("nk,nkd->kd", r, (x[:, None] - means) ** 2) / count[:, None] + 1e-3)
        return (means, spread, count / count.sum()), top.mean()

    start = x[:6], jnp.ones((6, x.shape[1])), jnp.full(6, 1 / 6)
    return lax.scan(step, start, None, length=20)
