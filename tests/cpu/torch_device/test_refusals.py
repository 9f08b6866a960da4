"""What is refused: in PyTorch's words, naming operator and reason, and the process lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SEVERAL = r"Expected all tensors to be on the same device, but found at least two devices, flagos:0 and cpu!"
D = "flagos"

MIXED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(3, device=D) + torch.ones(3), "other in method aten::add.Tensor"),
    (lambda: torch.mm(torch.ones(3, 3), torch.ones(3, 3, device=D)), "self in method aten::mm"),
    (lambda: torch.cat([torch.ones(3, device=D), torch.ones(3)]), "tensors in method aten::cat"),
    (lambda: torch.ones(3, device=D).add_(torch.ones(3)), "other in method aten::add_.Tensor"),
    (lambda: torch.tensor(1.0).add_(torch.tensor(1.0, device=D)), "self in method aten::add_.Tensor"),
    (lambda: torch.add(torch.ones(3, device=D), 1, out=torch.empty(3)), "out in method aten::add.out"),
    (
        lambda: torch.unbind_copy(torch.ones(1, device=D), out=[torch.empty(())]),
        "out in method aten::unbind_copy.int_out",
    ),
    (lambda: torch.ones(3)[torch.tensor([0], device=D)], "self in method aten::index.Tensor"),
    (lambda: torch.nn.functional.linear(torch.ones(1, 3, device=D), torch.ones(2, 3)), "method aten::"),
]


@pytest.mark.parametrize(("call", "place"), MIXED)
def test_operands_on_several_devices(call: Callable[[], Any], place: str) -> None:
    with pytest.raises(RuntimeError, match=SEVERAL) as caught:
        call()
    assert place in str(caught.value)


def test_a_scalar_of_the_host_goes_with_any_device() -> None:
    assert (torch.ones(3, device=D) * torch.tensor(2.0)).tolist() == [2.0] * 3


LAYOUTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(3, device=D).to_sparse(), "_to_sparse"),
    (lambda: torch.ones(3, 3, device=D).to_sparse_csr(), "_to_sparse_csr"),
    (lambda: torch.sparse_coo_tensor([[0]], [1.0], (3,), device=D), "sparse"),
    (lambda: torch.ones(3).to_sparse().to(D), "sparse"),
    (lambda: torch.ones(3, 3, device=D).to_mkldnn(), "to_mkldnn"),
    (lambda: torch.quantize_per_tensor(torch.ones(3, device=D), 0.1, 0, torch.qint8), "quantize_per_tensor"),
    (lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device=D), "sparse_compressed_tensor"),
    (lambda: torch.eye(2).to_sparse_csr().to(D), "_sparse_compressed_tensor"),
    (lambda: torch.nested.nested_tensor([torch.ones(2, device=D)]), "_nested_tensor_from_tensor_list"),
    # PyTorch would end the process.
    (
        lambda: torch.nested.as_nested_tensor([torch.ones(2, device=D, requires_grad=True)]),
        "_nested_tensor_from_tensor_list",
    ),
]


@pytest.mark.parametrize(("call", "operator"), LAYOUTS)
def test_other_layouts(call: Callable[[], Any], operator: str) -> None:
    with pytest.raises(NotImplementedError, match="not available on device 'flagos'") as caught:
        call()
    assert operator in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2, device="flagos:1"),
        lambda: torch.ones(2).to("flagos:7"),
        lambda: torch.flagos.set_device(1),
        lambda: torch.flagos.synchronize("flagos:2"),
    ],
)
def test_a_device_that_is_not_there(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        call()


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: torch.ones(2, 3, device=D) @ torch.ones(2, 3, device=D), RuntimeError, "cannot be multiplied"),
    (lambda: torch.ones(2, device=D) + torch.ones(3, device=D), RuntimeError, "must match the size of tensor b"),
    (lambda: torch.ones(2, device=D).view(3), RuntimeError, "shape '\\[3\\]' is invalid"),
    (lambda: torch.ones(2, device=D)[5], IndexError, "out of bounds"),
    (lambda: torch.ones(2, device=D).numpy(), TypeError, "can't convert flagos:0 device type tensor to numpy"),
    (lambda: torch.linalg.cholesky(-torch.eye(3, device=D)), torch.linalg.LinAlgError, "not positive-definite"),
    (
        lambda: torch.ones(2, device=D, dtype=torch.int64).uniform_(),
        RuntimeError,
        "floating|not implemented",
    ),
    (lambda: torch.empty(2, device=D, pin_memory=True), RuntimeError, "^Only dense CPU tensors can be pinned"),
    (lambda: torch.ones(2, device=D).new_zeros(2, pin_memory=True), RuntimeError, "^Only dense CPU tensors can be"),
    (lambda: torch.rand_like(torch.ones(2, device=D), pin_memory=True), RuntimeError, "^Only dense CPU tensors can be"),
    (lambda: torch.ones(2, device=D).pin_memory(), RuntimeError, "only dense CPU tensors can be pinned"),
    (lambda: torch.empty(2, pin_memory=True), RuntimeError, "getPinnedMemoryAllocator"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_arguments_that_do_not_fit(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
    assert torch.ones(2, device=D).sum().item() == 2
