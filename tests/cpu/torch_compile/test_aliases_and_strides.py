"""Which outputs of a compiled graph share memory with each other and with its inputs, how they lie in memory, and which
gradients they give. PyTorch eager is the oracle; where AOTAutograd's graph itself, which aot_eager runs, differs from
that, the graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

DEVICES = ["cpu", "flagos"]
Function = Callable[..., Any]


# ---- What is seen of one call


@dataclass
class Observed:
    """What a function returned for ``inputs``, and their gradients. ``shared``: for each pair of the inputs and outputs
    that share memory the distance in bytes between their first elements. ``written``: which of them an output changes
    when it is written."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    requires_grad: list[bool]
    strides: list[tuple[int, ...]]
    shared: dict[tuple[int, int], int]
    gradients: list[Tensor | None]
    gradient_strides: list[tuple[int, ...] | None]
    written: list[list[bool]]


def observe(function: Function, given: Sequence[Tensor]) -> Observed:
    inputs = [_copied(tensor) for tensor in given]
    outputs = list(function(*inputs))
    requires_grad = [output.requires_grad for output in outputs]
    strides = [_strides(output) for output in outputs]
    everything = [*inputs, *outputs]
    shared = _shared(everything)
    values = [output.detach().cpu().clone() for output in outputs]
    gradients: list[Tensor | None] = []
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    if leaves and any(requires_grad):
        loss = sum((output * (n + 1)).sin().sum() for n, output in enumerate(outputs) if output.requires_grad)
        gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return Observed(
        [tensor.detach().cpu().clone() for tensor in inputs],
        values,
        requires_grad,
        strides,
        shared,
        [None if gradient is None else gradient.cpu() for gradient in gradients],
        [None if gradient is None else _strides(gradient) for gradient in gradients],
        [_changed(everything, output) for output in outputs],
    )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those that say where elements are: PyTorch does not always trace the others as it then makes them."""
    if not tensor.numel():
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _copied(tensor: Tensor) -> Tensor:
    """The same values in memory of their own that lies alike, with zeros between them.

    AOTAutograd sometimes returns a view of an input with strides as if that were dense, whatever the backend. Backends
    then show the same of what lies between.
    """
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        if copy.numel():
            span = 1 + sum((size - 1) * stride for size, stride in zip(copy.shape, copy.stride(), strict=True))
            copy.as_strided((span,), (1,)).zero_()
        copy[_once(copy)] = tensor[_once(tensor)]
    return copy.requires_grad_(tensor.requires_grad)


def _once(tensor: Tensor) -> tuple[slice, ...]:
    """Each element of its memory once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _addresses(tensor: Tensor) -> np.ndarray:
    places = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + np.arange(size) * stride
    return (tensor.data_ptr() + places * tensor.element_size()).ravel()


def _shared(tensors: Sequence[Tensor]) -> dict[tuple[int, int], int]:
    places = [_addresses(tensor) for tensor in tensors]
    pairs = [(a, b) for a in range(len(tensors)) for b in range(a) if np.intersect1d(places[a], places[b]).size]
    return {(a, b): tensors[a].data_ptr() - tensors[b].data_ptr() for a, b in pairs}


def _changed(tensors: Sequence[Tensor], output: Tensor) -> list[bool]:
    before = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        output.detach()[_once(output)] += 1
    return [not torch.equal(a, b) for a, b in zip(before, tensors, strict=True)]


def _differences(actual: Observed | str, expected: Observed | str) -> list[str]:
    if isinstance(actual, str) and isinstance(expected, str):
        return []  # both refuse, each at a stage of its own: AOTAutograd cannot write to an input that repeats elements
    if isinstance(actual, str) or isinstance(expected, str):
        return [f"{actual} for {expected}"]
    names = ("requires_grad", "strides", "shared", "written", "gradient_strides")
    pairs = [(name, getattr(actual, name), getattr(expected, name)) for name in names]
    found = [f"{name}: {one} for {other}" for name, one, other in pairs if one != other]
    for name in ("inputs", "outputs", "gradients"):
        try:
            assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            found.append(f"{name}: {error}")
    return found


