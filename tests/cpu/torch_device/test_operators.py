"""Operators: values, sizes and memory are those of the host."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def same(actual: Tensor, expected: Tensor) -> None:
    """On the device, and equal to a tensor of the host in values, dtype, sizes and strides."""
    assert actual.device.type == "flagos"
    assert_close(actual.cpu(), expected, equal_nan=True, check_stride=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 3), (2, 0, 3)], ids=str)
def test_every_dtype_travels(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    host = (torch.rand(shape) * 4).to(dtype)
    there = host.to(device)
    assert there.dtype is dtype
    assert there.shape == host.shape
    assert_close(there.cpu(), host, rtol=0, atol=0)


FACTORIES: list[Callable[..., Tensor]] = [
    lambda **o: torch.zeros(2, 3, **o),
    lambda **o: torch.ones((), **o),
    lambda **o: torch.full((2,), 1.5, **o),
    lambda **o: torch.arange(2, 9, 3, **o),
    lambda **o: torch.linspace(0, 1, 5, **o),
    lambda **o: torch.eye(3, **o),
    lambda **o: torch.tensor([[1, 2], [3, 4]], **o),
    lambda **o: torch.tril_indices(3, 3, **o),
    lambda **o: torch.hann_window(5, **o),
    lambda **o: torch.zeros_like(torch.ones(2, 3).t(), **o),
    lambda **o: torch.as_tensor([1.0, 2.0], **o),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_factories(device: torch.device, factory: Callable[..., Tensor]) -> None:
    same(factory(device=device), factory())


def test_the_default_device() -> None:
    torch.set_default_device("flagos")
    try:
        assert torch.ones(2).device.type == "flagos"
        with torch.device("cpu"):
            assert torch.ones(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)


NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 2,
    lambda x: 5 - x,
    lambda x: x % 2,
    lambda x: 2**x,
    lambda x: x**2,
    lambda x: 1 / x,
    lambda x: torch.copysign(x, -1),
    lambda x: torch.where(x > 1, x, 0.5),
    lambda x: torch.clamp(x, 0.2, 0.9),
    lambda x: x.masked_fill(x > 1, float("nan")),
    lambda x: torch.fmod(x, 1.5),
    lambda x: torch.logical_and(x, torch.tensor(1.0)),
]


@pytest.mark.parametrize("function", NUMBERS)
def test_numbers_beside_tensors(device: torch.device, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(4) + 0.5
    same(function(x.to(device)), function(x))


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[1],
    lambda x: x[:, 1:],
    lambda x: x.t(),
    lambda x: x.view(4, 3),
    lambda x: x.unfold(1, 2, 1),
    lambda x: x.diagonal(),
    lambda x: x[1:].as_strided((2, 2), (1, 3), 2),
    lambda x: x.unsqueeze(0).expand(2, 3, 4)[1],
    lambda x: x.view(torch.int32).view(torch.float32),
    lambda x: torch.split(x, 2, 1)[1],
    lambda x: x.reshape(-1)[2:].detach(),
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_share_memory(device: torch.device, view: Callable[[Tensor], Tensor]) -> None:
    host = torch.arange(12.0).view(3, 4)
    there = host.to(device)
    seen, expected = view(there), view(host)
    assert seen.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert (seen.stride(), seen.storage_offset()) == (expected.stride(), expected.storage_offset())
    seen.mul_(3), expected.mul_(3)
    same(there, host)


def test_views_change_in_place(device: torch.device) -> None:
    x = torch.arange(6.0, device=device).view(2, 3)
    assert x.t_().shape == (3, 2)
    assert x.unsqueeze_(0).squeeze_(0).transpose_(0, 1).shape == (2, 3)
    same(x, torch.arange(6.0).view(2, 3))


def test_outputs_are_resized_as_on_the_host(device: torch.device) -> None:
    for size in (0, 2, 3, 7):
        out = torch.empty(size, device=device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.add(torch.ones(3, device=device), 1, out=out) is out
        same(out, torch.full((3,), 2.0))
        assert ("An output with one or more elements was resized" in "".join(str(w.message) for w in caught)) == (
            size not in (0, 3)
        )


def test_several_outputs(device: torch.device) -> None:
    x = torch.rand(2, 3)
    values, indices = torch.empty(0, device=device), torch.empty(5, dtype=torch.int64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.max(x.to(device), 1, out=(values, indices))
    same(values, x.max(1).values)
    same(indices, x.max(1).indices)


def _cat_into_an_operand(x: Tensor) -> Tensor:
    nothing = x.new_empty(0)
    return torch.cat((nothing, x), out=nothing)


def _gather_into_indices(indices: Tensor) -> Tensor:
    return torch.gather(indices.clone(), 0, indices[1:], out=indices[:1])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "call",
    [
        _cat_into_an_operand,
        lambda x: torch.cat((x, x[2:]), out=x[:1]),
        lambda x: _gather_into_indices(torch.arange(3, device=x.device)),
    ],
)
def test_outputs_that_meet_an_operand_when_they_have_grown(
    device: torch.device, call: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        call(x.clone())
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        call(x.to(device))


@pytest.mark.parametrize("output", [slice(7, 7), slice(0, 0), slice(8, 9)], ids=str)
def test_outputs_that_grow_in_an_operand_s_storage(device: torch.device, output: slice) -> None:
    """Where PyTorch does not refuse it, the host may read what it has just written."""
    x = torch.randn(10, dtype=torch.complex64)
    there = x.to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(torch.mul(there[:3].conj(), there[1:4], out=there[output]), x[:3].conj() * x[1:4])
        same(torch.sum(there[:6], 0, keepdim=True, out=there[output]), x[:6].sum(0, keepdim=True))
    assert any("was resized" in str(w.message) for w in caught) == (output.stop > output.start)


@pytest.mark.parametrize("of_caller", [False, True])
def test_outputs_that_do_not_fit_are_drawn_by_the_device_s_generator(device: torch.device, of_caller: bool) -> None:
    shares, host = torch.rand(9), torch.get_rng_state()
    generator = torch.Generator(device).manual_seed(7) if of_caller else None
    torch.flagos.manual_seed(8 if of_caller else 7)
    out = torch.empty(0, dtype=torch.int64, device=device)
    torch.multinomial(shares.to(device), 6, generator=generator, out=out)
    same(out, torch.multinomial(shares, 6, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(host, torch.get_rng_state())


def test_what_a_copy_of_a_part_refuses(device: torch.device) -> None:
    """In the words of PyTorch's accelerators."""
    x = torch.arange(12.0).view(3, 4)
    same(torch.narrow_copy(x.to(device), 1, 1, 2), x[:, 1:3].contiguous())
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.narrow_copy(x.to(device), 2, 0, 0)


