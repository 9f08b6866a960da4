"""Programs of the kinds that public projects consist of, written from what such programs do and tuned by nobody.

Solvers, spectral methods, particles, samplers and optimizers are in wild_simulation.py; graphs, experts, recurrent
models, images, audio and serving in wild_models.py; attention, recommenders, losses and sequences in wild_learning.py;
lattices, linear algebra, integers, geometry and statistics in wild_numerics.py. Sizes take a host a few milliseconds at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import wild_learning as learning
from . import wild_models as models
from . import wild_numerics as numerics
from . import wild_simulation as simulation
from .kernels import BF16, F32, normal
from .program import Arguments, Program

_Draws = Callable[[np.random.Generator], Arguments]
_KEY = np.array([0, 7], np.uint32)


def _draw(*shapes: Sequence[int], dtype: Any = F32, scale: float = 1.0) -> _Draws:
    return lambda g: tuple((normal(g, tuple(shape), dtype) * scale).astype(dtype) for shape in shapes)


def _edges(nodes: int, count: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda generator: generator.integers(nodes, size=(2, count), dtype=np.int32)


def _indices(below: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda generator: generator.integers(below, size=shape, dtype=np.int32)


def _one(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda generator: normal(generator, shape, F32)


def wild() -> list[Program]:
    """All of them."""

    def also(
        draw: Callable[[np.random.Generator], Arguments], *more: Any
    ) -> Callable[[np.random.Generator], Arguments]:
        return lambda generator: (*draw(generator), *(m(generator) if callable(m) else m for m in more))

    c = 32
    kernels = [(3, 3, 3, c), (3, 3, c, c), (3, 3, c, 2 * c), (3, 3, 2 * c, 2 * c), (3, 3, 2 * c, c), (3, 3, 2 * c, 3)]
    layers, d = 4, 256
    decode = _draw(
        (1, 1, d), (layers, d, 3 * d), (layers, d, d), (layers, d, 4 * d), (layers, 2 * d, d), dtype=BF16, scale=0.05
    )
    tables = _draw((8, 5000, 32), (13, 32), (68,), (256, 13), scale=0.1)
    ratings = _one(20, 256)
    images = _draw((8, 64, 64, 3), (192, 128), scale=0.1)

    def blocks(generator: np.random.Generator) -> Arguments:
        return _draw((4, 128, 384), (4, 128, 128), (4, 128, 512), (4, 512, 128), scale=0.1)(generator)

    def sorted_rows(generator: np.random.Generator) -> np.ndarray:
        return np.sort(generator.integers(2000, size=20000, dtype=np.int32))

    functions: list[tuple[Callable[..., Any], _Draws]] = [
        (simulation.adaptive_runge_kutta, _draw((256, 3))),
        (simulation.neural_ode_gradient, _draw((2, 64), (64, 64), (64, 2), (128, 2), scale=0.1)),
        (simulation.implicit_euler, _draw((3,))),
        (simulation.heat_by_rolls, _draw((256, 256))),
        (simulation.burgers_upwind, _draw((4096,))),
        (simulation.vorticity_by_fft, _draw((128, 128))),
        (simulation.conjugate_gradients, _draw((64, 64))),
        (simulation.gravity, _draw((256, 3), (256, 3))),
        (simulation.lattice_ising, also(_draw((128, 128)), _KEY)),
        (simulation.cart_poles, also(_draw((4, 32), (32, 2)), _KEY)),
        (simulation.advantages, _draw((128, 64), (128, 64))),
        (simulation.hamiltonian_sampler, also(_draw((500, 20), (500,)), _KEY)),
        (simulation.gaussian_process, _draw((128, 3), (128,), (5,))),
        (simulation.variational_encoder, also(_draw((128, 784), (784, 64), (32, 784), scale=0.1), _KEY)),
        (simulation.kalman_filter, _draw((500,))),
        (simulation.descent_with_line_search, _draw((100,))),
        (simulation.newton_schulz, _draw((128, 512))),
        (simulation.root_of_preconditioner, _draw((64, 64))),
        (simulation.adam_of_many, _draw(*[(256, 128)] * 12)),
        (models.message_passing, also(_draw((2000, 64), (64, 64), (64, 64), scale=0.1), _edges(2000, 10000))),
        (models.attention_on_edges, also(_draw((2000, 64), (64, 64), (2, 64), scale=0.1), _edges(2000, 10000))),
        (models.page_rank, also(_draw((2000,)), _edges(2000, 10000))),
        (models.experts_by_capacity, _draw((1024, 128), (128, 8), (8, 128, 256), (8, 256, 128), scale=0.1)),
        (models.experts_by_masks, _draw((512, 128), (128, 8), (8, 128, 256), (8, 256, 128), scale=0.1)),
        (models.hashed_histogram, lambda generator: (generator.integers(1 << 32, size=200_000, dtype=np.uint32),)),
        (models.lstm_gradient, _draw((256, 512), (32, 32, 128), scale=0.1)),
        (models.selective_scan, _draw((256, 128), (256, 128), (128, 16), (256, 16), (256, 16))),
        (models.linear_attention, _draw((256, 4, 32), (256, 4, 32), (256, 4, 32))),
        (models.unet_gradient, _draw((2, 32, 32, 3), *kernels, scale=0.1)),
        (models.log_mel, _draw((8, 16000), (257, 80))),
        (models.suppressed_boxes, _draw((256, 4), (256,))),
        (models.augmented, also(_draw((32, 32, 32, 3)), _KEY)),
        (models.bilinear_warp, _draw((128, 128, 3), (128, 128, 2))),
        (models.decode_step, also(decode, lambda g: normal(g, (layers, 2, 1024, 8, d // 8), BF16))),
        (models.sampled_token, also(_draw((8, 32000)), _KEY)),
        (models.quantised_layers, also(_draw((16, 512)), *[lambda g: g.integers(-127, 128, (512, 512), np.int8)] * 2)),
        (models.low_rank_gradient, _draw((64, 512), (512, 512), (512, 8), (8, 512), scale=0.05)),
        (models.beam_step, _draw((8, 4), (8, 4, 8000))),
        (models.edit_distance, lambda g: tuple(g.integers(4, size=n, dtype=np.int32) for n in (60, 80))),
        (learning.sliding_window_attention, _draw((512, 8, 32), (512, 2, 32), (512, 2, 32))),
        (learning.linear_bias_attention_gradient, _draw((256, 256), (256, 768), (256, 256), scale=0.1)),
        (learning.latent_decode, _draw((256,), (256, 64), (8, 32, 64), (8, 64, 32), (1024, 64), scale=0.1)),
        (learning.vision_transformer, lambda g: (*images(g), blocks(g), *_draw((128, 100), scale=0.1)(g))),
        (learning.experts_by_sorting, _draw((512, 128), (128, 8), (8, 128, 256), (8, 256, 128), scale=0.1)),
        (learning.recommender_gradient, also(tables, _indices(5000, 8, 256, 4))),
        (learning.matrix_factorisation_epoch, also(_draw((2000, 16), (3000, 16)), _indices(2000, 20, 2, 256), ratings)),
        (learning.diffusion_sampler, also(_draw((64, 32), (48, 128), (128, 32), scale=0.3), _KEY)),
        (learning.contrastive_gradient, _draw((256, 128), (256, 128), (1,))),
        (learning.policy_update, also(_draw((16, 4), (512, 16)), _indices(4, 512), *[_one(512)] * 2)),
        (learning.factored_optimizer, lambda g: ([normal(g, (256, 128 * (1 + i % 2)), F32) for i in range(8)],)),
        (learning.focal_detection_loss, _draw((1024,), (1024, 4), (24, 4))),
        (learning.gated_units, _draw((128, 16, 64), (64, 192), (64, 192), scale=0.2)),
        (learning.time_mixing, _draw((256, 256), (256, 256), (256, 256), (256,))),
        (learning.long_convolution, _draw((1024, 64), (64, 16), (64, 16))),
        (learning.dilated_convolutions, _draw((2, 1024, 32), (6, 2, 32, 64), (6, 32, 32), scale=0.2)),
        (learning.alignment_loss_gradient, also(_draw((8, 100, 40)), lambda g: 1 + _indices(39, 8, 20)(g))),
        (learning.best_path, _draw((200, 32), (32, 32))),
        (learning.speculative_acceptance, also(_draw((8, 4, 8000), (8, 4, 8000)), _indices(8000, 8, 4), _KEY)),
        (numerics.lattice_boltzmann, _draw((128, 128))),
        (numerics.reaction_diffusion, _draw((128, 128), (128, 128))),
        (numerics.pressure_projection, _draw((128, 128), (128, 128))),
        (numerics.shallow_water, _draw((128, 128))),
        (numerics.hanging_cloth, _draw((32, 32, 3))),
        (numerics.finite_elements, also(_draw((2000,)), _indices(2000, 3800, 3))),
        (numerics.sparse_product, also(_draw((20000,)), _indices(2000, 20000), sorted_rows, _one(2000, 8))),
        (numerics.krylov_solver, _draw((128, 128), (128,))),
        (numerics.levenberg_marquardt, _draw((200,), (200,))),
        (numerics.power_components, _draw((1000, 64))),
        (numerics.whitened_logdet_gradient, _draw((96, 128))),
        (numerics.limited_memory_steps, _draw((100,), scale=0.5)),
        (numerics.game_of_life, lambda g: (g.integers(2, size=(256, 256), dtype=np.int8),)),
        (numerics.escape_times, _draw((1,))),
        (numerics.bilateral_filter, _draw((128, 128))),
        (numerics.edges_of_image, _draw((192, 192))),
        (numerics.equalised_histogram, _draw((256, 256))),
        (numerics.ray_marched_spheres, _draw((6, 3))),
        (numerics.nearest_neighbours, _draw((5000, 16), (256, 16))),
        (numerics.time_warping, _draw((200,), (200,))),
        (numerics.metropolis_chains, also(_draw((100,)), _KEY)),
        (numerics.particle_filter, also(_draw((50,)), _KEY)),
        (numerics.mixture_of_gaussians, _draw((1000, 4))),
    ]
    # Five steps in bfloat16 of two compilers are as far apart as its roundings. Resampling chooses another particle
    # where a weight is rounded otherwise.
    precision = {simulation.newton_schulz: 8e-2, numerics.particle_filter: 1e-1}
    return [
        Program(f.__name__.replace("_", " "), f, arguments, precision=precision.get(f, 2e-2))
        for f, arguments in functions
    ]
