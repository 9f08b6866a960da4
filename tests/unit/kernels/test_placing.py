"""Results of operators that allocate them themselves, made where they are wanted."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.kernels.vendor.placing import call_into

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
# What kernels of these allocate is what the functions below say.
LIBRARY = torch.library.Library("flagos_test_placing", "DEF")
LIBRARY.define("swapped(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("shadowed(Tensor x) -> Tensor")
LIBRARY.define("nested(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("zeros(Tensor x) -> Tensor")


def _swapped(x):
    second, first = torch.empty_like(x), torch.empty_like(x)
    return first.copy_(x + 1), second.copy_(x + 2)


def _shadowed(x):
    temporary = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x).mul_(3)
    return torch.empty_like(x).copy_(temporary).add_(1)


LIBRARY.impl("swapped", _swapped, "CPU")
LIBRARY.impl("shadowed", _shadowed, "CPU")
LIBRARY.impl("nested", lambda x: torch.ops.flagos_test_placing.swapped(x * 2)[::-1], "CPU")
LIBRARY.impl("zeros", lambda x: torch.zeros(x.shape, dtype=x.dtype).add_(x), "CPU")
ops = torch.ops.flagos_test_placing


class _Copies(TorchDispatchMode):
    """The arrays that are copied into while it is entered, but for what a kernel does."""

    def __init__(self):
        super().__init__()
        self.into = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.copy_.default:
            self.into.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def filled(like, dtype=None):
    return torch.full_like(like, float("nan"), dtype=dtype)


@pytest.fixture
def queries(rng):
    return [torch.from_numpy(rng.standard_normal((2, 7, 3, 8))).transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize("inference", [False, True])
def test_are_made_there(queries, inference):
    with torch.inference_mode(inference):
        output, statistics = ATTENTION(*queries, 0.0, True)
        places = [filled(output), filled(statistics)]
        with _Copies() as copies:
            results = call_into(ATTENTION, places, *queries, 0.0, True)
    assert all(result is place for result, place in zip(results, places, strict=True))
    assert not copies.into
    assert torch.equal(places[0], output)
    assert torch.equal(places[1], statistics)


def test_nowhere(queries):
    output, statistics = ATTENTION(*queries, 0.0, True)
    place = filled(output)
    results = call_into(ATTENTION, [None, None], *queries, 0.0, True)
    assert torch.equal(results[0], output)
    results = call_into(ATTENTION, [place, None], *queries, 0.0, True)
    assert results[0] is place
    assert torch.equal(place, output)
    assert torch.equal(results[1], statistics)


@pytest.mark.parametrize("how", ["order", "type"])
def test_laid_out_otherwise(queries, how):
    output, _ = ATTENTION(*queries, 0.0, True)
    place = filled(output.contiguous()) if how == "order" else filled(output, torch.float32)
    with _Copies() as copies:
        assert call_into(ATTENTION, [place, None], *queries, 0.0, True)[0] is place
    assert copies.into == [place.data_ptr()]
    assert torch.equal(place, output.to(place.dtype))


def test_each_made_where_the_other_is_wanted(rng):
    x = torch.from_numpy(rng.standard_normal((3, 4)))
    first, second = call_into(ops.swapped.default, [filled(x), filled(x)], x)
    assert torch.equal(first, x + 1)
    assert torch.equal(second, x + 2)


def test_something_else_made_there_first(rng):
    x = torch.from_numpy(rng.standard_normal((3, 4)))
    place = filled(x)
    (result,) = call_into(ops.shadowed.default, [place], x)
    assert result is place
    assert torch.equal(place, x * 3 + 1)


def test_made_by_another_operator(rng):
    x = torch.from_numpy(rng.standard_normal((3, 4)))
    places = [filled(x), filled(x)]
    with _Copies() as copies:
        call_into(ops.nested.default, places, x, through={ops.swapped.default})
        passed = len(copies.into)
        call_into(ops.nested.default, others := [filled(x), filled(x)], x)
    for first, second in (places, others):
        assert torch.equal(first, x * 2 + 2)
        assert torch.equal(second, x * 2 + 1)
    # Those of the kernel, and none after it; then, without looking into it, two after it.
    assert sorted(copies.into[:passed]) == sorted(place.data_ptr() for place in places)
    assert len(copies.into) == 2 * passed


def test_what_is_allocated_with_zeros_is_not_there(rng):
    x = torch.from_numpy(rng.standard_normal((3, 4)))
    place = filled(x)
    call_into(ops.zeros.default, [place], x)
    assert torch.equal(place, x)