def test_lists_of_outputs_that_do_not_fit(device: torch.device) -> None:
    x = torch.randn(5, 2)
    outputs = [torch.empty(0, device=device) for _ in range(2)]
    assert torch.split_with_sizes_copy(x.to(device), [2, 3], out=outputs) is None
    for output, part in zip(outputs, x.split_with_sizes([2, 3]), strict=True):
        same(output, part)


def test_outputs_that_do_not_fit_beside_statistics_that_are_written(device: torch.device) -> None:
    x, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    there = [t.to(device) for t in (mean, variance)]
    outputs = [torch.empty(0, device=device) for _ in range(3)]
    function = torch.ops.aten._native_batch_norm_legit
    function.out(
        x.to(device), None, None, *there, True, 0.5, 1e-5, out=outputs[0], save_mean=outputs[1], save_invstd=outputs[2]
    )
    expected = function(x, None, None, mean, variance, True, 0.5, 1e-5)
    for actual, value in zip((*outputs, *there), (*expected, mean, variance), strict=True):
        same(actual, value)


def test_resizing_keeps_what_fits(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    x.resize_(8)
    same(x[:4], torch.arange(4.0))
    x.resize_(2)
    same(x, torch.arange(2.0))
    x.resize_(0).resize_(2, 2)
    assert x.shape == (2, 2)
    x.resize_as_(torch.ones(5, device=device))
    assert x.shape == (5,)
    x.set_(torch.ones(2, device=device))
    same(x, torch.ones(2))
    assert x.set_().shape == (0,)


def test_lazy_conjugation_and_negation(device: torch.device) -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    there = x.to(device)
    same(there.conj().resolve_conj(), x.conj().resolve_conj())
    assert_close(there.conj().cpu(), x.conj())
    same(there.conj() + 1, x.conj() + 1)
    same(there.mH @ there, x.mH @ x)
    same(there.conj().imag.clone(), x.conj().imag.clone())
    for source, target in ((there.conj(), torch.empty_like(there)), (there, torch.empty_like(there).conj())):
        target.copy_(source)
        assert_close(target.cpu(), source.cpu())


def test_indices_may_be_on_the_host(device: torch.device) -> None:
    x = torch.arange(6.0).view(2, 3)
    there = x.to(device)
    same(there[:, torch.tensor([2, 0])], x[:, torch.tensor([2, 0])])
    there[torch.tensor([1])] = 5.0
    there[0, 1] = torch.tensor(7.0)
    x[1], x[0, 1] = 5.0, 7.0
    same(there, x)


def test_packed_sequences(device: torch.device) -> None:
    x, lengths = torch.rand(4, 2, 3), torch.tensor([4, 2])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x.to(device), lengths)
    assert packed.batch_sizes.device.type == "cpu"
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(packed)
    same(padded, torch.nn.utils.rnn.pad_packed_sequence(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))[0])


