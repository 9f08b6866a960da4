"""What FlagGems' kernels must not be given, each with its neighbour that they compute right."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.flaggems import loading
from support.flaggems import aten_call, check, dot, refusal

E = ElementType


def test_types_and_sizes_that_it_lacks(flag_gems, draw, index):
    """f64 in f32, integers in matrix units, types and sizes that it has not."""
    refused = {
        "computes f64 in f32": [
            aten_call("exp", draw(4, dtype=torch.float64))[0],
            aten_call("mm", *(draw(4, 4, dtype=torch.float64) for _ in range(2)))[0],
            dot(E.F64),
            dot(E.F64, dims=((2, 3, 4), (2, 4, 5)), attributes=DotAttributes((2,), (1,), (0,), (0,))),
        ],
        "multiplies no integers": [
            aten_call("mm", index(5, 3, 4), index(5, 4, 2))[0],
            aten_call("addmm", index(5, 2), index(5, 3, 4), index(5, 4, 2))[0],
            aten_call("bmm", index(5, 2, 3, 4), index(5, 2, 4, 2))[0],
            aten_call("baddbmm", index(5, 2), index(5, 2, 3, 4), index(5, 2, 4, 2))[0],
            aten_call("addmv", index(5, 3), index(5, 3, 4), index(5, 4), beta=0.5)[0],
            dot(E.S32),
        ],
        "no c64": [aten_call("exp", draw(4).to(torch.complex64))[0]],
        "no u16": [aten_call("eq.Tensor", *[draw(4).abs().to(torch.uint16)] * 2)[0]],
        "no f8e5m2": [aten_call("eye", 4, dtype=torch.float8_e5m2)[0]],
        "without elements": [aten_call("exp", draw(0, 4))[0], dot(E.F32, dims=((3, 0), (0, 2)))],
        "keep the type": [dot(E.BF16, E.F32)],
        "FlagGems has no": [aten_call("_fft_r2c", draw(8), [0], 0, True)[0]],
    }
    for reason, instructions in refused.items():
        for instruction in instructions:
            assert reason in refusal(instruction)


def test_orders_of_equal_elements(flag_gems, draw):
    calls = (["topk", 2], ["sort"], ["argmin", 1], ["argmax", 1], ["max.dim", 0], ["min.dim", 0])
    for name, *more in (*calls, ["cummax", 0], ["cummin", 1], ["unique_consecutive"], ["_unique2"]):
        assert "orders equal elements" in refusal(aten_call(name, draw(4, 5), *more)[0]), name


def test_addends_that_are_left_out(flag_gems, draw):
    a, b, factors = draw(3), draw(4), (draw(2, 3, 5), draw(2, 5, 4))
    calls = {
        "addr": ((3, 4), a, b),
        "addmm": ((3, 4), *(factor[0] for factor in factors)),
        "addmv": ((3,), draw(3, 4), b),
        "baddbmm": ((2, 3, 4), *factors),
    }
    for name, (dims, *operands) in calls.items():
        addend = torch.full(dims, torch.nan)
        assert "what it is to leave out" in refusal(aten_call(name, addend, *operands, beta=0)[0]), name
        assert "what it is to leave out" in refusal(aten_call(name, addend, *operands, beta=0.0)[0]), name
        assert not refusal(aten_call(name, addend, *operands, beta=0.5)[0]), name
    addend = torch.full((3, 4), torch.nan)
    assert loading.function("addr")(addend, a, b, beta=0).isnan().all(), "the guard is not needed any more"
    torch.testing.assert_close(torch.addr(addend, a, b, beta=0), torch.outer(a, b))


@pytest.mark.parametrize(("name", "expected"), [("logaddexp", -torch.inf), ("hypot", torch.inf)])
def test_two_infinities(flag_gems, name, expected):
    """As of what masked.logaddexp hides on both sides."""
    infinite = torch.full((4,), -torch.inf)
    call, operands = aten_call(name, infinite, infinite)
    assert "is NaN where both operands are infinite" in refusal(call)
    assert loading.function(name)(*operands).isnan().all(), "the guard is not needed any more"
    assert (getattr(torch, name)(*operands) == expected).all()


@pytest.mark.parametrize(
    ("name", "function", "more"),
    [
        ("aminmax", torch.aminmax, []),
        ("angle", torch.angle, []),
        ("clamp", torch.clamp, [-0.5, 0.5]),
        ("clamp_min", torch.clamp_min, [0.5]),
        ("clip", torch.clip, [-0.5, 0.5]),
        ("hardsigmoid", torch.nn.functional.hardsigmoid, []),
        ("std.correction", torch.std, []),
        ("threshold", torch.threshold, [0.5, 1.5]),
    ],
)
def test_what_is_not_a_number(flag_gems, draw, name, function, more):
    x = draw(8)
    x[3] = torch.nan
    assert "loses NaN" in refusal(aten_call(name, x, *more)[0])
    found, expected = loading.function(name)(x, *more), function(x, *more)
    assert any(t.isnan().any() for t in tree_leaves(expected))
    assert not any(t.isnan().any() for t in tree_leaves(found)), "the guard is not needed any more"


def test_integers_are_numbers(flag_gems, index):
    for name, *more in (["aminmax"], ["clamp", 1, 3], ["threshold", 1, 2]):
        check(*aten_call(name, index(5, 3, 4).to(torch.int16), *more))


def test_integers_in_floats(flag_gems, draw, index):
    few = index(5, 3, 4)
    for name, *more in (
        *(["pow.Tensor_Tensor", few], ["square"], ["clamp", 1, 3], ["clamp_min", 2], ["ceil"], ["prod"], ["cumsum", 1]),
        *([f"{compare}.Tensor", few] for compare in ("eq", "ne", "lt", "le", "gt", "ge")),
        *([f"{compare}.Scalar", 2] for compare in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(["addcmul", few, few], ["native_dropout_backward", few.bool(), 2]),
    ):
        assert "computes integers in floats" in refusal(aten_call(name, few, *more)[0]), name
    assert "computes integers in floats" in refusal(aten_call("arange", 5, dtype=torch.int64)[0])
    for narrow in (torch.int16, torch.int8):
        check(*aten_call("lt.Tensor", few.to(narrow), index(5, 3, 4).to(narrow)))
        check(*aten_call("clamp", few.to(narrow), 1, 3))
    check(*aten_call("maximum", few + (1 << 40), index(5, 3, 4) + (1 << 40)))


def test_integers_for_floats(flag_gems, draw, index):
    few = index(5, 3, 4)
    unary = ("log", "erf", "sqrt", "special_i0e", "special_i1", "logical_not", "nan_to_num")
    for name, *more in (*([name] for name in unary), ["atan2", few], ["logit", 0.1]):
        assert "wrong of integers" in refusal(aten_call(name, few, *more)[0]), name
    image = index(5, 2, 3, 4, 4).to(torch.uint8)
    assert "wrong of integers" in refusal(aten_call("upsample_bicubic2d", image, [3, 3], True)[0])
    check(*aten_call("nan_to_num", draw(3, 4)))
    check(*aten_call("sqrt", draw(3, 4).abs()))


def test_truth_values(flag_gems, draw, index):
    truths = index(2, 3, 4).bool()
    assert "wrong of truth values" in refusal(aten_call("add.Tensor", truths, truths)[0])
    assert "wrong of truth values" in refusal(aten_call("native_dropout_backward", truths, truths, 2.0)[0])
    check(*aten_call("native_dropout_backward", draw(3, 4), truths, 2.0))


def test_unsigned_integers(flag_gems, index):
    few, ones = (index(5, 3, 4) + 1).to(torch.uint8), torch.ones(4, dtype=torch.int64)
    assert "no unsigned integers with negative" in refusal(aten_call("eq.Scalar", few, -1)[0])
    assert "no unsigned integers by signed" in refusal(aten_call("floor_divide", few, ones)[0])
    check(*aten_call("eq.Scalar", few, 2))
    check(*aten_call("floor_divide", few, (index(5, 4) + 1).to(torch.uint8)))


def test_no_bfloat16_in_the_interpreter(flag_gems, draw):
    call, _ = aten_call("add.Tensor", *(draw(3, 4, dtype=torch.bfloat16) for _ in range(2)))
    assert "the bits of bfloat16" in refusal(call)
    assert refusal(call, Target("cuda", "nvidia")) == ""


def test_half_floats_that_are_rounded_or_summed(flag_gems, draw):
    halves = [draw(3, 4, dtype=torch.float16).abs() + 0.5 for _ in range(2)]
    assert "no rounding division of 16-bit floats" in refusal(aten_call("floor_divide", *halves)[0])
    for mode in ("floor", "trunc"):
        assert "no rounding division of 16-bit floats" in refusal(
            aten_call("div.Tensor_mode", *halves, rounding_mode=mode)[0]
        )
        check(*aten_call("div.Tensor_mode", *(h.float() for h in halves), rounding_mode=mode))
    assert refusal(aten_call("div.Tensor", *halves)[0]) == ""
    for name in ("sum", "mean"):
        assert "sums of parts in 16-bit floats" in refusal(aten_call(name, halves[0])[0])
    assert "sums of parts in 16-bit floats" in refusal(aten_call("sum.dim_IntList", halves[0], [0, 1])[0])
    assert refusal(aten_call("sum.dim_IntList", halves[0], [0])[0]) == ""


def test_floats_that_become_truth_values(flag_gems, draw):
    assert "less than one false" in refusal(aten_call("_to_copy", draw(3, 4), dtype=torch.bool)[0])
    check(*aten_call("_to_copy", draw(3, 4), dtype=torch.float16))
    check(*aten_call("_to_copy", draw(3, 4) > 0, dtype=torch.float32))


def test_sums_of_integers(flag_gems, index):
    narrow = index(100, 3, 4).to(torch.int8)
    assert "in their own type" in refusal(aten_call("sum", narrow)[0])
    assert "in their own type" in refusal(aten_call("sum.dim_IntList", narrow, [1])[0])
    check(*aten_call("sum.dim_IntList", index(1 << 40, 3, 4), [1]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.uint8], ids=str)
def test_integers_that_devices_do_not_add_to_in_place(flag_gems, index, dtype):
    to, of, where = index(2, 4, 3).to(dtype), index(2, 2, 3).to(dtype), index(4, 2)
    refused = (
        ("index_add", to, 0, where, of),
        ("index_put", to, [where], of, True),
        ("scatter.reduce", to, 0, index(4, 2, 3), of),
    )
    for name, *arguments in refused:
        more = {"reduce": "add"} if name == "scatter.reduce" else {}
        assert "less than 32 bits" in refusal(aten_call(name, *arguments, **more)[0]), name
    assert refusal(aten_call("index_put", to, [where], of)[0]) == ""
    check(*aten_call("index_add", to.float(), 0, where, of.float()))


def test_arrays_that_are_broadcast(flag_gems, draw, index):
    row, square, mask = draw(4), draw(3, 4), index(2, 3, 4).bool()
    reason = "gives its first argument's size"
    assert reason in refusal(aten_call("addcdiv", row, square, square)[0])
    assert reason in refusal(aten_call("masked_fill.Scalar", row, mask, 2.0)[0])
    assert reason in refusal(aten_call("masked_scatter", row, mask, draw(12))[0])
    check(*aten_call("addcdiv", square, row, draw(3, 1).abs() + 0.5, value=0.5))
    check(*aten_call("masked_fill.Scalar", square, index(2, 4).bool(), 2.0))


def test_products_of_unequal_arrays(flag_gems, draw):
    square = draw(3, 4)
    for other in (draw(3, 1), draw(4), square.bool(), square.half(), torch.tensor(2.0)):
        for operands in ((square, other), (other, square)):
            assert "for such as the first one" in refusal(aten_call("mul.Tensor", *operands)[0])
    check(*aten_call("mul.Tensor", square, draw(3, 4)))
    check(*aten_call("mul.Tensor", square, 2.5))


def test_scalars(flag_gems, draw, index):
    one = draw()
    for name, *more in (["_softmax", 0, False], ["cumsum", 0], ["amax", [0]], ["index_select", 0, index(1, 1)]):
        assert "no dimension of a scalar" in refusal(aten_call(name, one, *more)[0]), name
    assert "takes no scalar" in refusal(aten_call("addmm", one, draw(3, 4), draw(4, 5))[0])
    assert "takes no scalar" in refusal(aten_call("repeat", one, [])[0])
    assert "takes no scalar" in refusal(aten_call("unfold_backward", draw(1), [], 0, 1, 1)[0])
    grads = draw(8), torch.tensor(2), 5, -1, False
    assert "takes no single index" in refusal(aten_call("embedding_dense_backward", *grads)[0])
    check(*aten_call("repeat", one, [2, 3]))
    check(*aten_call("neg", one))
    check(*aten_call("embedding_dense_backward", draw(4, 8), index(5, 4), 5, -1, False))


@pytest.mark.parametrize("dim", [-1, -2, 0, 1])
def test_dimensions_from_the_last(flag_gems, index, dim):
    """Negative ones are no cause to refuse: they are made positive."""
    check(*aten_call("count_nonzero", index(3, 5, 6), dim))
    check(*aten_call("cumsum", index(3, 5, 6).float(), dim))
    check(*aten_call("index_select", index(3, 5, 6), dim, index(5, 3)))


def test_what_is_not_given(flag_gems, draw, index):
    for instruction in (
        aten_call("rms_norm", draw(2, 3), [3])[0],
        aten_call("native_batch_norm", draw(4, 2, 3), None, None, None, None, True, 0.1, 1e-5)[0],
    ):
        assert "that is not given" in refusal(instruction)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(), (2, 3)], ids=str)
def test_losses_that_are_no_means(flag_gems, draw, index, sizes, weighted):
    name = "nll_loss2d_forward" if sizes else "nll_loss_forward"
    logits, labels = draw(4, 3, *sizes), index(3, 4, *sizes)
    weight = draw(3).abs() + 0.1 if weighted else None
    for reduction in (0, 2):
        assert "sum of weights unwritten" in refusal(aten_call(name, logits, labels, weight, reduction, -100)[0])
    check(*aten_call(name, logits, labels, weight, 1, -100))


def test_norms_pools_and_borders(flag_gems, draw):
    assert "negative power" in refusal(aten_call("linalg_vector_norm", draw(2, 3), -1.0, [1])[0])
    mixed = aten_call("native_group_norm", draw(2, 6, 5), draw(6), draw(6), 2, 6, 5, 2, 1e-5)
    arguments = draw(2, 6, 5), draw(2, 6, 5), draw(2, 2), draw(2, 2), draw(6), 2, 6, 5, 2, [True, True, True]
    for instruction in (mixed[0], aten_call("native_group_norm_backward", *arguments)[0]):
        assert "mixes groups" in refusal(instruction)
    beyond = aten_call("avg_pool2d", draw(1, 2, 1, 9), [1, 7], [1, 3], [0, 3], True)
    assert "beyond the padding" in refusal(beyond[0])
    assert "two numbers" in refusal(aten_call("avg_pool2d", draw(1, 2, 8, 9), [2])[0])
    assert "two numbers" in refusal(aten_call("avg_pool2d", draw(1, 2, 8, 9), [2, 2], [])[0])
    assert "takes nothing away" in refusal(aten_call("reflection_pad2d", draw(1, 2, 4, 4), [-1, 1, 0, 1])[0])
    assert "counted from the last" in refusal(aten_call("select_backward", draw(5), [5, 2], 1, -1)[0])
    assert refusal(aten_call("select_backward", draw(5), [5, 2], -1, 1)[0]) == ""
    for arguments in ([6], 1.5), ([6],):
        nearest = aten_call("_upsample_nearest_exact1d", draw(1, 2, 4), *arguments)
        assert "another is nearest" in refusal(nearest[0])


def test_never_on_the_host(flag_gems, draw):
    assert "no kernels for the host" in refusal(aten_call("exp", draw(4))[0], HOST)
