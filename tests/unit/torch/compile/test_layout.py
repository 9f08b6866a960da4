"""Layouts: which row-major array fills a tensor's memory, and how the tensor is a permutation of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from flagos_backend.frontends.torch.compile.layout import Strided, contiguous_strides, input_layout_of, layout_of


@pytest.mark.parametrize("sizes", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 4), (1, 1), (2, 0, 3)], ids=str)
def test_every_permutation_of_a_dense_tensor(sizes: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(sizes))):
        tensor = torch.randn(sizes).permute(order)
        layout = layout_of(tensor.shape, tensor.stride())
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        assert torch.equal(flat.reshape(layout.physical).permute(layout.inverse), tensor)
        assert torch.equal(tensor.permute(layout.order).reshape(-1), flat)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6)[:, :3], torch.zeros(3, 1).expand(3, 4)],
    ids=["strided", "narrow", "expanded"],
)
def test_what_is_not_dense_is_laid_out_as_its_copy(tensor: torch.Tensor) -> None:
    layout = layout_of(tensor.shape, tensor.stride())
    assert layout.is_row_major
    assert layout.strides == tensor.contiguous().stride() == contiguous_strides(tensor.shape)


def test_channels_last() -> None:
    tensor = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = layout_of(tensor.shape, tensor.stride())
    assert layout.physical == (2, 4, 5, 3)
    assert layout.order == (0, 2, 3, 1)


@pytest.mark.parametrize(
    ("sizes", "strides", "physical", "overlaps"),
    [
        ((4, 3), (8, 1), (27,), False),  # columns
        ((3, 4), (1, 8), (27,), False),
        ((4, 3), (0, 1), (3,), True),  # a row, repeated
        ((4, 3), (0, 0), (), True),
        ((4, 3), (2, 0), (7,), True),
        ((5, 4), (2, 1), (12,), True),  # windows
        ((5, 1), (2, 7), (9,), False),
        ((2, 3, 4), (0, 1, 3), (4, 3), True),  # dense but for what repeats
    ],
)
def test_inputs_as_they_are(
    sizes: tuple[int, ...], strides: tuple[int, ...], physical: tuple[int, ...], overlaps: bool
) -> None:
    layout = input_layout_of(sizes, strides)
    assert isinstance(layout, Strided)
    assert (layout.physical, layout.overlaps) == (physical, overlaps)


@pytest.mark.parametrize("strides", [(3, 1), (1, 4)])
def test_dense_inputs_are_row_major_arrays_and_permutations(strides: tuple[int, ...]) -> None:
    assert input_layout_of((4, 3), strides) == layout_of((4, 3), strides)
    assert input_layout_of((0, 3), (17, 5)) == layout_of((0, 3), (17, 5))
