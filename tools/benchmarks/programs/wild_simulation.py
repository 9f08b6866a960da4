"""Of wild.py: differential equations, particles, learning by acting, probabilistic programs, optimisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

_Arrays = tuple[jax.Array, ...]


# ---- Differential equations

_BUTCHER = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_LOWER_ORDER = (5179 / 57600, 0.0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40)


def _lorenz(y: jax.Array) -> jax.Array:
    a, b, c = y[..., 0], y[..., 1], y[..., 2]
    return jnp.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c], -1)


def adaptive_runge_kutta(y: jax.Array) -> jax.Array:
    """Dormand and Prince's method with error control, all trajectories in step."""

    def step(state: _Arrays) -> _Arrays:
        t, y, h = state
        slopes = [_lorenz(y)]
        for row in _BUTCHER:
            slopes.append(_lorenz(y + h * sum(a * k for a, k in zip(row, slopes, strict=True))))
        better = y + h * sum(a * k for a, k in zip(_BUTCHER[-1], slopes[:-1], strict=True))
        other = y + h * sum(b * k for b, k in zip(_LOWER_ORDER, slopes, strict=True))
        error = jnp.max(jnp.abs(better - other)) / 1e-4 + 1e-12
        accepted = error < 1
        h_next = h * jnp.clip(0.9 * error**-0.2, 0.2, 5.0)
        return jnp.where(accepted, t + h, t), jnp.where(accepted, better, y), h_next

    start = (jnp.zeros((), y.dtype), y, jnp.asarray(0.01, y.dtype))
    return lax.while_loop(lambda state: state[0] < 0.3, step, start)[1]


