"""Custom calls aten::*: the operator on the operands, and every way in which a program can get one wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from flagos_backend.errors import AtenCallFailed, MalformedProgram, UnknownCustomCall, UnsupportedAttribute
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.torch_dtypes import TORCH_DTYPE
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape
from flagos_backend.kernels.reference.aten import drops_out, prepare_into, prepare_operator
from flagos_backend.kernels.reference.registry import Kernel, Run, prepare

E = ElementType
VECTOR = ArrayShape(E.F32, (4,))


def instruction(target: str, operands: list[Shape], shape: Shape, **config: Any) -> Instruction:
    given = {"arguments": [{"tensor": 0}], "keywords": {}, "results": None, **config}
    parameters = tuple(Instruction(Opcode.PARAMETER, operand, name="x") for operand in operands)
    attributes = CustomCallAttributes(target, json.dumps(given).encode())
    return Instruction(Opcode.CUSTOM_CALL, shape, parameters, attributes, name="call")


def call(target: str, operands: list[Shape], shape: Shape, **config: Any) -> Kernel:
    return prepare(instruction(target, operands, shape, **config))


def test_tensors_lists_numbers_and_names() -> None:
    x, y = torch.randn(4), torch.randn(4)
    add = call(
        "aten::add.Tensor", [VECTOR, VECTOR], VECTOR, arguments=[{"tensor": 0}, {"tensor": 1}], keywords={"alpha": 3}
    )
    assert torch.equal(add(Run(), x, y), torch.add(x, y, alpha=3))
    both = [[{"tensor": 0}, {"tensor": 1}], 0]
    cat = call("aten::cat.default", [VECTOR, VECTOR], ArrayShape(E.F32, (8,)), arguments=both)
    assert torch.equal(cat(Run(), x, y), torch.cat([x, y]))
    full = call(
        "aten::full.default", [], VECTOR, arguments=[[4], {"float": "-inf"}], keywords={"device": {"device": "here"}}
    )
    assert torch.equal(full(Run()), torch.full((4,), float("-inf")))
    copy = call("aten::_to_copy.default", [VECTOR], ArrayShape(E.F64, (4,)), keywords={"dtype": {"dtype": "float64"}})
    assert torch.equal(copy(Run(), x), x.double())


def test_chosen_results() -> None:
    x = torch.randn(4)
    top = call(
        "aten::topk.default",
        [VECTOR],
        TupleShape((ArrayShape(E.S64, (2,)),)),
        arguments=[{"tensor": 0}, 2],
        results=[1],
    )
    (indices,) = top(Run(), x)
    assert torch.equal(indices, x.topk(2).indices)


def test_unsigned_integers_are_seen_as_such() -> None:
    shape = ArrayShape(E.U16, (3,))
    stored = torch.tensor([1, -1, 5], dtype=torch.int16)
    same = call("aten::_to_copy.default", [shape], ArrayShape(E.S64, (3,)), keywords={"dtype": {"dtype": "int64"}})
    assert same(Run(), stored).tolist() == [1, 65535, 5]
    back = call("aten::clone.default", [shape], shape)
    assert torch.equal(back(Run(), stored), stored)


def test_bits_of_complex32_are_seen_as_such() -> None:
    x = torch.tensor([1 + 2j, -3.5j], dtype=torch.complex32)
    bits = ArrayShape(E.U32, (2,))
    argument = {"tensor": 0, "dtype": "complex32"}
    conjugate = call("aten::_conj_physical.default", [bits], bits, arguments=[argument], dtypes=["complex32"])
    assert conjugate(Run(), x.view(torch.int32)).view(torch.complex32).tolist() == [1 - 2j, 3.5j]
    marked = call("aten::_conj.default", [bits], bits, arguments=[argument], dtypes=["complex32"])
    assert marked(Run(), x.view(torch.int32)).view(torch.complex32).tolist() == [1 - 2j, 3.5j]
    real = call("aten::view_as_real.default", [bits], ArrayShape(E.F16, (2, 2)), arguments=[argument])
    assert real(Run(), x.view(torch.int32)).tolist() == [[1, 2], [0, -3.5]]


def test_a_tensor_laid_out_as_asked() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    arguments = [{"tensor": 0, "strides": [1, 2]}, [6], [1]]
    flat = call("aten::as_strided.default", [ArrayShape(E.F32, (2, 3))], ArrayShape(E.F32, (6,)), arguments=arguments)
    assert flat(Run(), x).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_result_taken_as_it_lies() -> None:
    x = torch.randn(2, 3, 4)
    shape = ArrayShape(E.F32, (2, 3, 4))
    turned = ArrayShape(E.F32, (4, 2, 3))
    arguments = [{"tensor": 0, "strided": True}]
    same = call("aten::sin.default", [shape], turned, arguments=arguments, orders=[[2, 0, 1]])
    assert torch.equal(same(Run(), x), x.sin().permute(2, 0, 1))
    lying = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # which the operator keeps
    as_it_lies = call(
        "aten::sin.default", [shape], ArrayShape(E.F32, (3, 4, 2)), arguments=arguments, orders=[[1, 2, 0]]
    )
    result = as_it_lies(Run(), lying)
    assert isinstance(result, torch.Tensor) and result.is_contiguous()
    assert torch.equal(result, x.sin().permute(1, 2, 0))


def test_what_the_operator_refuses_keeps_its_words() -> None:
    index = call("aten::select.int", [VECTOR], ArrayShape(E.F32), arguments=[{"tensor": 0}, 0, 9])
    with pytest.raises(AtenCallFailed, match="IndexError") as caught:
        index(Run(), torch.randn(4))
    assert caught.value.payloads["flagos.exception"] == b"IndexError"


@pytest.mark.parametrize(
    ("target", "config", "error", "named"),
    [
        ("aten::no_such.default", {}, MalformedProgram, "no_such.default"),
        ("aten::relu_.default", {}, MalformedProgram, "writes over its arguments"),
        ("prims::sin.default", {}, UnknownCustomCall, "prims::sin"),
        ("aten::sin.default", {"arguments": [{"tensor": 1}]}, MalformedProgram, "no operand 1"),
        ("aten::sin.default", {"arguments": [{"tensor": "0"}]}, MalformedProgram, "no operand '0'"),
        ("aten::sin.default", {"arguments": [{"tensor": False}]}, MalformedProgram, "no operand False"),
        ("aten::sin.default", {"arguments": [{"tensor": 0, "order": True}]}, MalformedProgram, "does not order"),
        ("aten::sin.default", {"arguments": [{"tensor": 0, "order": [None]}]}, MalformedProgram, "does not order"),
        ("aten::sin.default", {"arguments": [{"tensor": 0, "strides": 1}]}, MalformedProgram, "no strides"),
        ("aten::sin.default", {"arguments": [{"tensor": 0, "strides": [True]}]}, MalformedProgram, "no strides"),
        ("aten::sin.default", {"arguments": [{"dtype": "float31"}]}, MalformedProgram, "float31"),
        ("aten::sin.default", {"arguments": [{"eval": "1"}]}, MalformedProgram, "is no argument"),
        ("aten::sin.default", {"results": [0, 1]}, MalformedProgram, "do not make"),
        ("aten::sin.default", {"arguments": True}, MalformedProgram, "not of the type list"),
        ("aten::sin.default", {"keywords": True}, MalformedProgram, "not of the type dict"),
        ("aten::sin.default", {"results": "0"}, MalformedProgram, "not of the type list or NoneType"),
        ("aten::sin.default", {"dtypes": 1}, MalformedProgram, "not of the type list or NoneType"),
        ("aten::sin.default", {"arguments": [{"tensor": 0, "dtype": "int3"}]}, MalformedProgram, "the bits of int3"),
        ("aten::sin.default", {"dtypes": ["complex32", None]}, MalformedProgram, "are not those of"),
        ("aten::sin.default", {"orders": [[0], [0]]}, MalformedProgram, "are not those of"),
        ("aten::sin.default", {"orders": [[1]]}, MalformedProgram, "does not order the dimensions"),
        ("aten::sin.default", {"orders": ["0"]}, MalformedProgram, "does not order the dimensions"),
        ("aten::sin.default", {"orders": [[None]]}, MalformedProgram, "does not order the dimensions"),
        ("aten::sin.default", {"results": [True]}, MalformedProgram, "do not make"),
        ("aten::sin.default", {"more": 1}, UnsupportedAttribute, "backend_config.more"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_malformed_calls(target: str, config: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error) as caught:
        call(target, [VECTOR], VECTOR, **config)
    assert named in str(caught.value)


def test_results_lie_in_storage_of_their_own() -> None:
    x = torch.randn(4)
    same = call("aten::alias.default", [VECTOR], VECTOR)(Run(), x)
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()
    shape = ArrayShape(E.F32, (3, 4))
    spread = call("aten::expand.default", [VECTOR], shape, arguments=[{"tensor": 0}, [3, 4]])(Run(), x)
    assert spread.is_contiguous()
    assert spread.data_ptr() != x.data_ptr()


def test_results_share_no_storage_with_one_another() -> None:
    x = torch.randn(2, 4)
    rows = [ArrayShape(E.F32, (2, 4))]
    parts = call("aten::unbind.int", rows, TupleShape((VECTOR, VECTOR)), results=[0, 1])(Run(), x)
    storages = {part.untyped_storage().data_ptr() for part in (*parts, x)}
    assert len(storages) == 3
    assert all(torch.equal(part, row) for part, row in zip(parts, x, strict=True))
    # Both results are one tensor of the operator's.
    numbers = ArrayShape(E.F32, (3,))
    sizes: dict[str, Any] = {"arguments": [{"tensor": 0}, [1, 3]], "results": [1, 1]}
    cut = call("aten::split_with_sizes_copy.default", [VECTOR], TupleShape((numbers,) * 2), **sizes)
    first, again = cut(Run(), x[0])
    assert torch.equal(first, again)
    assert first.data_ptr() != again.data_ptr()


def test_marked_results_are_stored_as_they_read() -> None:
    x, z = torch.randn(4), torch.randn(4, dtype=torch.complex64)
    negated = call("aten::_neg_view.default", [VECTOR], VECTOR)(Run(), x)
    assert not negated.is_neg()
    assert torch.equal(negated, -x)
    numbers = ArrayShape(E.C64, (4,))
    conjugate = call("aten::_conj.default", [numbers], numbers)(Run(), z)
    assert not conjugate.is_conj()
    assert torch.equal(conjugate, z.conj())


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [([], {}, False), ([0.0], {}, False), ([0.25], {}, True), ([], {"dropout_p": 0.5}, True)],
)
def test_dropout_is_seen(arguments: list[float], keywords: dict[str, float], expected: bool) -> None:
    query = ArrayShape(E.F32, (1, 2, 4, 8))
    operands = [{"tensor": number} for number in range(3)]
    attention = instruction(
        ATTENTION, [query] * 3, TupleShape((query,)), arguments=[*operands, *arguments], keywords=keywords, results=[0]
    )
    assert drops_out(attention) is expected
    assert not drops_out(instruction("aten::exp.default", [VECTOR], VECTOR))


def test_what_an_operator_does_not_return_is_there_all_the_same() -> None:
    def returned(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + 1, None

    pair = instruction("aten::exp.default", [VECTOR], TupleShape((VECTOR, ArrayShape(E.S64, ()))), results=[0, 1])
    one, seed = prepare_operator(pair, returned)(Run(), torch.zeros(4))
    assert torch.equal(one, torch.ones(4))
    assert (seed.dtype, seed.shape) == (torch.int64, torch.Size())


def matrix(*dims: int, element_type: ElementType = E.F32) -> ArrayShape:
    return ArrayShape(element_type, dims)


@pytest.mark.parametrize("element_type", [E.F32, E.BF16, E.F64])
def test_a_product_is_made_where_it_is_wanted(element_type: ElementType) -> None:
    shapes = [matrix(*dims, element_type=element_type) for dims in ((5,), (4, 3), (3, 5), (4, 5))]
    arguments: list[Any] = [{"tensor": 0}, {"tensor": 1, "strided": True}, {"tensor": 2}]
    into = prepare_into(
        instruction("aten::addmm.default", shapes[:3], shapes[3], arguments=arguments, keywords={"alpha": 2, "beta": 3})
    )
    assert into is not None
    dtype = TORCH_DTYPE[element_type]
    bias, x, y = torch.randn(5, dtype=dtype), torch.randn(3, 4, dtype=dtype).T, torch.randn(3, 5, dtype=dtype)
    expected = (3 * bias.double() + 2 * (x.double() @ y.double())).to(dtype)
    precision = 2e-2 if element_type is E.BF16 else 1e-5
    place = torch.full((4, 5), torch.nan, dtype=dtype)
    made = into(Run(), [place], bias, x, y)
    assert made is place
    torch.testing.assert_close(made, expected, rtol=precision, atol=precision)
    torch.testing.assert_close(into(Run(), [None], bias, x, y), expected, rtol=precision, atol=precision)


def test_what_cannot_be_made_where_it_is_wanted() -> None:
    product = {"arguments": [{"tensor": 0}, {"tensor": 1}]}
    operands, shape = [matrix(4, 3), matrix(3, 5)], matrix(4, 5)
    assert prepare_into(instruction("aten::mm.default", operands, shape, **product)) is not None
    assert prepare_into(instruction("aten::mm.default", operands, shape, **product, orders=[[1, 0]])) is None
    assert (
        prepare_into(instruction("aten::sort.default", [VECTOR], TupleShape((VECTOR, VECTOR)), results=[0, 1])) is None
    )
    assert prepare_into(instruction("aten::exp.default", [VECTOR], VECTOR)) is None
    assert prepare_into(instruction("flagos.eigh", [matrix(4, 4)], matrix(4, 4))) is None


def test_a_product_that_pytorch_refuses() -> None:
    call = instruction(
        "aten::mm.default", [matrix(4, 3), matrix(4, 5)], matrix(4, 5), arguments=[{"tensor": 0}, {"tensor": 1}]
    )
    into = prepare_into(call)
    assert into is not None
    with pytest.raises(AtenCallFailed):
        into(Run(), [torch.empty(4, 5)], torch.ones(4, 3), torch.ones(4, 5))
