"""PyTorch programs of the kinds that public projects consist of, for torch_speed.py: written from what such programs do
and tuned by nobody. Sizes take a host a few milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .torch_programs import Program, Step

_Compiler = Callable[[Any], Callable[..., Any]]
_Draw = Callable[[], Sequence[Tensor]]


def _floats(*shapes: tuple[int, ...], scale: float = 1.0) -> _Draw:
    return lambda: [torch.randn(shape) * scale for shape in shapes]


def _also(draw: _Draw, *more: Callable[[], Tensor]) -> _Draw:
    return lambda: [*draw(), *(one() for one in more)]


def _indices(below: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(below, shape)


def _function(function: Callable[..., Any], draw: _Draw, gradient: bool) -> Program:
    """``function`` of what ``draw`` makes; with ``gradient`` a loss and its gradients for all floats."""

    def make(device: torch.device, compiler: _Compiler) -> Step:
        torch.manual_seed(0)
        arrays = [array.to(device).requires_grad_(gradient and array.is_floating_point()) for array in draw()]
        wanted, run = [array for array in arrays if array.requires_grad], compiler(function)

        def forward() -> Any:
            with torch.no_grad():
                return run(*arrays)

        def step() -> Any:
            loss = run(*arrays)
            return loss.detach(), *torch.autograd.grad(loss, wanted)

        return step if gradient else forward

    return Program(function.__name__.strip("_").replace("_", " "), make)


def _module(name: str, model: Callable[[], nn.Module], draw: _Draw, gradient: bool) -> Program:
    """A module of what ``draw`` makes; with ``gradient`` its mean square and that one's gradients."""

    def make(device: torch.device, compiler: _Compiler) -> Step:
        torch.manual_seed(0)
        module = model().to(device).train(gradient)
        arrays = [array.to(device) for array in draw()]
        run, parameters = compiler(module), list(module.parameters())

        def forward() -> Any:
            with torch.no_grad():
                return run(*arrays)

        def step() -> Any:
            loss = run(*arrays).square().mean()
            return loss.detach(), *torch.autograd.grad(loss, parameters)

        return step if gradient else forward

    return Program(name, make)


# ---- Graphs and recommenders


def graph_attention(x: Tensor, w: Tensor, a: Tensor, edges: Tensor) -> Tensor:
    h = x @ w
    e = F.leaky_relu((h @ a[0])[edges[0]] + (h @ a[1])[edges[1]], 0.2)
    top = torch.full((len(x),), -torch.inf, device=x.device).scatter_reduce(0, edges[1], e.detach(), "amax")
    e = torch.exp(e - top[edges[1]])
    share = e / torch.zeros(len(x), device=x.device).index_add(0, edges[1], e)[edges[1]]
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * share[:, None]).square().mean()


def graph_convolution(x: Tensor, w1: Tensor, w2: Tensor, edges: Tensor) -> Tensor:
    degree = torch.zeros(len(x), device=x.device).index_add(0, edges[1], torch.ones(edges.shape[1], device=x.device))
    norm = (degree[edges[0]] * degree[edges[1]]).clamp_min(1).rsqrt()[:, None]
    for w in (w1, w2):
        x = F.relu(torch.zeros_like(x).index_add(0, edges[1], (x @ w)[edges[0]] * norm))
    return x.square().mean()


def pooled_neighbours(x: Tensor, edges: Tensor) -> Tensor:
    where = edges[1][:, None].expand(-1, x.shape[1])
    parts = [
        torch.zeros_like(x).scatter_reduce(0, where, x[edges[0]], kind, include_self=False)
        for kind in ("mean", "amax", "amin")
    ]
    return torch.cat(parts, -1)


