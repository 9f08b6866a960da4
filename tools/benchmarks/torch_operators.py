"""Custom operators inside compiled functions, against eager and Inductor: a dozen small ones, writes to a large buffer,
and a decode step with paged attention and a cache; on an accelerator also against Inductor that replays CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import report

_COUNT = 12
_CALLS = 5  # of a round, one after another
_LAYERS, _HEADS, _BATCH = 4, 16, 8
_BLOCK, _BLOCKS = 16, 24  # tokens of a block, and blocks of each sequence
_GOAL, _DECODE_GOAL = 1.1, 1 / 1.2

Make = Callable[[torch.device], tuple[Callable[..., Any], tuple[Tensor, ...]]]


@torch.library.custom_op("flagos_bench::add_one", mutates_args=())
def add_one(x: Tensor) -> Tensor:
    return x + 1


@add_one.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("flagos_bench::add_one_to", mutates_args=("y",))
def add_one_to(x: Tensor, y: Tensor) -> None:
    y.copy_(x + 1)


@torch.library.custom_op("flagos_bench::put", mutates_args=("cache",))
def put(row: Tensor, cache: Tensor, at: int) -> None:
    cache[at].copy_(row)


@torch.library.custom_op("flagos_bench::store", mutates_args=("keys", "values"))
def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, key)
    values.view(-1, *values.shape[2:]).index_copy_(0, slots, value)


@torch.library.custom_op("flagos_bench::attend", mutates_args=())
def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One token of each sequence [B, H, D] over its blocks of the caches [blocks, tokens, H, D]."""
    key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    places = torch.arange(key.shape[2], device=query.device)
    mask = (places < lengths[:, None])[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], key, value, mask)[:, :, 0].contiguous()


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    return torch.empty_like(query)


def _returning(device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def run(x: Tensor) -> Tensor:
        for _ in range(_COUNT):
            x = add_one(x * 2)
        return x

    return run, (torch.randn(64, device=device),)


def _writing(device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def run(x: Tensor) -> Tensor:
        for _ in range(_COUNT):
            y = torch.empty_like(x)
            add_one_to(x * 2, y)
            x = y
        return x

    return run, (torch.randn(64, device=device),)


def _row(device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def run(x: Tensor, cache: Tensor) -> Tensor:
        put(x * 2, cache, 3)
        return cache[3].sum()

    return run, (torch.randn(1024, device=device), torch.zeros(65536, 1024, device=device))


class Decoder(torch.nn.Module):
    """Layers of one step of decoding; caches are buffers, so that their places stay the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shape = (_BATCH * _BLOCKS, _BLOCK, _HEADS, width // _HEADS)
        for layer in range(_LAYERS):
            for name, wide in (("qkv", 3 * width), ("out", width), ("up", 4 * width)):
                self.register_parameter(f"{name}{layer}", _weight(wide, width))
            self.register_parameter(f"down{layer}", _weight(width, 4 * width))
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{layer}", torch.randn(shape))

    def forward(self, x: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        last = lengths - 1
        slots = table.gather(1, (last // _BLOCK)[:, None])[:, 0] * _BLOCK + last % _BLOCK
        for layer in range(_LAYERS):
            qkv, out, up, down, keys, values = (
                getattr(self, f"{name}{layer}") for name in ("qkv", "out", "up", "down", "keys", "values")
            )
            parts = (_normed(x) @ qkv.T).view(_BATCH, 3, _HEADS, -1).unbind(1)
            query, key, value = (part.contiguous() for part in parts)
            store(key, value, keys, values, slots)
            x = x + attend(query, keys, values, table, lengths).flatten(1) @ out.T
            x = x + torch.nn.functional.silu(_normed(x) @ up.T) @ down.T
        return x


def _weight(rows: int, columns: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, columns) * columns**-0.5, requires_grad=False)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def _decode(device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    dtype, width = (torch.float32, 256) if device.type == "cpu" else (torch.bfloat16, 1024)
    table = torch.randperm(_BATCH * _BLOCKS).view(_BATCH, _BLOCKS)
    lengths = torch.randint(_BLOCK, _BLOCKS * _BLOCK, (_BATCH,))
    x = torch.randn(_BATCH, width, dtype=dtype, device=device)
    return Decoder(width).to(device, dtype), (x, table.to(device), lengths.to(device))


PROGRAMS: dict[str, tuple[Make, float]] = {
    "12 operators that return": (_returning, _GOAL),
    "12 operators that write": (_writing, _GOAL),
    "a row of 256 MB": (_row, _GOAL),
    "decode step, paged attention": (_decode, _DECODE_GOAL),
}


def compiled(function: Callable[..., Any], peer: str) -> Callable[..., Any]:
    torch.compiler.reset()
    if peer == "eager":
        return function
    if peer == "graphs":
        return torch.compile(function, mode="reduce-overhead", fullgraph=True)
    return torch.compile(function, backend=peer, fullgraph=True)


def measure(name: str, device: torch.device, peers: Sequence[str]) -> list[report.Row]:
    """Raises AssertionError where somebody computes something else than eager."""
    make, goal = PROGRAMS[name]
    torch.manual_seed(0)
    function, inputs = make(device)
    expected = function(*inputs).clone()
    tolerance = 1e-5 if expected.dtype == torch.float32 else 3e-2
    steps = []
    for peer in peers:
        step = compiled(function, peer)
        for _ in range(5):  # graphs are recorded in the first ones
            torch.testing.assert_close(step(*inputs), expected, rtol=tolerance, atol=tolerance)
        steps.append(step)

    module = torch.get_device_module(device)

    def run(step: Callable[..., Any]) -> None:
        for _ in range(_CALLS):
            step(*inputs)
        module.synchronize()

    calls = [lambda step=step: run(step) for step in steps]
    ours, *theirs = (seconds / _CALLS * 1e6 for seconds in report.alternate(calls, 40, summary=_lower_quartile))
    rows = []
    for peer, figure in zip(peers[1:], theirs, strict=True):
        reaches = goal if peer == ("graphs" if device.type == "cuda" and goal < 1 else "inductor") else None
        rows.append(report.Row(f"{name}: {peer}", "µs", 0.0, ours, figure, reaches))
    return rows


def _lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    options = parser.parse_args()
    device = torch.device(options.device)
    peers = ["flagos", "eager", "inductor", *(["graphs"] if device.type == "cuda" else [])]
    with torch.no_grad():
        rows = [row for name in PROGRAMS if options.only in name for row in measure(name, device, peers)]
    accelerator = torch.cuda.get_device_name() if device.type == "cuda" else ""
    notes = ["each time the lower quartile of 40 rounds in turns; graphs: Inductor's mode reduce-overhead"]
    file = f"torch_operators{'_accelerator' if accelerator else ''}"
    report.publish(file, rows, options.save, notes, peer="torch", device=accelerator)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