def test_modes_see_an_operator_once(device: torch.device) -> None:
    class Count(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device=device)
    with Count():
        torch.add(x, x)
    assert Count.seen == 1


def test_operators_of_other_libraries_use_the_host_kernel(device: torch.device) -> None:
    library = torch.library.Library("flagos_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    same(torch.ops.flagos_test.twice(torch.ones(3, device=device)), torch.full((3,), 2.0))
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"flagos_test::nowhere is not available on device 'flagos'"):
        torch.ops.flagos_test.nowhere(torch.ones(3, device=device))


def test_memory_is_given_back(device: torch.device) -> None:
    gc.collect()
    before = torch.flagos.memory_allocated()
    x = torch.ones(1000, device=device)
    views = [x[1:], x.view(10, 100).t()]
    x.add_(1)
    assert torch.flagos.memory_allocated() == before + 4000
    del x
    assert torch.flagos.memory_allocated() == before + 4000
    del views
    assert torch.flagos.memory_allocated() == before


HISTOGRAMS = [(4, 0, 3), (5, -2, 7), (3, 0, 0), (1, 2, 2)]


@pytest.mark.parametrize(("bins", "low", "high"), HISTOGRAMS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32], ids=str)
def test_histograms_of_integers_too(device: torch.device, dtype: torch.dtype, bins: int, low: int, high: int) -> None:
    """Which the host's operator refuses; its counts of the same numbers as floats are the oracle."""
    values = torch.randint(0, 9, (2, 30))
    expected = torch.histc(values.double(), bins, low, high)
    same(torch.histc(values.to(dtype).to(device), bins, low, high), expected.to(dtype))
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(values.to(dtype).to(device), 3, 2, 1)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
def test_results_that_the_host_conjugates_lazily(device: torch.device, left: bool, adjoint: bool) -> None:
    factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex128))
    b = torch.randn(3, 3, dtype=torch.complex128)
    options = {"left": left, "adjoint": adjoint}
    expected = torch.linalg.lu_solve(factors, pivots, b, **options)
    actual = torch.linalg.lu_solve(factors.to(device), pivots.to(device), b.to(device), **options)
    assert_close(actual.cpu(), expected.resolve_conj())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: torch.add(x[1:], 1, out=x[:-1]),
        lambda x: torch.gather(x, 0, torch.zeros(8, dtype=torch.int64, device=x.device), out=x),
        lambda x: torch.cat([x[:4], x[4:]], out=x),
        lambda x: torch.add(x.view(2, 4)[:, 1:], 1, out=x.view(2, 4)[:, :3]),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.mul_(x),
        lambda x: x.view(2, 4)[:, 1:3].add_(x.view(2, 4)[:, ::3]),
        lambda x: torch.view_as_complex(x.view(4, 2)).conj().add_(torch.view_as_complex(x.view(4, 2))[1]),
    ],
)
def test_memory_in_common_with_what_is_written(device: torch.device, call: Callable[[Tensor], Tensor]) -> None:
    outcomes = []
    for x in (torch.arange(8.0), torch.arange(8.0, device=device)):
        try:
            outcomes.append((call(x).resolve_conj().tolist(), x.tolist()))
        except RuntimeError as error:
            outcomes.append((str(error).splitlines()[0], x.tolist()))
    assert outcomes[0] == outcomes[1]