class Recommender(nn.Module):
    """Bags of sparse features and dense ones, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum") for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(32 + 21, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        features = torch.stack([first, *(bag(ids[i]) for i, bag in enumerate(self.bags))], 1)
        rows, columns = torch.tril_indices(7, 7, -1, device=dense.device)
        pairs = torch.bmm(features, features.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([first, pairs], 1))


def factorisation_machine(table: Tensor, linear: Tensor, ids: Tensor) -> Tensor:
    rows = F.embedding(ids, table)
    crossed = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(-1)
    logit = crossed + F.embedding(ids, linear).sum((1, 2))
    return F.binary_cross_entropy_with_logits(logit, (ids[:, 0] % 2).float())


# ---- Recurrent, state-space and linear models


def lstm_by_hand(w: Tensor, xs: Tensor) -> Tensor:
    h = c = torch.zeros_like(xs[0])
    out = []
    for x in xs:
        i, f, g, o = (torch.cat([x, h], -1) @ w).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out).square().mean()


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    dt = F.softplus(dt)
    decay, fed = torch.exp(dt[..., None] * -a.abs()), (dt * x)[..., None] * b[:, None]
    state, out = torch.zeros_like(fed[0]), []
    for t in range(len(x)):
        state = decay[t] * state + fed[t]
        out.append((state * c[t]).sum(-1))
    return torch.stack(out)


def chunked_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decay within chunks of 32 by masks, between them by a state."""
    heads, length, width = q.shape
    place = torch.arange(32, device=q.device)
    decay = 0.95 ** (place[:, None] - place).clamp_min(0) * (place[:, None] >= place)
    state, out = torch.zeros(heads, width, width, device=q.device), []
    for start in range(0, length, 32):
        a, b, c = (t[:, start : start + 32] for t in (q, k, v))
        inner = (a @ b.mT * decay) @ c
        out.append(inner + (a @ state) * 0.95 ** (place + 1)[:, None])
        state = state * 0.95**32 + (b * 0.95 ** (31 - place)[:, None]).mT @ c
    return torch.cat(out, 1)


# ---- Attention, experts, adapters


def _rotated(x: Tensor) -> Tensor:
    """[B, H, S, D], complex pairs."""
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * 10000.0 ** (
        -torch.arange(0, x.shape[3], 2, device=x.device) / x.shape[3]
    )
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def rotary_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)