def gaps(x: Tensor) -> tuple[int, ...]:
    """Strides with which a row has an element more than it needs."""
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.append(step)
        step *= size + 1
    return tuple(reversed(strides))


# What AOTAutograd makes of a program before a backend sees it is not the backend's. Where an input changes without
# gradients it writes the change in the graph for the first, so the input's gradient is None as in eager mode, and after
# it for the second and for us, so that gradient is zero.
_AOT_AUTOGRAD = ("aot_eager", "aot_eager_decomp_partition")


def check(function: Function, *inputs: Tensor, dynamic: bool = False, source: str = "") -> None:
    expected = observe(function, inputs)
    actual = _run("flagos", function, inputs, dynamic)
    found = _differences(actual, expected)
    if found and all(_differences(actual, _run(backend, function, inputs, dynamic)) for backend in _AOT_AUTOGRAD):
        pytest.fail("\n".join([source, *found]))


def _run(backend: str, function: Function, inputs: Sequence[Tensor], dynamic: bool) -> Observed | str:
    """What is seen, or the error."""
    torch._dynamo.reset()
    try:
        return observe(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- Kinds of outputs


def _detached_beside_views(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y[:2], y[2:], y.detach(), y * 1, y + 0


def _made_without_gradients(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    with torch.no_grad():
        row, flat = y[0], y.view(-1)
    return y, row, flat, y.view(-1), y.detach()


def _twice(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y, y, y.contiguous(), y.detach(), y.detach(), x.exp(), x.exp()


def _inputs(x: Tensor) -> tuple[Tensor, ...]:
    return x, x, x.detach(), x.view(-1), x * 1, x.clone()


def _saved_and_returned(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y.tanh(), y, y.detach(), y[0]


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return (*y.unbind(0), y.detach())


def _changed_intermediate(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    flat = y.view(-1)
    y.add_(1)
    flat[:2].mul_(2)
    return y, flat, flat.detach(), y * 1


def _changed_copy(x: Tensor) -> tuple[Tensor, ...]:
    y = x.t().reshape(-1)  # a copy, where x is row-major
    y[:1] = 1
    return y.detach(), y * 1, y.unsqueeze(0), y


def _constants(x: Tensor) -> tuple[Tensor, ...]:
    ones = torch.ones(3, device=x.device)
    return ones, ones[0], torch.ones(3, device=x.device), x.sum().expand(3)


def _complex(x: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(x.detach(), x.detach())
    return z, z.real, z.imag, z.detach(), torch.view_as_real(z)


OUTPUTS = [
    _detached_beside_views,
    _made_without_gradients,
    _twice,
    _inputs,
    _saved_and_returned,
    _parts,
    _changed_intermediate,
    _changed_copy,
    _constants,
    _complex,
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", OUTPUTS, ids=lambda f: f.__name__[1:])
def test_outputs_share_memory_as_in_eager_mode(function: Function, device: str, training: bool) -> None:
    check(function, torch.randn(4, 3).to(device).requires_grad_(training))


def _changed_input(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y.mul_(2)
    return y, y.detach(), y * 1, x * y, y.view(-1)


def _changed_view_of_an_input(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y[0].add_(x[0].detach())
    return y, y[0], x * y.clone()


def _overwritten_input(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        y.copy_(x)
    return y, x, y.t(), y.sin() * x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [_changed_input, _changed_view_of_an_input, _overwritten_input])
def test_changed_inputs_that_are_returned(function: Function, device: str) -> None:
    check(function, torch.randn(4, 3).to(device).requires_grad_(), torch.randn(4, 3).to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_two_inputs_do_not_share_memory(device: str) -> None:
    x, y = (torch.randn(4, 3).to(device).requires_grad_() for _ in range(2))
    torch.compile(lambda x, y: (x + y).sin(), backend="flagos")(x, y).sum().backward()
    assert x.grad is not None and y.grad is not None
    x.grad.zero_()
    assert y.grad.abs().sum() > 0


# ---- Layouts


def _permuted(x: Tensor) -> tuple[Tensor, ...]:
    y = x.t()
    return y * 2, y.clone(), y.contiguous() * 1, torch.empty_like(y).fill_(1), y.softmax(0), y.cumsum(0), y.flip(0)


def _with_gaps(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_strided(x.shape, gaps(x), device=x.device)
    y[:] = x + 1
    z = x.new_empty_strided(x.t().shape, gaps(x.t())).copy_(x.t())
    return y, y.t(), y * 2, z


def _empty(x: Tensor) -> tuple[Tensor, ...]:
    return x[:0] * 1, (x[:0] * 1).t(), x[:, :0].t().clone(), x.new_empty(0, 5)


def _of_size_one(x: Tensor) -> tuple[Tensor, ...]:
    y = x[:, :1] * 2
    return y, y.t(), y.t().contiguous(), x[:1].t().clone(), x[:1, :1].unsqueeze(0) * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [_permuted, _with_gaps, _empty, _of_size_one], ids=lambda f: f.__name__[1:])
def test_strides_are_those_of_eager_mode(function: Function, device: str, dynamic: bool) -> None:
    x = torch.randn(4, 5).to(device)
    expected = [(tensor.shape, tensor.stride()) for tensor in function(x)]
    outputs = torch.compile(function, backend="flagos", fullgraph=True, dynamic=dynamic)(x)
    assert [(tensor.shape, tensor.stride()) for tensor in outputs] == expected
    check(function, x.requires_grad_(), dynamic=dynamic)


IMAGES: dict[str, Function] = {
    "layers": nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)
    ),
    "upwards": nn.Sequential(nn.ConvTranspose2d(4, 8, 2, 2), nn.GroupNorm(2, 8), nn.PixelShuffle(2), nn.AvgPool2d(2)),
    "flattened": nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 3)),
    "formats": lambda x: torch.cat([x.to(memory_format=torch.contiguous_format), x.contiguous() * 2]).clone(
        memory_format=torch.channels_last
    ),
    "shuffled": lambda x: functional.channel_shuffle(x, 2),
    "by known statistics": nn.BatchNorm2d(4).eval(),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IMAGES)
def test_images_keep_their_memory_format(name: str, device: str, training: bool) -> None:
    function = copy.deepcopy(IMAGES[name])
    if isinstance(function, nn.Module):
        function = function.to(device).to(memory_format=torch.channels_last).requires_grad_(training)
    x = torch.randn(2, 4, 4, 4).contiguous(memory_format=torch.channels_last).to(device)
    check(lambda x: (function(x),), x.requires_grad_(training))


# ---- Random programs

_FRESH = (
    "{a}.sin()",
    "{a} * 1",
    "{a} + 0",
    "{a}.clone()",
    "{a} * 2 + {a}",
    "{a}.exp() - 1",
    "{a}.contiguous() * 2",
    "torch.empty_like({a}).copy_({a})",
    "{a}.clone(memory_format=torch.contiguous_format)",
    "torch.zeros_like({a}) + {a}",
    "torch.empty_strided({a}.shape, gaps({a}), device={a}.device).copy_({a})",
    "{a}.flip(0)",
    "{a}.softmax(-1)",
    "torch.where({a} > 0, {a}, 0)",
    "{a}.cumsum(0)",
    "{a}.reshape(-1)",
    "{a}.contiguous()",
)
_VIEWS = (
    "{a}.detach()",
    "{a}.transpose(0, -1)",
    "{a}[:1]",
    "{a}[-1:]",
    "{a}.unsqueeze(0)",
    "{a}.unbind(0)[0:1][0].unsqueeze(0)",
    "{a}.view_as({a})",
    "{a}.movedim(0, -1)",
    "{a}.chunk(2)[0]",
    "{a}[..., ::2]",
    "{a}.expand_as({a})",
    "{a}.unsqueeze(0).expand(2, *{a}.shape)",
    "{a}.data",
    "{a}.narrow(0, 0, 1)",
    "{a}.flatten()",
    "{a}.split(1)[0]",
)
_IMAGES = (
    "{a}.to(memory_format=torch.channels_last)",
    "{a}.contiguous(memory_format=torch.channels_last)",
    "{a}.clone(memory_format=torch.channels_last)",
    "functional.max_pool2d({a}, 2, 1, 1)",
    "functional.avg_pool2d({a}, 1)",
    "functional.conv2d({a}, {a}[:, :, :1, :1])",
    "functional.interpolate({a}, scale_factor=2.0)",
    "functional.adaptive_avg_pool2d({a}, 1)",
    "functional.pad({a}, (1, 1))",
    "functional.batch_norm({a}, None, None, training=True)",
    "functional.group_norm({a}, 1)",
    "functional.layer_norm({a}, {a}.shape[-1:])",
)
_IN_PLACE = (
    "{a}.mul_(2)",
    "{a}[:1].add_(1)",
    "{a}.transpose(0, -1).mul_(3)",
    "{a}.detach().add_(1)",
    "{a}[..., :1] = 1",
)
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}
_SHAPES = ((6,), (4, 6), (1, 5), (2, 3, 4), (2, 4, 3, 3), (2, 1, 4, 4), (2, 4, 1, 1), (0, 3), (1, 1))


def _program(draw: random.Random, rank: int, training: bool) -> str:
    names, lines, own = ["x", "y"], [], []
    for number in range(draw.randint(2, 6)):
        source = draw.choice(names)
        kind = draw.random()
        pool = _IMAGES if rank == 4 and draw.random() < 0.4 else _FRESH
        if kind < 0.2 and (own or not training):
            target = draw.choice(own) if own else source
            guard = "with torch.no_grad(): " if draw.random() < 0.3 else ""
            lines.append(guard + draw.choice(_IN_PLACE).format(a=target))
            continue
        name = f"v{number}"
        if kind < 0.6:
            lines.append(f"{name} = {draw.choice(pool).format(a=source)}")
            if pool is _FRESH:
                own.append(name)
        else:
            guard = "with torch.no_grad(): " if draw.random() < 0.2 else ""
            lines.append(f"{guard}{name} = {draw.choice(_VIEWS).format(a=source)}")
        names.append(name)
    results = [
        draw.choice(names[-4:] if draw.random() < 0.8 else names)
        + draw.choice(("", "", "", ".detach()", " * 1", ".clone()"))
        for _ in range(draw.randint(1, 4))
    ]
    return "\n    ".join(["def program(x, y):", *lines, f"return {', '.join(results)},"])


def _try(seed: int, device: str) -> bool:
    """Whether eager mode runs the program, which then is compiled."""
    draw = random.Random(seed)
    shape = draw.choice(_SHAPES)
    training = draw.random() < 0.6
    layout = draw.choice(list(_LAYOUTS))
    source = _program(draw, len(shape), training)
    scope: dict[str, Any] = {"torch": torch, "functional": functional, "gaps": gaps}
    exec(source, scope)
    torch.manual_seed(seed)
    x, y = (_LAYOUTS[layout](torch.randn(shape)) for _ in range(2))
    x, y = (_copied(tensor) if device == "cpu" else torch.flagos.wrap(_copied(tensor)) for tensor in (x, y))
    x.requires_grad_(training)
    y.requires_grad_(training and draw.random() < 0.5)
    try:
        observe(scope["program"], (x, y))
    except (RuntimeError, IndexError, ValueError):
        return False
    case = f"seed {seed}, {shape}, {layout}, gradients {x.requires_grad, y.requires_grad}"
    check(scope["program"], x, y, dynamic=draw.random() < 0.2, source=f"{case}\n{source}")
    return True


@pytest.mark.parametrize("device", DEVICES)
def test_an_unused_input_that_changes_without_gradients(device: str) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            x.view(-1)[:1].add_(1)
        return (y.sin(),)

    x, y = (torch.randn(4, 6).to(device).requires_grad_() for _ in range(2))
    check(program, x, y)
    observed = observe(torch.compile(program, backend="flagos", fullgraph=True), (x, y))
    assert observed.gradients[0] is None or not observed.gradients[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs(device: str, rng: np.random.Generator) -> None:
    tried = sum(_try(int(rng.integers(2**31)), device) for _ in range(16))
    assert tried > 4
