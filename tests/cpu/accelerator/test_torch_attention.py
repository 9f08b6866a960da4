"""Attention as the transformers library writes it out for PyTorch is one kernel of ours on an accelerator, in training
one each way, with nothing of the size of its weights between the passes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flagos_backend.frontends.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Context, Executable

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

FLAGOS = torch.device("flagos")
B, H, K, T, D = 2, 4, 2, 40, 16
CAP = 1.5


def additive_mask(query: torch.Tensor) -> torch.Tensor:
    visible = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
    nothing = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(visible, nothing, torch.finfo(query.dtype).min)[None, None]


class Attention(torch.nn.Module):
    """eager_attention_forward of a model of the library, causal."""

    num_key_value_groups = H // K

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(H))
        self.compute = importlib.import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.compute(self, q, k, v, additive_mask(q), scaling=0.3, **self.options)[0]


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "scale=0.3 upper=0"),
    "gemma2": ({"softcap": CAP}, f"scale=0.3 cap={CAP} upper=0"),
    "gpt_oss": ({}, "scale=0.3 sink=hy upper=0"),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The programs that the test has compiled."""
    torch.compiler.reset()
    found: list[Executable] = []
    original = Executable.compile

    def compile_(context: Context, program: bytes) -> Executable:
        found.append(original(context, program))
        return found[-1]

    monkeypatch.setattr(Executable, "compile", compile_)
    return found


def explanations(made: list[Executable]) -> list[str]:
    return [program.artifact(Artifact.EXPLANATION).decode() for program in made]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=flagos, fullgraph=True)


def gradients(function: Callable[..., Any], args: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The output, and the gradients of the arguments for a fixed one of the output."""
    leaves = [x.detach().to(device).requires_grad_() for x in args]
    result = function(*leaves)
    upstream = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).sin().view(result.shape)
    found = torch.autograd.grad(result, leaves, upstream.to(result.dtype).to(device))
    return [tensor.detach().cpu().double() for tensor in (result, *found)]


def assert_near(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    precision = 1e-5 if dtype is torch.float32 else 1e-2
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=precision, atol=precision)


def arguments(dtype: torch.dtype, length: int = T) -> list[torch.Tensor]:
    return [torch.randn(B, heads, length, D).to(dtype) for heads in (H, K, K)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_is_one_kernel(name: str, dtype: torch.dtype, made: list[Executable]) -> None:
    options, expected = MODELS[name]
    args = arguments(dtype)
    model = Attention(name, options).to(dtype).eval()
    exact = copy.deepcopy(model).double()(*(x.double() for x in args)).detach()
    with torch.no_grad():
        ours = compiled(model.to(FLAGOS))(*(x.to(FLAGOS) for x in args)).cpu()
    assert_near([ours.double()], [exact], dtype)
    (explanation,) = explanations(made)
    assert f"attention at %dot.1: bhytd,bhsd,bhse->bthye {expected}" in explanation, explanation
    assert "triton.attention" in explanation, explanation
    assert f",{T},{T}]" not in explanation, explanation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_training_is_one_kernel_each_way(name: str, dtype: torch.dtype, made: list[Executable]) -> None:
    options, expected = MODELS[name]
    args = arguments(dtype)
    model = Attention(name, options).to(dtype)
    exact = gradients(copy.deepcopy(model).double(), [x.double() for x in args], torch.device("cpu"))
    assert_near(gradients(compiled(model.to(FLAGOS)), args, FLAGOS), exact, dtype)
    forward, backward = explanations(made)
    assert f"attention at %dot.1: bhytd,bhsd,bhse->bthye {expected}" in forward, forward
    assert f"attention and its gradients at %dot.1: bhytd,bhsd,bhse->bthye {expected}" in backward, backward
    for explanation in (forward, backward):
        assert f",{T},{T}]" not in explanation, explanation


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Batches and heads are one dimension from the start."""
    weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).mul(0.3).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (B, H))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) / D**0.5
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def divided_late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Values are weighted with exponentials, and divided by their sum after that."""
    scores = (q @ k.transpose(-2, -1)) / D**0.5
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return (exponentials @ v) / exponentials.sum(-1, keepdim=True)


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1)) / D**0.5


def without_nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The first query sees no key."""
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu()
    return scores_of(q, k).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num() @ v


def by_logsumexp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = scores_of(q, k)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def by_a_bounded_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = scores_of(q, k)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-6)) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("function", [without_nan, by_logsumexp, by_a_bounded_sum], ids=lambda f: f.__name__)
def test_other_weights(function: Callable[..., torch.Tensor], dtype: torch.dtype, made: list[Executable]) -> None:
    args = [torch.randn(B, H, T, D).to(dtype) for _ in range(3)]
    with torch.no_grad():
        ours = compiled(function)(*(x.to(FLAGOS) for x in args)).cpu()
    assert_near([ours.double()], [function(*(x.double() for x in args))], dtype)
    (explanation,) = explanations(made)
    assert "  attention at %dot.1" in explanation and "triton.attention" in explanation, explanation