def attention_with_relative_bias(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    """T5's buckets of distances, learnt biases."""
    n, heads = x.shape[1], table.shape[1]
    q, k, v = (x @ qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    place = torch.arange(n, device=x.device)
    distance = (place[:, None] - place).clamp_min(0)
    far = 16 + (torch.log(distance.clamp_min(1) / 16) / math.log(128 / 16) * 16).long()
    bias = table[torch.where(distance < 16, distance, far.clamp_max(31))].permute(2, 0, 1)
    share = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1)
    return (share @ v).square().mean()


def window_attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Windows of 8 x 8 of an image rolled by half of one."""
    b, h, w, c = x.shape
    parts = torch.roll(x, (-4, -4), (1, 2)).view(b, h // 8, 8, w // 8, 8, c).transpose(2, 3).reshape(-1, 64, c)
    q, k, v = (parts @ qkv).view(-1, 64, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(parts.shape) @ out
    mixed = mixed.view(b, h // 8, w // 8, 8, 8, c).transpose(2, 3).reshape(x.shape)
    return x + torch.roll(mixed, (4, 4), (1, 2))


def decode_step(x: Tensor, qkv: Tensor, out: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> Tensor:
    """A token with a cache that is written by index."""
    q, k, v = (x @ qkv).view(3, 1, 8, 1, -1)
    keys.index_copy_(2, place, k)
    values.index_copy_(2, place, v)
    mask = (torch.arange(keys.shape[2], device=x.device) <= place)[None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(1, -1) @ out


def experts_by_masks(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    share, chosen = (x @ router).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e in range(len(up)):
        weight = (share * (chosen == e)).sum(-1, keepdim=True)
        out = out + weight * (F.silu(x @ up[e]) @ down[e])
    return out


def experts_by_sorting(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As many tokens an expert as it has room for."""
    share, expert = (x @ router).softmax(-1).max(-1)
    room = 2 * len(x) // len(up)
    place = (F.one_hot(expert, len(up)).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
    slot = torch.where(place < room, expert * room + place, len(up) * room)
    taken = x.new_zeros(len(up) * room + 1, x.shape[1]).index_copy(0, slot, x)[:-1].view(len(up), room, -1)
    made = torch.cat([torch.bmm(F.gelu(torch.bmm(taken, up)), down).flatten(0, 1), x.new_zeros(1, x.shape[1])])
    return (made[slot] * share[:, None]).square().mean()


def low_rank_adapter(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, x.shape[1] ** 2, device=x.device).view(x.shape[1], -1) / x.shape[1] ** 0.5
    for _ in range(3):
        x = F.gelu(x @ w + 2 * (x @ a) @ b)
    return x.square().mean()


def weight_only_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    for _ in range(2):
        x = F.silu(F.linear(x, w.to(x.dtype)) * scale.abs() * 1e-3)
    return x


# ---- Sampling


def nucleus_sampling(logits: Tensor, noise: Tensor) -> Tensor:
    values, order = (logits / 0.8).sort(-1, descending=True)
    share = values.softmax(-1)
    kept = values.masked_fill(share.cumsum(-1) - share > 0.9, -torch.inf)
    chosen = (kept - torch.log(-torch.log(noise.abs().clamp(1e-6, 0.999)))).argmax(-1, keepdim=True)
    return order.gather(-1, chosen)


def penalised_logits(logits: Tensor, seen: Tensor) -> Tensor:
    score = logits.gather(1, seen)
    logits = logits.scatter(1, seen, torch.where(score < 0, score * 1.2, score / 1.2))
    counts = torch.zeros_like(logits).scatter_add(1, seen, torch.ones_like(score))
    return (logits - 0.1 * counts - 0.2 * (counts > 0)).log_softmax(-1)


def beam_search_step(scores: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    total = scores[:, :, None] + logits.log_softmax(-1)
    best, flat = total.flatten(1).topk(scores.shape[1], -1)
    beam, token = flat // logits.shape[-1], flat % logits.shape[-1]
    return best, torch.cat([tokens.gather(1, beam[..., None].expand_as(tokens)), token[..., None]], -1)


# ---- Images


class SmallUNet(nn.Module):
    """Group norms, skips, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.middle, self.up = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(96, 32, 3, padding=1)
        self.last, self.norms = nn.Conv2d(32, 3, 1), nn.ModuleList(nn.GroupNorm(8, c) for c in (32, 64, 96))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        low = self.down(F.silu(self.norms[0](first)))
        low = low + self.middle(F.silu(self.norms[1](low)))
        both = torch.cat([F.interpolate(low, scale_factor=2.0, mode="nearest"), first], 1)
        return self.last(F.silu(self.up(F.silu(self.norms[2](both)))))


class NextBlock(nn.Module):
    """A wide depthwise convolution, norm over channels, inverted bottleneck."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class MobileBlock(nn.Module):
    """Expanded, depthwise, squeezed and excited, with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Conv2d(width, wide, 1, bias=False)
        self.depth = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False)
        self.project, self.norms = nn.Conv2d(wide, width, 1), nn.ModuleList(nn.BatchNorm2d(wide) for _ in range(2))
        self.squeeze, self.excite = nn.Conv2d(wide, width // 4, 1), nn.Conv2d(width // 4, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norms[0](self.expand(x)))
        y = F.silu(self.norms[1](self.depth(y)))
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.project(y)


class VisionTransformer(nn.Module):
    """Patches of 8 x 8, three of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 128, 8, 8), nn.Parameter(torch.zeros(1, 64, 128))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 256, 0.0, F.gelu, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(128, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class FeaturePyramid(nn.Module):
    """Three scales added from the coarsest down."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, 32, 1) for c in (16, 32, 64))
        self.smooth = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a, b, c = (lateral(x) for lateral, x in zip(self.lateral, (a, b, c), strict=True))
        b = b + F.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)
        a = a + F.interpolate(b, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat([smooth(x).flatten(2) for smooth, x in zip(self.smooth, (a, b, c), strict=True)], -1)


def optical_flow_warp(image: Tensor, flow: Tensor) -> Tensor:
    height, width = image.shape[-2:]
    y, x = torch.meshgrid(
        torch.linspace(-1, 1, height, device=image.device),
        torch.linspace(-1, 1, width, device=image.device),
        indexing="ij",
    )
    grid = torch.stack([x, y], -1) + 0.05 * flow
    return F.grid_sample(image, grid, align_corners=False, padding_mode="border")


def suppressed_boxes(boxes: Tensor, scores: Tensor) -> Tensor:
    """Scores that decay with the overlap of better ones."""
    order = scores.argsort(descending=True)
    corner, size = boxes[order, :2], boxes[order, 2:].abs()
    low, high = torch.maximum(corner[:, None], corner), torch.minimum((corner + size)[:, None], corner + size)
    shared, area = (high - low).clamp_min(0).prod(-1), size.prod(-1)
    overlap = (shared / (area[:, None] + area - shared)).triu(1)
    worst = overlap.max(0).values
    return scores[order] * torch.exp(-(overlap.square() - worst[:, None].square()) / 0.5).min(0).values


def focal_and_dice(logits: Tensor, wanted: Tensor) -> Tensor:
    target = (wanted == 0).float()
    p = logits.sigmoid()
    focal = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * (target - p).abs().square()
    dice = 1 - (2 * (p * target).sum((1, 2)) + 1) / (p.sum((1, 2)) + target.sum((1, 2)) + 1)
    return focal.mean() + dice.mean()


def smoothed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1) + 1e-4 * logits.logsumexp(-1).square().mean()


def contrastive_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * scale.exp()
    same = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2


def jittered_colours(images: Tensor, light: Tensor, contrast: Tensor) -> Tensor:
    x = images * (1 + 0.2 * light[:, None, None, None])
    grey = (x * torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]).sum(1, keepdim=True)
    x = (x - grey.mean((2, 3), keepdim=True)) * (1 + 0.2 * contrast[:, None, None, None]) + grey
    x = torch.where(light[:, None, None, None] > 0, x.flip(-1), x)
    return F.pad(x, (4, 4, 4, 4), mode="reflect")[:, :, 2:-6, 3:-5].clamp(0, 1)


# ---- Diffusion, radiance, audio


def implicit_sampler(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, device=x.device), 0)
    for t in range(95, 0, -5):
        noise = F.silu(torch.cat([x, kept[t].expand(len(x), 1)], -1) @ w1) @ w2
        clean = (x - (1 - kept[t]).sqrt() * noise) / kept[t].sqrt()
        x = kept[t - 5].sqrt() * clean.clamp(-3, 3) + (1 - kept[t - 5]).sqrt() * noise
    return x


def radiance_field(rays: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Samples along rays, encoded by frequencies, composited by what passes."""
    depth = torch.linspace(0.5, 4.0, 32, device=rays.device)
    points = rays[:, None, :3] + rays[:, None, 3:] * depth[:, None]
    angles = (points[..., None] * 2.0 ** torch.arange(6, device=rays.device)).flatten(-2)
    made = F.relu(torch.cat([angles.sin(), angles.cos()], -1) @ w1) @ w2
    alpha = 1 - torch.exp(-F.softplus(made[..., 3]) * 0.1)
    passes = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * passes)[..., None] * made[..., :3].sigmoid()).sum(1).square().mean()


def splatted_gaussians(centres: Tensor, spread: Tensor, colours: Tensor) -> Tensor:
    """Every pixel of 32 x 32 blends all of them, front to back."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 32, device=centres.device)] * 2, indexing="ij")
    apart = torch.stack([x, y], -1).view(-1, 1, 2) - centres
    alpha = 0.9 * torch.exp(-apart.square().sum(-1) / (2 * F.softplus(spread)))
    passes = torch.cumprod(1 - alpha, 1)
    passes = torch.cat([torch.ones_like(passes[:, :1]), passes[:, :-1]], 1)
    return ((alpha * passes) @ colours.sigmoid()).square().mean()


def log_mel(x: Tensor, filters: Tensor) -> Tensor:
    window = torch.hann_window(512, device=x.device)
    power = torch.stft(x, 512, 160, window=window, return_complex=True).abs().square()
    return (filters.abs() @ power).clamp_min(1e-6).log10()


class WaveNet(nn.Module):
    """Gated dilated convolutions over a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=2**i) for i in range(6))
        self.mixed = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        skipped = torch.zeros_like(x)
        for i, (dilated, mixed) in enumerate(zip(self.dilated, self.mixed, strict=True)):
            a, b = dilated(F.pad(x, (2**i, 0))).chunk(2, 1)
            made = mixed(a.tanh() * b.sigmoid())
            x, skipped = x + made, skipped + made
        return F.relu(skipped)


