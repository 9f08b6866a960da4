"""Worker of the LightX2V suite. Each group of tests has a function here, which raises where a test does not pass."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flagos_backend.frontends.lightx2v as front_end
from flagos_backend.frontends.lightx2v import functions, registration
from flagos_backend.frontends.torch.compile import report
from tools.conformance import lightx2v_peers
from tools.conformance.lightx2v import KEYS
from tools.conformance.lightx2v_blocks import (
    Block,
    Inputs,
    apart,
    configuration,
    import_lightx2v,
    quantized,
    weights,
)
from tools.conformance.records import Status
from tools.conformance.worker import serve

#: How far a block may be from stock in bf16.
ALLOWED = {"bf16": 5e-3, "fp8": 2.5e-2, "int8": 1e-2}
_STEPS, _BLOCKS = 20, 3
_BYTES = {"flagos-fp8": torch.float8_e4m3fn, "flagos-int8": torch.int8}


class NotApplicableError(Exception):
    """What a test needs is not there."""


def _near(ours: Tensor, expected: Tensor, allowed: float) -> None:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        raise AssertionError(f"{ours.dtype} {list(ours.shape)} for {expected.dtype} {list(expected.shape)}")
    if not (found := apart(ours, expected)) <= allowed:
        raise AssertionError(f"{found:.3g} apart, and {allowed} allowed")


def _block(task: str, scheme: str, tokens: str, width: str, way: str) -> None:
    checkpoint = weights(task, int(width))
    inputs = Inputs(task, int(tokens), int(width))
    expected = Block(configuration(task, None, int(width)), checkpoint)(inputs)
    block = Block(configuration(task, scheme, int(width), use_compile=True), quantized(checkpoint, scheme))
    torch._dynamo.utils.counters.clear()
    _near(block(inputs, compiled=way == "compiled"), expected, ALLOWED[scheme])
    _refuse_breaks()


def _refuse_breaks() -> None:
    if breaks := dict(torch._dynamo.utils.counters["graph_break"]):
        raise AssertionError(f"graphs break: {breaks}")


def _steps(task: str, scheme: str) -> None:
    """One graph for each block at most, and none more in 20 steps."""
    config = configuration(task, scheme, 64, use_compile=True)
    checkpoints = [quantized(weights(task, 64, number), scheme) for number in range(_BLOCKS)]
    blocks = [Block(config, checkpoints[0])]
    blocks += [Block(config, checkpoints[n], n, blocks[0].infer) for n in range(1, _BLOCKS)]
    inputs = Inputs(task, 48, 64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    report.clear()
    for _ in range(_STEPS):
        inputs.next_step(64)
        for number, block in enumerate(blocks):
            block.infer.block_idx = number
            _near(block(inputs, compiled=True), block(inputs), 5e-3)
    graphs = report.reports()
    if not 1 <= len(graphs) <= _BLOCKS:
        raise AssertionError(f"{len(graphs)} graphs of {_BLOCKS} blocks")
    _refuse_breaks()
    for graph in graphs:
        if graph.outside or any("complex" in name or "view_as" in name for name in graph.fallback):
            raise AssertionError(str(graph))


def _table(key: str) -> Any:
    final = importlib.import_module("lightx2v.utils.registry_factory")
    return next(getattr(final, table.final)[key] for table in registration.TABLES if key in table.entries)


def _operator(key: str, kind: str) -> None:
    dtype = getattr(torch, kind)
    _OPERATORS[key](key, dtype, {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype])


def _attention(key: str, dtype: torch.dtype, allowed: float) -> None:
    attend = _table(key)()
    for q_dims, kv_dims, causal in (((37, 4, 16), (37, 4, 16), True), ((5, 4, 32), (41, 2, 32), False)):
        for lead in ((), (3,)):
            q, k, v = (torch.randn(*lead, *dims).to(dtype) for dims in (q_dims, kv_dims, kv_dims))
            wide = [x.double().reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (q, k, v)]
            wide[1:] = [x.repeat_interleave(q.shape[-2] // k.shape[-2], dim=1) for x in wide[1:]]
            scores = wide[0] @ wide[1].mT * q.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            exact = (scores.softmax(-1) @ wide[2]).transpose(1, 2).reshape(-1, q.shape[-2] * q.shape[-1])
            _near(attend.apply(q, k, v, causal=causal, max_seqlen_q=q.shape[-3]).double(), exact, allowed)
            if not causal:
                out, lse = attend.apply_with_lse(q, k, v)
                _near(out.double(), exact, allowed)
                _near(lse.double(), scores.logsumexp(-1).transpose(1, 2).reshape(-1, q.shape[-2]), 1e-5)
    q, k, v = (torch.randn(12, 4, 16).to(dtype) for _ in range(3))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    parts = [attend.apply(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 5), (5, 12))]
    _near(attend.apply(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts), torch.cat(parts), 1e-6)


def _norm(key: str, dtype: torch.dtype, allowed: float) -> None:
    x = (torch.randn(33, 96) * 3 + 1).to(dtype)
    weight, bias = (1 + torch.randn(96) * 0.1).to(dtype), torch.randn(96).to(dtype)
    wide = x.double()
    if key == "flagos_rms_norm":
        layer = _table(key)("blocks.0.n.weight")
        layer.weight = weight
        exact = wide * (wide.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * weight.double()
    else:
        layer = _table(key)("blocks.0.n.weight", "blocks.0.n.bias")
        layer.weight, layer.bias = weight, bias
        centred = wide - wide.mean(-1, keepdim=True)
        normal = centred * (centred.square().mean(-1, keepdim=True) + layer.eps).rsqrt()
        _near(_table(key)().apply(x).double(), normal, allowed)
        exact = normal * weight.double() + bias.double()
    out = layer.apply(x)
    assert out.dtype is dtype
    _near(out.double(), exact, allowed)


def _rope(key: str, dtype: torch.dtype, allowed: float) -> None:
    tokens, heads, width = 19, 3, 16
    angles = torch.rand(tokens, width // 2, dtype=torch.float64) * 6
    cos, sin = angles.cos()[:, None].float(), angles.sin()[:, None].float()
    for layout in ("interleaved", "split_half"):
        for size, turned in ((width, width), (width + 4, width)):
            rope = _table(key)(layout=layout)
            q, k = (torch.randn(tokens, heads, size).to(dtype) for _ in range(2))
            doubled = [
                f.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((f, f), -1) for f in (cos, sin)
            ]
            forms = (torch.complex(cos, sin), (cos, sin), tuple(doubled), torch.cat((cos, sin), -1)[:, 0])
            for form in (*forms, rope.prepare_freqs(forms[0], rotary_dim=width)):
                for x, out in zip((q, k), rope.apply(q, k, form, rotary_dim=turned), strict=True):
                    assert out.dtype is dtype
                    _near(out.double(), _turned(x.double(), angles, layout, turned), allowed)
            order = torch.randperm(tokens)
            placed = rope.apply_single(q, (cos, sin), rotary_dim=turned, positions=order)
            _near(placed.double(), _turned(q.double(), angles[order], layout, turned), allowed)


def _turned(x: Tensor, angles: Tensor, layout: str, width: int) -> Tensor:
    rotated = x[..., :width]
    halves = slice(0, None, 2), slice(1, None, 2)
    if layout == "split_half":
        halves = slice(0, width // 2), slice(width // 2, width)
    pairs = (
        torch.complex(*(rotated[..., half] for half in halves)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    out = x.clone()
    out[..., :width][..., halves[0]], out[..., :width][..., halves[1]] = pairs.real, pairs.imag
    return out


def _layer(key: str, weight: Tensor, bias: Tensor) -> Any:
    layer = _table(key)("blocks.0.l.weight", "blocks.0.l.bias")
    tensors = {"blocks.0.l.weight": weight, "blocks.0.l.bias": bias}
    if key in _BYTES:
        quantized_weight, scale = functions.quantize_rows(weight, _BYTES[key])
        tensors |= {"blocks.0.l.weight": quantized_weight, "blocks.0.l.weight_scale": scale}
    layer.load(tensors)
    layer.to_cuda()
    return layer


def _product(key: str, dtype: torch.dtype, allowed: float) -> None:
    """Quantized ones against the exact product of the same 8-bit numbers."""
    for rows in (1, 33):
        x, weight, bias = torch.randn(rows, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype)
        layer = _layer(key, weight, bias)
        if key == "flagos":
            exact = x.double() @ weight.double().t() + bias.double()
        else:
            (a, a_scale), (b, b_scale) = (functions.quantize_rows(t, _BYTES[key]) for t in (x, weight))
            # post_process makes biases of the inference dtype
            exact = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).t() + bias.bfloat16().double()
        _near(layer.apply(x).double(), exact, allowed)


_OPERATORS: dict[str, Callable[[str, torch.dtype, float], None]] = {
    "flagos_flash_attn": _attention,
    "flagos_rms_norm": _norm,
    "flagos_layer_norm": _norm,
    "flagos_rope": _rope,
    "flagos": _product,
    "flagos-fp8": _product,
    "flagos-int8": _product,
}


def _weights(kind: str, scheme: str) -> None:
    key = KEYS[scheme]
    weight, bias, x = torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16(), torch.randn(33, 64).bfloat16()
    layer = _layer(key, weight, bias)
    plain = layer.apply(x)
    if kind == "lora":
        down, up = torch.randn(4, 64).bfloat16() * 0.1, torch.randn(48, 4).bfloat16() * 0.1
        lora = {"diffusion_model.blocks.0.l." + n: t for n, t in (("lora_down.weight", down), ("lora_up.weight", up))}
        layer.register_lora(lora, 0.5)
        branch = 0.5 * x.double() @ down.double().t() @ up.double().t()
        _near(layer.apply(x).double(), plain.double() + branch, 6e-3)
        layer.remove_lora()
        assert torch.equal(layer.apply(x), plain)
        layer.register_diff({"diffusion_model.blocks.0.l.diff": weight, "diffusion_model.blocks.0.l.diff_b": bias})
        added = x.double() @ weight.double().t() + bias.double()
        _near(layer.apply(x).double(), plain.double() + added, 6e-3)
        return
    names = {n: t.contiguous() for n, t in layer.state_dict().items() if t is not None}
    buffer_options: dict[str, Any] = {"create_cuda_buffer": True}
    if kind == "disk":
        buffer_options |= {"lazy_load": True, "lazy_load_file": _saved(key, weight, bias)}
    tensors = {"blocks.0.l.weight": weight, "blocks.0.l.bias": bias}
    if key in _BYTES:
        tensors["blocks.0.l.weight"], tensors["blocks.0.l.weight_scale"] = functions.quantize_rows(weight, _BYTES[key])
    buffer = _table(key)("blocks.0.l.weight", "blocks.0.l.bias", **buffer_options)
    buffer.load(tensors if kind == "offload" else {})
    if kind == "disk":
        host = _table(key)("blocks.0.l.weight", "blocks.0.l.bias", False, True, True, buffer_options["lazy_load_file"])
        host.load({})
        host.load_state_dict_from_disk(0)
        names = host.state_dict()
    buffer.load_state_dict(names, 0)
    assert torch.equal(buffer.apply(x), plain), "a buffer that weights are moved into computes otherwise"


def _saved(key: str, weight: Tensor, bias: Tensor) -> str:
    from safetensors.torch import save_file

    tensors = {"blocks.0.l.weight": weight, "blocks.0.l.bias": bias}
    if key in _BYTES:
        tensors["blocks.0.l.weight"], tensors["blocks.0.l.weight_scale"] = functions.quantize_rows(weight, _BYTES[key])
    path = Path(tempfile.mkdtemp()) / "block_0.safetensors"
    save_file(tensors, str(path))
    return str(path)


def _registration(what: str) -> None:
    platform = importlib.import_module("lightx2v_platform.registry_factory")
    if what == "twice":
        before = dict(platform.PLATFORM_MM_WEIGHT_REGISTER)
        front_end.register()
        assert dict(platform.PLATFORM_MM_WEIGHT_REGISTER) == before
    elif what == "device":
        chosen = importlib.import_module("lightx2v_platform.base.global_var")
        assert (chosen.PLATFORM, chosen.AI_DEVICE) == ("flagos", "cpu")
        assert platform.PLATFORM_DEVICE_REGISTER["fl"].is_available()
    elif what == "entry_point":
        if not any(importlib.metadata.distributions(name="flagos")):
            raise NotApplicableError("flagos runs from its source tree, and has no entry points")
        values = [e.value for e in importlib.metadata.entry_points(group="lightx2v.platform_plugins")]
        assert "flagos_backend.frontends.lightx2v:register" in values, values
    elif what == "configurations":
        try:
            base = importlib.import_module("lightx2v.models.networks.base_model").BaseTransformerModel
        except ImportError as error:
            raise NotApplicableError(f"LightX2V's models need more packages: {error}") from None
        for path in sorted((Path(front_end.__file__).parent / "configs").glob("*.json")):
            config = json.loads(path.read_text())
            model = type("Model", (), {"config": config, "check": base._check_dit_quantized})()
            model.check()
            _table(config["dit_quant_scheme"])
    else:
        layer = _table(what)
        assert callable((layer("blocks.0.l.weight", None) if what in KEYS.values() else _made(what)).apply)


def _made(key: str) -> Any:
    return _table(key)("blocks.0.n.weight") if "norm" in key else _table(key)()


def _refusal(key: str) -> None:
    x = torch.randn(4, 64).bfloat16()
    heads = torch.randn(4, 2, 16)
    calls: list[Callable[[], Any]]
    if key == "flagos_flash_attn":
        attend = _table(key)()
        calls = [
            lambda: attend.apply(x, x, x),
            lambda: attend.apply(heads, heads[..., :8], heads),
            lambda: attend.apply(heads.int(), heads, heads),
            lambda: attend.apply(heads, heads.bfloat16(), heads.bfloat16()),
            lambda: attend.apply(heads, heads.to("meta"), heads),
            lambda: attend.apply_with_lse(heads, heads[:, :0], heads[:, :0]),
        ]
    elif key == "flagos_rope":
        rope, angles = _table(key)(), torch.rand(4, 1, 8)
        calls = [
            lambda: rope.apply(heads, heads, angles),
            lambda: rope.apply(heads, heads, "angles"),
            lambda: rope.apply(heads, heads, (angles, angles[..., :4])),
            lambda: rope.apply(heads, heads, (angles[:3], angles[:3])),
            lambda: rope.apply(heads.int(), heads, (angles, angles)),
            lambda: rope.apply(heads, heads, (angles.to("meta"), angles.to("meta"))),
            lambda: rope.apply_single(heads, (angles, angles), rotary_dim=7),
        ]
    elif "norm" in key:
        norm, empty = _made(key), _made(key)
        norm.weight, empty.weight = torch.ones(32).bfloat16(), None
        calls = [lambda: norm.apply(x), lambda: norm.apply(x[:, :32].int()), lambda: norm.apply(x[:, :32].to("meta"))]
        calls.append(lambda: empty.apply(x))
    else:
        layer = _layer(key, torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16())
        fresh = _table(key)("blocks.0.l.weight", None)
        calls = [lambda: layer.apply(x[:, :32]), lambda: layer.apply(x[None]), lambda: layer.apply(x.int())]
        calls += [lambda: layer.apply(x.to("meta")), lambda: fresh.apply(x)]
        if key in _BYTES:
            bare = {"blocks.0.l.weight": layer.weight.t()}
            scaled = {**bare, "blocks.0.l.weight_scale": torch.ones(7, 1)}
            other = {"blocks.0.l.weight": torch.randn(48, 64), "blocks.0.l.weight_scale": torch.ones(48, 1)}
            calls += [lambda t=t: fresh.load(dict(t)) for t in (bare, scaled, other)]  # type: ignore[misc]
        else:
            calls.append(lambda: layer.apply(x.float()))
    for number, call in enumerate(calls):
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            if str(error).startswith(f"{key}: ") and str(error).endswith("."):
                continue
            raise AssertionError(f"call {number} is refused without key and cure: {error}") from error
        raise AssertionError(f"call {number} is not refused")


_GROUPS: dict[str, Callable[..., None]] = {
    "block": _block,
    "steps": _steps,
    "operator": _operator,
    "weights": _weights,
    "registration": _registration,
    "refusal": _refusal,
}


def main() -> None:
    checkout = Path(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # it prints what is not installed, where answers are expected
        import_lightx2v(checkout)

    def run(name: str) -> tuple[Status, str]:
        torch.manual_seed(zlib.crc32(name.encode()))
        group, *words = name.split()
        try:
            if group == "parallel":
                kind, scheme = words
                lightx2v_peers.run(checkout, kind, scheme, ALLOWED[scheme])
            else:
                with torch.no_grad():
                    _GROUPS[group](*words)
        except NotApplicableError as error:
            return Status.NOT_APPLICABLE, str(error)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return Status.FAILED, f"{type(error).__name__}: {error} ({place})"[:1500]
        return Status.PASSED, ""

    serve(run, lambda: None)


if __name__ == "__main__":
    main()
