"""Layouts: which row-major array fills a tensor's memory, and how the tensor is a permutation of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from flagos_backend.torch.compile.layout import contiguous_strides, layout_of


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