def long_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    n = x.shape[-1]
    spectrum = torch.fft.rfft(x, 2 * n) * torch.fft.rfft(kernel, 2 * n)
    return F.gelu(torch.fft.irfft(spectrum, 2 * n)[..., :n] + x)


# ---- Simulation, statistics, optimizers


def heat_by_rolls(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x + 0.1 * (x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x)
    return x


def gravitational_potential(x: Tensor, mass: Tensor) -> Tensor:
    apart = x[:, None] - x
    near = (apart.square().sum(-1) + 1e-2).rsqrt()
    return -(mass[:, None] * mass * near).triu(1).sum()


def hashed_histogram(x: Tensor) -> Tensor:
    for factor in (0x45D9F3B, 0x119DE1F3, 0x27D4EB2D):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return torch.zeros(1024, dtype=torch.long, device=x.device).index_add(0, x % 1024, torch.ones_like(x))


def nearest_neighbours(points: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    near, which = torch.cdist(asked, points).topk(10, largest=False)
    return near, points[which].mean(1)


def gaussian_process(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    kernel = torch.exp(-0.5 * torch.cdist(x / F.softplus(scale), x / F.softplus(scale)).square())
    lower = torch.linalg.cholesky(kernel + 0.1 * torch.eye(len(x), device=x.device))
    alpha = torch.cholesky_solve(y[:, None], lower)
    return (0.5 * y @ alpha + lower.diagonal().log().sum()).sum()


def variational_loss(x: Tensor, w: Tensor, v: Tensor, noise: Tensor) -> Tensor:
    mean, log_variance = (x.detach() @ w).chunk(2, -1)
    z = mean + torch.exp(0.5 * log_variance) * noise.detach()
    rebuilt = F.binary_cross_entropy_with_logits(z @ v, x.detach().sigmoid(), reduction="none").sum(-1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
    return (rebuilt + divergence).mean() + 0 * (x.sum() + noise.sum())


def adam_by_hand(*arrays: Tensor) -> list[Tensor]:
    """Of four arrays: gradients, parameters, both moments."""
    out = []
    for i in range(0, len(arrays), 4):
        g, p, m, v = arrays[i : i + 4]
        m, v = torch.lerp(m, g, 0.1), 0.999 * v.abs() + 0.001 * g * g
        out += [p * 0.9999 - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v]
    return out


def orthogonalised_momentum(g: Tensor) -> Tensor:
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def wild() -> list[Program]:
    """All of them."""
    edges = _indices(2000, 2, 10000)
    cache = _floats((1, 256), (256, 768), (256, 256), (1, 8, 1024, 32), (1, 8, 1024, 32), scale=0.1)
    experts = _floats((512, 128), (128, 8), (8, 128, 256), (8, 256, 128), scale=0.1)

    def small(*shape: int) -> Callable[[], Tensor]:
        return lambda: torch.randint(-127, 128, shape, dtype=torch.int8)

    functions: list[tuple[Callable[..., Any], _Draw, bool]] = [
        (graph_attention, _also(_floats((2000, 64), (64, 64), (2, 64), scale=0.1), edges), True),
        (graph_convolution, _also(_floats((2000, 64), (64, 64), (64, 64), scale=0.1), edges), True),
        (pooled_neighbours, _also(_floats((2000, 64)), edges), False),
        (factorisation_machine, _also(_floats((20000, 16), (20000, 1), scale=0.1), _indices(20000, 512, 20)), True),
        (lstm_by_hand, _floats((256, 512), (32, 16, 128), scale=0.1), True),
        (selective_scan, _floats((64, 128), (64, 128), (128, 16), (64, 16), (64, 16)), False),
        (chunked_retention, _floats((8, 256, 32), (8, 256, 32), (8, 256, 32), scale=0.3), False),
        (rotary_attention, _floats((1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64)), False),
        (attention_with_relative_bias, _floats((2, 128, 256), (256, 768), (32, 8), scale=0.1), True),
        (window_attention, _floats((2, 32, 32, 128), (128, 384), (128, 128), scale=0.1), False),
        (decode_step, _also(cache, lambda: torch.tensor([700])), False),
        (experts_by_masks, experts, False),
        (experts_by_sorting, experts, True),
        (low_rank_adapter, _floats((64, 512), (512, 8), (8, 512), scale=0.1), True),
        (weight_only_int8, lambda: [torch.randn(16, 512), small(512, 512)(), torch.randn(512)], False),
        (nucleus_sampling, _floats((8, 32000), (8, 32000)), False),
        (penalised_logits, _also(_floats((8, 32000)), _indices(32000, 8, 200)), False),
        (beam_search_step, _also(_floats((8, 4), (8, 4, 8000)), _indices(8000, 8, 4, 20)), False),
        (optical_flow_warp, _floats((2, 16, 64, 64), (2, 64, 64, 2)), False),
        (suppressed_boxes, _floats((256, 4), (256,)), False),
        (focal_and_dice, _also(_floats((8, 128, 128)), _indices(8, 8, 128, 128)), True),
        (smoothed_cross_entropy, _also(_floats((256, 8000)), _indices(8000, 256)), True),
        (contrastive_loss, _floats((256, 128), (256, 128), ()), True),
        (jittered_colours, _floats((16, 3, 64, 64), (16,), (16,)), False),
        (implicit_sampler, _floats((64, 32), (33, 128), (128, 32), scale=0.3), False),
        (radiance_field, _floats((128, 6), (36, 64), (64, 4), scale=0.3), True),
        (splatted_gaussians, _floats((64, 2), (64,), (64, 3)), True),
        (log_mel, _floats((8, 16000), (80, 257)), False),
        (long_convolution, _floats((4, 64, 1024), (64, 1024), scale=0.1), False),
        (heat_by_rolls, _floats((256, 256)), False),
        (gravitational_potential, _floats((256, 3), (256,)), True),
        (hashed_histogram, _also(list, _indices(1 << 31, 200_000)), False),
        (nearest_neighbours, _floats((5000, 16), (256, 16)), False),
        (gaussian_process, _floats((128, 3), (128,), (3,)), True),
        (variational_loss, _floats((128, 784), (784, 64), (32, 784), (128, 32), scale=0.1), True),
        (adam_by_hand, _floats(*[(256, 128)] * 32), False),
        (orthogonalised_momentum, _floats((128, 512)), False),
    ]
    modules: list[tuple[str, Callable[[], nn.Module], _Draw, bool]] = [
        ("recommender", Recommender, _also(_floats((256, 13)), _indices(5000, 6, 256, 4)), True),
        ("gated recurrent unit", lambda: _First(nn.GRU(64, 64)), _floats((128, 16, 64)), False),
        ("small U-Net", SmallUNet, _floats((2, 3, 32, 32)), True),
        ("ConvNeXt block", lambda: NextBlock(64), _floats((2, 64, 32, 32)), False),
        ("mobile block", lambda: MobileBlock(32), _floats((4, 32, 32, 32)), True),
        ("vision transformer", VisionTransformer, _floats((8, 3, 64, 64)), False),
        ("feature pyramid", FeaturePyramid, _floats((2, 16, 64, 64), (2, 32, 32, 32), (2, 64, 16, 16)), False),
        ("WaveNet", WaveNet, _floats((2, 32, 1024)), True),
    ]
    return [_function(*row) for row in functions] + [_module(*row) for row in modules]


class _First(nn.Module):
    """The first result of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.inner(*arguments)[0]
