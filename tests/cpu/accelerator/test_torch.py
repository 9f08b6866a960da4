"""torch.compile and the eager device over a simulated accelerator, against PyTorch's CPU; programs run often enough to
be past their first launches."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from flagos_backend.frontends.torch.compile import device_contexts, report
from flagos_backend.frontends.torch.compile.backend import flagos
from plugin_abi.host import Artifact, Context, Executable

RUNS = 3
FLAGOS = torch.device("flagos")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    report.clear()


def test_each_tensor_has_its_device_context() -> None:
    host, accelerator = device_contexts.host(), device_contexts.find(FLAGOS)
    assert accelerator is not None
    assert (host.device.kind, accelerator.device.kind) == ("cpu", "simulated accelerator")
    assert device_contexts.device_context_of([torch.device("cpu")]) is host
    assert device_contexts.device_context_of([torch.device("cpu"), FLAGOS]) is accelerator
    assert device_contexts.find(torch.device("cuda:0")) is None


def test_its_properties_are_what_the_backend_says() -> None:
    properties = torch.flagos.get_device_properties()  # type: ignore[attr-defined]
    assert (properties.kind, properties.multi_processor_count) == ("simulated accelerator", 2)
    assert properties.total_memory > 0


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device_context, *_ = device_contexts._all()
    numbered = tuple(
        dataclasses.replace(device_context, torch_device=torch.device("cuda", number)) for number in range(2)
    )
    monkeypatch.setattr(device_contexts, "_all", lambda: numbered)
    assert device_contexts.find(torch.device("cuda")) is numbered[1]
    assert device_contexts.find(torch.device("cuda:0")) is numbered[0]
    assert device_contexts.find(torch.device("cuda:2")) is None
    assert device_contexts.find(torch.device("xpu")) is None


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_embedding_bags(dtype: torch.dtype, mode: str) -> None:
    """What they save for their gradients has the sizes that the CPU's memory has, not an accelerator's."""
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 1]), torch.tensor([0, 4])
    weight = torch.randn(6, 4, dtype=dtype)

    def gradient(weight: torch.Tensor, compiler: Callable[..., Callable[..., torch.Tensor]]) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        places = [t.to(weight.device) for t in (indices, offsets)]
        bags = compiler(lambda w: functional.embedding_bag(places[0], w, places[1], mode=mode))(weight)
        (found,) = torch.autograd.grad((bags * bags).sum(), weight)
        return found.cpu()

    ours = gradient(weight.to(FLAGOS), lambda f: torch.compile(f, backend=flagos))
    torch.testing.assert_close(ours, gradient(weight, lambda f: f))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(1, keepdim=True)).softmax(1)


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).tanh() + 1


def views(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.T.reshape(-1), x[1:, ::2].flatten(), x.expand(2, *x.shape).sum(0).flatten()])


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1] = 0
    return y.add_(torch.full((6,), 2.0, device=x.device))


def heads(x: torch.Tensor) -> torch.Tensor:
    """Attention of parts of one array, whose result lies in another order than it has."""
    q, k, v = (part.view(1, 4, 2, 1).transpose(1, 2) for part in (x + 1).chunk(3, 1))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 2) * 2


def triangles(x: torch.Tensor) -> torch.Tensor:
    wide = (x > 0).tril().triu(-1) | (x * 4).long().triu(2).bool()
    return torch.cat([x.tril(), x.tril(1), x.triu(-2), x[:, None].triu(4).flatten(1), wide.to(x.dtype)])


def positions(x: torch.Tensor) -> torch.Tensor:
    (best, place), least = x.max(1), x.argmin()
    return torch.cat([best, place.to(x.dtype), x.min(0, keepdim=True).indices[0].to(x.dtype), least.to(x.dtype)[None]])


@pytest.mark.parametrize(
    "function", [softmax, product, views, written, heads, triangles, positions], ids=lambda function: function.__name__
)
def test_as_on_the_cpu(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = torch.compile(function, backend=flagos, fullgraph=True)
    for _ in range(RUNS):
        x = torch.randn(4, 6)
        ours = compiled(x.to(FLAGOS))
        assert ours.device.type == "flagos"
        torch.testing.assert_close(ours.cpu(), function(x))


@pytest.mark.parametrize(
    ("norm", "wanted"),
    [("layer", wanted) for wanted in ("x", "w", "b", "wb", "xw")]
    + [(norm, wanted) for norm in ("group", "batch", "instance") for wanted in ("b", "xw")],
)
def test_gradients_of_norms_that_are_asked_for(norm: str, wanted: str) -> None:
    """The kernels of the gradients leave out what nobody asked for."""

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match norm:
            case "layer":
                y = functional.layer_norm(x, (4, 5), w[:, None].expand(4, 5), b[:, None].expand(4, 5))
            case "group":
                y = functional.group_norm(x, 2, w, b)
            case "batch":
                y = functional.batch_norm(x, None, None, w, b, training=True)
            case _:
                y = functional.instance_norm(x, None, None, w, b)
        return (y * y.sin()).sum()

    values = {"x": torch.randn(3, 4, 5), "w": torch.randn(4), "b": torch.randn(4)}

    def gradients(call: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        own = {k: v.to(device, dtype).requires_grad_(k in wanted) for k, v in values.items()}
        return [g.cpu() for g in torch.autograd.grad(call(**own), [own[k] for k in wanted])]

    compiled = torch.compile(loss, backend=flagos, fullgraph=True)
    expected = gradients(loss, torch.device("cpu"), torch.float64)
    for _ in range(RUNS):
        for ours, theirs in zip(gradients(compiled, FLAGOS, torch.float32), expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The programs that the test has compiled."""
    found: list[Executable] = []
    original = Executable.compile

    def compile(context: Context, program: bytes) -> Executable:
        found.append(original(context, program))
        return found[-1]

    monkeypatch.setattr(Executable, "compile", compile)
    return found