def with_an_epsilon(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Which float32 rounds away."""
    scores = scores_of(q, k)
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (exponentials / (exponentials.sum(-1, keepdim=True) + 1e-9)) @ v


@pytest.mark.parametrize(
    "function", [merged, masked, divided_late, with_an_epsilon], ids=lambda function: function.__name__
)
def test_training_of_other_spellings(function: Callable[..., torch.Tensor], made: list[Executable]) -> None:
    args = [torch.randn(B, H, T, D) for _ in range(3)]
    exact = gradients(function, [x.double() for x in args], torch.device("cpu"))
    assert_near(gradients(compiled(function), args, FLAGOS), exact, torch.float32)
    forward, backward = explanations(made)
    assert "attention at %dot.1" in forward and "attention and its gradients at %dot.1" in backward, backward
    assert f",{T},{T}]" not in forward + backward, forward + backward


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) / D**0.5 + bias
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(H, T, T), (1, H, T, T), (B, 1, T, T)], ids=str)
def test_training_of_a_bias(dims: tuple[int, ...], dtype: torch.dtype, made: list[Executable]) -> None:
    args = [*(torch.randn(B, H, T, D).to(dtype) for _ in range(3)), torch.randn(dims).to(dtype)]
    exact = gradients(biased, [x.double() for x in args], torch.device("cpu"))
    assert_near(gradients(compiled(biased), args, FLAGOS), exact, dtype)
    _, backward = explanations(made)
    assert "that of a bias over" in backward and "triton.attention_backward" in backward, backward
    assert f",{H},{T},{T}]" not in backward.replace(f"[1,{H},{T},{T}]", ""), backward


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(T, T), (1, H, T, T), (B, 1, T, T), (B, H, T, T)], ids=str)
def test_training_of_a_mask_of_scaled_dot_product_attention(
    dims: tuple[int, ...], dtype: torch.dtype, made: list[Executable]
) -> None:
    """It gives rows of -infinity, of which every score is that, weights of zero."""
    bias = torch.randn(dims).masked_fill(torch.rand(dims) < 0.3, -torch.inf)
    bias[..., 3, :] = -torch.inf
    args = [*(torch.randn(B, H, T, D).to(dtype) for _ in range(3)), bias.to(dtype)]
    exact = gradients(scaled, [x.double() for x in args], torch.device("cpu"))
    assert not exact[0][:, :, 3].any()
    assert_near(gradients(compiled(scaled), args, FLAGOS), exact, dtype)
    forward, backward = explanations(made)
    assert "zero where every logit is -infinity" in forward and "triton.attention" in forward, forward
    assert "that of a bias over" in backward and "triton.attention_backward" in backward, backward
    if dims != (B, H, T, T):
        assert f"[{B},{H},{T},{T}]" not in forward + backward, forward + backward


def test_weights_that_the_program_returns_are_saved(made: list[Executable]) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return torch.cat([(weights @ v).flatten(), weights.flatten()])

    args = [torch.randn(B, H, T, D) for _ in range(3)]
    exact = gradients(function, [x.double() for x in args], torch.device("cpu"))
    assert_near(gradients(compiled(function), args, FLAGOS), exact, torch.float32)
    assert "attention" not in explanations(made)[1]


def test_few_weights_are_saved(made: list[Executable]) -> None:
    """Fewer than the queries and keys that they would be computed again of."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    args = [torch.randn(B, H, 8, D) for _ in range(3)]
    exact = gradients(function, [x.double() for x in args], torch.device("cpu"))
    assert_near(gradients(compiled(function), args, FLAGOS), exact, torch.float32)
    assert "attention" not in explanations(made)[1]


def t5() -> tuple[torch.nn.Module, torch.Tensor]:
    """One table of biases for all layers."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": H, "vocab_size": 100}
    config = transformers.T5Config(**sizes, attn_implementation="eager")
    return transformers.T5EncoderModel(config), torch.randint(0, 100, (B, T))


def swin() -> tuple[torch.nn.Module, torch.Tensor]:
    """A table of each layer, for all windows; those of the second are shifted, and what is apart in them hidden."""
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 8}
    config = transformers.SwinConfig(**sizes, attn_implementation="eager")
    return transformers.SwinModel(config), torch.randn(B, 3, 32, 32)


@pytest.mark.parametrize("make", [t5, swin], ids=lambda make: make.__name__)
def test_biases_of_a_model_train_as_in_eager_mode(make: Callable[[], Any], made: list[Executable]) -> None:
    """They are gathered from a table by distance."""
    model, x = make()
    model.eval()  # without dropout
    exact = copy.deepcopy(model).double()
    exact(x.double() if x.is_floating_point() else x).last_hidden_state.square().sum().backward()
    model.to(FLAGOS)
    torch.compile(model, backend=flagos)(x.to(FLAGOS)).last_hidden_state.square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=1e-3, atol=1e-3)
    assert sum(each.count("that of a bias over") for each in explanations(made)) == 2, explanations(made)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_model_trains_as_in_eager_mode(name: str, made: list[Executable]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": H, "num_key_value_heads": K}
    sizes |= {"intermediate_size": 48, "vocab_size": 100, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    tokens = torch.randint(0, 100, (B, T))
    exact = copy.deepcopy(model).double()
    exact(tokens, labels=tokens, use_cache=False).loss.backward()
    model.to(FLAGOS)
    on_device = tokens.to(FLAGOS)
    torch.compile(model, backend=flagos)(on_device, labels=on_device, use_cache=False).loss.backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=1e-3, atol=1e-4)
    assert sum(each.count("attention and its gradients at") for each in explanations(made)) == 2
