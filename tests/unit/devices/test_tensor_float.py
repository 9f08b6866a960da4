"""torch's switches for TF32: what products and convolutions find while several threads have them computed, and what is
left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flagos_backend.devices import tensor_float
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels import choice
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Run
from support.against_xla import hlo_of_text

CUDA = Target("cuda", vendor="nvidia", architecture="sm_90")
_get, _set = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


def matmul_is_on() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def convolution_is_on() -> bool:
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def begin() -> None:
    """As torch does."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for backend, operation in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        _set(backend, operation, "none")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # PyTorch's own test utilities, which tests of this process may have imported, forbid what users may do.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    begin()
    yield
    begin()


def seen() -> tuple[object, ...]:
    """Every setting by its new name, and by the old ones; None where torch says that they do not agree."""
    old: list[object] = []
    questions: tuple[Callable[[], object], ...] = (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cudnn.allow_tf32,
    )
    for question in questions:
        try:
            old.append(question())
        except RuntimeError:
            old.append(None)
    names = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"))
    return *old, *(_get(*name) for name in names)


def by_new_name(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def for_all_of_cuda(value: str) -> None:
    torch.backends.cudnn.fp32_precision = value


SETTINGS: dict[str, Callable[[], None]] = {
    "as it begins": lambda: None,
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: torch._C._set_cublas_allow_tf32(True),
    "tf32 by its new name": lambda: by_new_name("tf32"),
    "ieee by its new name": lambda: by_new_name("ieee"),
    "tf32 for all of CUDA": lambda: for_all_of_cuda("tf32"),
    "ieee for all of CUDA": lambda: for_all_of_cuda("ieee"),
    "both names": lambda: (torch.set_float32_matmul_precision("high"), by_new_name("ieee"))[0],
}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_products_find_what_they_ask_for_and_leave_what_was(name: str, allowed: bool) -> None:
    SETTINGS[name]()
    before = seen()
    with tensor_float.products(allowed):
        assert matmul_is_on() is allowed
        if before[0] is not None:  # who asks by an old name is told, and nothing is raised
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert seen() == before


@pytest.mark.parametrize("later", ["tf32", "ieee"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_follows_another_one_still_does(name: str, later: str) -> None:
    def found(between: Callable[[], None]) -> bool:
        begin()
        SETTINGS[name]()
        between()
        for_all_of_cuda(later)
        return matmul_is_on()

    def products() -> None:
        for allowed in (True, False):
            with tensor_float.products(allowed):
                pass

    assert found(products) is found(lambda: None)


@pytest.mark.parametrize("name", SETTINGS)
def test_convolutions_are_exact_inside(name: str) -> None:
    SETTINGS[name]()
    before = seen()
    with tensor_float.exact_convolutions():
        assert not convolution_is_on() and not matmul_is_on()
    assert seen() == before


def test_a_failure_puts_it_back() -> None:
    with pytest.raises(ValueError, match="of the product"), tensor_float.products(True):
        raise ValueError("of the product")
    assert not matmul_is_on()


def test_one_inside_another_of_the_same_thread() -> None:
    with tensor_float.products(True):
        with tensor_float.products(False):
            assert not matmul_is_on()
        assert matmul_is_on()
    assert not matmul_is_on()


# ---- Kernels in several threads


PRODUCT = """ENTRY main {{ x = f32[4,4] parameter(0)
  ROOT y = f32[4,4] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{precision} }}"""
COMPLEX = PRODUCT.replace("f32", "c64")
CONVOLUTION = """ENTRY main {{ x = f32[1,4,9,1] parameter(0)
  w = f32[2,2,1,3] parameter(1)
  ROOT y = f32[1,3,8,3] convolution(x, w), window={{size=2x2}}, dim_labels=b01f_01io->b01f{precision} }}"""
GRADIENT = """ENTRY main {{ x = f32[8,64,64,8] parameter(0)
  g = f32[8,64,64,16] parameter(1)
  ROOT w = f32[3,3,8,16] convolution(x, g), window={{size=64x64 pad=1_1x1_1}},
    dim_labels=f01b_i01o->01bf{precision} }}"""
SOLVE = """ENTRY main {{ x = f32[4,4] parameter(0)
  ROOT y = f32[4,4] triangular-solve(x, x), left_side=true, lower=true, transpose_a=NO_TRANSPOSE{precision} }}"""
EXACT = ", operand_precision={highest,highest}"


class Watched:
    """Stands for a function of ATen's: notes what the switch is when it begins and when it ends. Other threads come in
    between, and end before a thread of a higher number does."""

    def __init__(self, function: Callable[..., Any], is_on: Callable[[], bool], meet: Callable[[], None]) -> None:
        self._function, self._is_on, self._meet = function, is_on, meet
        self.notes: dict[str, set[bool]] = {}  # by the thread's name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name = threading.current_thread().name
        notes = self.notes.setdefault(name, set())
        notes.add(self._is_on())
        self._meet()
        time.sleep(0.003 * int(name))
        notes.add(self._is_on())
        return self._function(*arguments, **keywords)


def kernel_of(
    text: str, precision: str, provider: Provider = Provider.VENDOR
) -> tuple[Callable[..., Any], Instruction]:
    module = import_module(hlo_of_text(text.format(precision=precision)))
    (instruction,) = (i for i in module.entry.instructions if i.opcode not in (Opcode.PARAMETER, Opcode.CONSTANT))
    offers = choice.implementations_of(str(instruction.opcode))
    (offer,) = (offer for offer in offers if offer.provider is provider and not offer.unsupported(instruction, CUDA))
    return offer.variants(instruction, CUDA)[0].kernel, instruction


def in_threads(*kernels: tuple[Callable[..., Any], Instruction], rounds: int = 5) -> None:
    """Calls each of ``kernels`` several times in a thread of its own, named by its number."""
    failures: list[BaseException] = []

    def work(kernel: Callable[..., Any], instruction: Instruction) -> None:
        try:
            for _ in range(rounds):
                kernel(Run(), *arguments_of(instruction))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=pair, name=str(number)) for number, pair in enumerate(kernels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def rendezvous(parties: int) -> Callable[[], None]:
    """A place to meet the other threads for whom nothing stands in the way; a moment later those who came go on."""
    barrier = threading.Barrier(parties)

    def meet() -> None:
        try:
            barrier.wait(0.05)
        except threading.BrokenBarrierError:
            barrier.reset()

    return meet


def arguments_of(instruction: Instruction) -> list[torch.Tensor]:
    dtype = torch.complex64 if "c64" in str(instruction.shape) else torch.float32
    return [torch.ones(operand.shape.dims, dtype=dtype) for operand in instruction.operands]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "precision"),
    [(PRODUCT, EXACT), (COMPLEX, ""), (SOLVE, "")],
    ids=["exact product", "complex product", "solve"],
)
def test_products_keep_their_precision_beside_rounded_ones(
    monkeypatch: pytest.MonkeyPatch, text: str, precision: str
) -> None:
    meet = rendezvous(2)
    multiply = Watched(torch.matmul, matmul_is_on, meet)
    solve = Watched(torch.linalg.solve_triangular, matmul_is_on, meet)
    monkeypatch.setattr(torch, "matmul", multiply)
    monkeypatch.setattr(torch.linalg, "solve_triangular", solve)
    before = seen()
    in_threads(kernel_of(PRODUCT, ""), kernel_of(text, precision))
    assert multiply.notes | solve.notes == {"0": {True}, "1": {False}}
    assert seen() == before


def test_gradients_of_weights_keep_their_precision_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Watched(torch.ops.aten.convolution_backward, convolution_is_on, rendezvous(2))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", backward)
    before = seen()
    in_threads(kernel_of(GRADIENT, EXACT), kernel_of(GRADIENT, EXACT))
    assert backward.notes == {"0": {False}, "1": {False}}
    assert seen() == before


def test_convolutions_are_told_and_turn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, bool]] = []
    convolve = torch.ops.aten._convolution

    def watched(*arguments: Any) -> Any:
        told.append((arguments[-1], convolution_is_on()))
        return convolve(*arguments)

    monkeypatch.setattr(torch.ops.aten, "_convolution", watched)
    kernel, instruction = kernel_of(CONVOLUTION, EXACT)
    arguments = [torch.randn_like(argument) for argument in arguments_of(instruction)]
    found = kernel(Run(), *arguments)
    assert told == [(False, True)]
    torch.testing.assert_close(found, registry.prepare(instruction)(Run(), *arguments))