def neural_ode_gradient(w1: jax.Array, w2: jax.Array, w3: jax.Array, y: jax.Array) -> Any:
    """Classical Runge-Kutta with a small network, 40 steps, differentiated through."""

    def slope(w: _Arrays, y: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(y @ w[0]) @ w[1]) @ w[2]

    def loss(w: _Arrays) -> jax.Array:
        def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            h = 0.05
            k1 = slope(w, y)
            k2 = slope(w, y + h / 2 * k1)
            k3 = slope(w, y + h / 2 * k2)
            k4 = slope(w, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        return (lax.scan(step, y, None, length=40)[1] ** 2).mean()

    return jax.grad(loss)((w1, w2, w3))


def implicit_euler(y: jax.Array) -> jax.Array:
    """A stiff reaction of three species, Newton's method with a Jacobian in each step."""

    def rate(y: jax.Array) -> jax.Array:
        slow, fast = 0.04 * y[0], 1e4 * y[1] * y[2]
        square = 3e7 * y[1] ** 2
        return jnp.stack([fast - slow, slow - fast - square, square])

    def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        def newton(_: int, z: jax.Array) -> jax.Array:
            return z - jnp.linalg.solve(jnp.eye(3) - 1e-2 * jax.jacfwd(rate)(z), z - y - 1e-2 * rate(z))

        y = lax.fori_loop(0, 3, newton, y)
        return y, y

    return lax.scan(step, jnp.abs(y) / jnp.abs(y).sum(), None, length=200)[1]


def heat_by_rolls(u: jax.Array) -> jax.Array:
    def step(_: int, u: jax.Array) -> jax.Array:
        around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
        return u + 0.2 * (around - 4 * u)

    return lax.fori_loop(0, 50, step, u)


def burgers_upwind(u: jax.Array) -> Any:
    def step(u: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        left, right = jnp.concatenate([u[:1], u[:-1]]), jnp.concatenate([u[1:], u[-1:]])
        moved = u - 0.1 * jnp.where(u > 0, u * (u - left), u * (right - u)) + 0.05 * (right - 2 * u + left)
        return moved, moved.max()

    return lax.scan(step, u, None, length=300)


def vorticity_by_fft(w: jax.Array) -> jax.Array:
    n = w.shape[0]
    k = jnp.fft.fftfreq(n).astype(w.dtype) * n
    kx, ky = jnp.meshgrid(k, k, indexing="ij")
    square = kx**2 + ky**2
    inverse = jnp.where(square > 0, 1 / jnp.where(square > 0, square, 1), 0.0)

    def step(_: int, w: jax.Array) -> jax.Array:
        spectrum = jnp.fft.fft2(w)
        stream = spectrum * inverse
        u, v = jnp.fft.ifft2(1j * ky * stream).real, -jnp.fft.ifft2(1j * kx * stream).real
        slope = u * jnp.fft.ifft2(1j * kx * spectrum).real + v * jnp.fft.ifft2(1j * ky * spectrum).real
        return jnp.fft.ifft2((spectrum - 0.001 * jnp.fft.fft2(slope)) / (1 + 1e-5 * square)).real

    return lax.fori_loop(0, 10, step, w)


def conjugate_gradients(b: jax.Array) -> jax.Array:
    """Poisson's equation on a square."""

    def operator(u: jax.Array) -> jax.Array:
        p = jnp.pad(u, 1)
        return 4 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2]

    def step(_: int, state: _Arrays) -> _Arrays:
        x, r, p, square = state
        image = operator(p)
        length = square / jnp.vdot(p, image)
        x, r = x + length * p, r - length * image
        following = jnp.vdot(r, r)
        return x, r, r + following / square * p, following

    return lax.fori_loop(0, 50, step, (jnp.zeros_like(b), b, b, jnp.vdot(b, b)))[0]


# ---- Particles, simulation, learning by acting


def gravity(x: jax.Array, v: jax.Array) -> Any:
    def acceleration(x: jax.Array) -> jax.Array:
        apart = x[None] - x[:, None]
        return (apart * ((apart**2).sum(-1) + 0.01)[..., None] ** -1.5).sum(1) / len(x)

    def step(_: int, state: _Arrays) -> _Arrays:
        x, v = state
        v = v + 0.005 * acceleration(x)
        x = x + 0.01 * v
        return x, v + 0.005 * acceleration(x)

    return lax.fori_loop(0, 5, step, (x, v))


def lattice_ising(spins: jax.Array, key: jax.Array) -> jax.Array:
    """Checkerboard Metropolis sweeps."""
    signs = jnp.where(spins > 0, 1, -1).astype(jnp.int32)
    board = (jnp.arange(signs.shape[0])[:, None] + jnp.arange(signs.shape[1])) % 2

    def sweep(signs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        for color in (0, 1):
            key, own = random.split(key)
            around = sum(jnp.roll(signs, s, d) for s in (1, -1) for d in (0, 1))
            accepted = random.uniform(own, signs.shape) < jnp.exp(-0.88 * (signs * around).astype(jnp.float32))
            signs = jnp.where(accepted & (board == color), -signs, signs)
        return signs, signs.sum()

    return lax.scan(sweep, signs, random.split(random.wrap_key_data(key), 20))[1]


def cart_poles(w1: jax.Array, w2: jax.Array, key: jax.Array) -> Any:
    def step(state: _Arrays, key: jax.Array) -> tuple[_Arrays, jax.Array]:
        x, dx, angle, turning = state
        logits = jnp.tanh(jnp.stack(state, -1) @ w1) @ w2
        force = jnp.where(random.categorical(key, logits) == 1, 10.0, -10.0)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        pushed = (force + 0.05 * turning**2 * sin) / 1.1
        twist = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moved = (x + 0.02 * dx, dx + 0.02 * (pushed - 0.05 * twist * cos / 1.1))
        turned = (angle + 0.02 * turning, turning + 0.02 * twist)
        lost = (jnp.abs(moved[0]) > 2.4) | (jnp.abs(turned[0]) > 0.2)
        return tuple(jnp.where(lost, 0.0, v) for v in (*moved, *turned)), (~lost).astype(jnp.float32)

    start = (jnp.zeros(1024),) * 4
    return lax.scan(step, start, random.split(random.wrap_key_data(key), 50))


def advantages(rewards: jax.Array, values: jax.Array) -> jax.Array:
    """Generalised advantage estimation, backwards through time."""

    def step(later: jax.Array, now: _Arrays) -> tuple[jax.Array, jax.Array]:
        delta = now[0] + 0.99 * now[2] - now[1]
        later = delta + 0.95 * 0.99 * later
        return later, later

    following = jnp.concatenate([values[1:], values[-1:]])
    return lax.scan(step, jnp.zeros_like(rewards[0]), (rewards, values, following), reverse=True)[1]


# ---- Probabilistic programs


def hamiltonian_sampler(x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    def density(b: jax.Array) -> jax.Array:
        return jnp.sum((y > 0) * (x @ b) - jax.nn.softplus(x @ b)) - 0.5 * b @ b

    slope = jax.grad(density)

    def sample(b: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = random.split(key)
        p = random.normal(first, b.shape)

        def leap(_: int, state: _Arrays) -> _Arrays:
            q, p = state
            p = p + 0.005 * slope(q)
            q = q + 0.01 * p
            return q, p + 0.005 * slope(q)

        q, moved = lax.fori_loop(0, 20, leap, (b, p))
        gain = density(q) - 0.5 * moved @ moved - density(b) + 0.5 * p @ p
        b = jnp.where(jnp.log(random.uniform(second)) < gain, q, b)
        return b, b

    return lax.scan(sample, jnp.zeros(x.shape[1]), random.split(random.wrap_key_data(key), 5))[1]


def gaussian_process(x: jax.Array, y: jax.Array, scales: jax.Array) -> Any:
    def surprise(t: jax.Array) -> jax.Array:
        apart = ((x[:, None] - x[None]) ** 2 / jnp.exp(t[:3])).sum(-1)
        kernel = jnp.exp(t[3]) * jnp.exp(-0.5 * apart) + (0.1 + jnp.exp(t[4])) * jnp.eye(len(x))
        root = jnp.linalg.cholesky(kernel)
        weights = jax.scipy.linalg.cho_solve((root, True), y)
        return 0.5 * y @ weights + jnp.log(jnp.diag(root)).sum()

    return jax.value_and_grad(surprise)(scales * 0.1)


def variational_encoder(x: jax.Array, w1: jax.Array, w2: jax.Array, key: jax.Array) -> Any:
    def loss(w: _Arrays) -> jax.Array:
        mean, spread = jnp.split(jnp.tanh(x @ w[0]), 2, -1)
        z = mean + jnp.exp(spread) * random.normal(random.wrap_key_data(key), mean.shape)
        logits = z @ w[1]
        fit = (jnp.maximum(logits, 0) - logits * (x > 0) + jnp.log1p(jnp.exp(-jnp.abs(logits)))).sum(-1)
        return (fit + 0.5 * (jnp.exp(2 * spread) + mean**2 - 1 - 2 * spread).sum(-1)).mean()

    return jax.value_and_grad(loss)((w1, w2))


def kalman_filter(observed: jax.Array) -> Any:
    motion = jnp.array([[1.0, 0.1], [0.0, 1.0]])

    def step(state: _Arrays, z: jax.Array) -> tuple[_Arrays, jax.Array]:
        mean, cover = state
        mean, cover = motion @ mean, motion @ cover @ motion.T + 0.01 * jnp.eye(2)
        gain = cover[:, 0] / (cover[0, 0] + 0.5)
        mean = mean + gain * (z - mean[0])
        return (mean, cover - jnp.outer(gain, cover[0])), mean

    return lax.scan(step, (jnp.zeros(2), jnp.eye(2)), observed)[1]


# ---- Optimisation


def descent_with_line_search(x: jax.Array) -> Any:
    def valley(x: jax.Array) -> jax.Array:
        return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        down = -jax.grad(valley)(x)

        def too_long(length: jax.Array) -> jax.Array:
            return valley(x + length * down) > valley(x) - 1e-4 * length * down @ down

        length = lax.while_loop(too_long, lambda a: a * 0.5, jnp.ones((), x.dtype))
        return x + length * down, valley(x)

    return lax.scan(step, x * 0.1, None, length=50)[1]


def newton_schulz(gradient: jax.Array) -> jax.Array:
    """The orthogonalisation of the optimizer Muon, in bfloat16."""
    x = (gradient / (jnp.linalg.norm(gradient) + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.astype(jnp.float32)


def root_of_preconditioner(gradient: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(gradient @ gradient.T + 1e-1 * jnp.eye(len(gradient)))
    return (vectors * values**-0.25) @ vectors.T @ gradient


def adam_of_many(*arrays: jax.Array) -> Any:
    def one(p: jax.Array) -> _Arrays:
        g = jnp.sin(p)
        m, v = 0.1 * g, 0.001 * g * g
        return p - 1e-3 * (m / 0.1 / (jnp.sqrt(v / 0.001) + 1e-8) + 0.01 * p), m, v

    norm = jnp.sqrt(sum((jnp.sin(p) ** 2).sum() for p in arrays))
    return [one(p / jnp.maximum(1.0, norm)) for p in arrays]