def test_programs_run_as_generated_kernels(made: list[Executable]) -> None:
    compiled = torch.compile(lambda x: (x.exp() + 1).sum(1), backend=flagos)
    for device, expected in ((FLAGOS, True), (torch.device("cpu"), False)):
        compiled(torch.randn(4, 6).to(device))
        explanation = made[-1].artifact(Artifact.EXPLANATION).decode()
        assert ("triton " in explanation) is expected, explanation


def test_operators_read_and_leave_arrays_as_they_lie(made: list[Executable]) -> None:
    """One kernel before attention and one after it: nothing is copied to lie otherwise."""
    torch.compile(heads, backend=flagos)(torch.randn(4, 6, device=FLAGOS))
    explanation = made[-1].artifact(Artifact.EXPLANATION).decode()
    assert explanation.count("[triton ") == 2, explanation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_over_nothing_read_nothing(dtype: torch.dtype, made: list[Executable]) -> None:
    """The gradients of an empty batch, its statistics included: arrays without elements have no memory, not even for
    what is broadcast."""
    norm = torch.ops.aten.native_group_norm
    compiled = torch.compile(lambda x, *affine: norm(x, *affine, 0, 2, 1, 1, 1e-5), backend=flagos)
    for _ in range(RUNS):
        arguments = [torch.randn(shape, dtype=dtype).to(FLAGOS).requires_grad_() for shape in ((0, 2), (2,), (2,))]
        results = compiled(*arguments)
        gradients = torch.autograd.grad(results, arguments, [torch.ones_like(result) for result in results])
        for gradient, argument in zip(gradients, arguments, strict=True):
            torch.testing.assert_close(gradient.cpu(), torch.zeros(argument.shape, dtype=dtype))
    # What is left of the sums has no elements itself.
    sums = [line for line in made[-1].artifact(Artifact.EXPLANATION).decode().splitlines() if " reduce(" in line]
    assert all("[0," in line.partition(" reduce(")[0] for line in sums), sums


def test_norms_and_activations_are_taken_apart() -> None:
    """All but the host's of 16 bits, in which its loops do not compute."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.gelu(functional.layer_norm(x, (6,), weight, bias)).log_softmax(-1))

    torch.manual_seed(0)
    for dtype, precision in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        given = [torch.randn(shape, dtype=dtype) for shape in ((4, 6), (6,), (6,))]
        gradient = torch.randn(4, 6, dtype=dtype)
        expected = [tensor.double().requires_grad_() for tensor in given]
        exact = function(*expected)
        exact.backward(gradient.double())
        for device in (FLAGOS, torch.device("cpu")):
            report.clear()
            torch.compiler.reset()
            arguments = [tensor.to(device).requires_grad_() for tensor in given]
            result = torch.compile(function, backend=flagos)(*arguments)
            result.backward(gradient.to(device))
            whole = set().union(*(each.whole for each in report.reports()))
            assert bool(whole) is (device.type == "cpu" and dtype is torch.bfloat16), whole
            torch.testing.assert_close(result.cpu().double(), exact, rtol=precision, atol=precision)
            for ours, theirs in zip(arguments, expected, strict=True):
                torch.testing.assert_close(
                    ours.grad.cpu().double(), theirs.grad, rtol=5 * precision, atol=5 * precision
                )


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_by_known_statistics_are_part_of_what_is_around(
    dtype: torch.dtype, parameters: torch.dtype, affine: bool, made: list[Executable]
) -> None:
    norm = nn.BatchNorm2d(5, affine=affine).eval()
    norm.running_mean, norm.running_var = torch.randn(5), torch.rand(5) + 0.1
    if affine:
        norm.weight.data, norm.bias.data = torch.randn(5), torch.randn(5)
    norm.to(parameters).requires_grad_(False)
    x = torch.randn(3, 5, 4, 2, dtype=dtype)
    expected = functional.relu(copy.deepcopy(norm).double()(x.double()))
    compiled = torch.compile(lambda x: functional.relu(norm(x)), backend=flagos)
    norm.to(FLAGOS)
    result = compiled(x.to(FLAGOS))
    assert result.dtype is dtype
    precision = {torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(dtype, 1e-10)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=precision, atol=precision)
    assert "batch_norm" not in made[-1].artifact(Artifact.EXPLANATION).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_rows_saves_a_few_numbers_of_each(dtype: torch.dtype, made: list[Executable]) -> None:
    """Its gradient is computed from the logits again, and nothing else as large is written."""
    given, labels = torch.randn(6, 50, dtype=dtype), torch.randint(50, (6,))
    expected = given.double().requires_grad_()
    exact = functional.cross_entropy(expected, labels)
    exact.backward()
    logits = given.to(FLAGOS).requires_grad_()
    compiled = torch.compile(lambda x, y: functional.cross_entropy(x.float(), y), backend=flagos)
    loss = compiled(logits, labels.to(FLAGOS))
    loss.backward()
    torch.testing.assert_close(loss.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.cpu().double(), expected.grad, rtol=1e-2, atol=1e-3)
    forward, backward = (executable.artifact(Artifact.EXPLANATION).decode() for executable in made)
    assert "[6,50]" not in forward, forward
    assert backward.count("[6,50]") == 1, backward
    assert "aten" not in forward + backward


def test_host_tensors_stay_on_the_host() -> None:
    compiled = torch.compile(softmax, backend=flagos)
    x = torch.randn(4, 6)
    assert compiled(x).device.type == "cpu"
    torch.testing.assert_close(compiled(x), softmax(x))


def test_training_on_the_device() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    theirs = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    theirs.load_state_dict(ours.state_dict())
    ours.to(FLAGOS)
    compiled = torch.compile(ours, backend=flagos)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (ours, theirs)]
    for _ in range(4):
        x, target = torch.randn(5, 6), torch.randint(0, 3, (5,))
        losses = [
            functional.cross_entropy(compiled(x.to(FLAGOS)), target.to(FLAGOS)),
            functional.cross_entropy(theirs(x), target),
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-4, atol=1e-5)
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), reference.grad, rtol=1e-4, atol=1e-5)


def test_a_scalar_of_the_host_and_a_result_for_it() -> None:
    def program(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * factor
        return y, y.sum().cpu()

    compiled = torch.compile(program, backend=flagos)
    x, factor = torch.randn(3), torch.tensor(2.5)
    on_device, on_host = compiled(x.to(FLAGOS), factor)
    assert (on_device.device.type, on_host.device.type) == ("flagos", "cpu")
    torch.testing.assert_close(on_device.cpu(), x * factor)
    torch.testing.assert_close(on_host, (x * factor).sum())


def test_dropout_follows_the_seed_of_the_device() -> None:
    compiled = torch.compile(lambda x: functional.dropout(x, 0.5), backend=flagos)
    x = torch.ones(200, device=FLAGOS)
    draws = []
    for _ in range(2):
        torch.flagos.manual_seed(7)
        draws.append([compiled(x).cpu() for _ in range(RUNS)])
    for first, second in zip(*draws, strict=True):
        torch.testing.assert_close(first, second)
    assert not torch.equal(draws[0][0], draws[0][1])


def test_calls_back_into_pytorch_see_the_device() -> None:
    seen = []

    @torch.library.custom_op("flagos_tests::doubled_there", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return x * 2

    doubled.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: doubled(x + 1) - 1, backend=flagos)
    x = torch.randn(5)
    torch.testing.assert_close(compiled(x.to(FLAGOS)).cpu(), (x + 1) * 2 - 1)
    assert seen == ["flagos"]


def test_outputs_outlive_the_program() -> None:
    compiled = torch.compile(product, backend=flagos)
    x = torch.randn(4, 6)
    result = compiled(x.to(FLAGOS))
    torch.compiler.reset()
    torch.testing.assert_close(result.cpu(), product(x))


def test_a_tensor_of_a_device_that_nobody_drives_is_refused() -> None:
    from flagos_backend.frontends.torch.compile.placement import is_supported

    assert not is_supported(torch.device("meta"))
    assert not is_supported(torch.device("cuda:0"))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_bytes(transposed: bool) -> None:
    x, y = (
        torch.randint(-128, 128, dims, dtype=torch.int8) for dims in ((20, 48), (40, 48) if transposed else (48, 40))
    )
    compiled = torch.compile(lambda x, y: torch._int_mm(x, y.t() if transposed else y) + 1, backend=flagos)
    for _ in range(RUNS):
        found = compiled(x.to(FLAGOS), y.to(FLAGOS)).cpu()
        assert torch.equal(found, x.int() @ (y.t() if transposed else y).int() + 1)
