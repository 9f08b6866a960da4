"""The arithmetic of the operators, against float64. With LightX2V's classes around it: tools/conformance lightx2v."""

from __future__ import annotations

import pytest
import torch

from flagos_backend.frontends.lightx2v import functions
from flagos_backend.frontends.lightx2v.refusal import floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention_and_the_logarithms_of_its_sums(dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
    q, k, v = (torch.randn(2, s, h, 16, dtype=dtype) for s, h in ((9, q_heads), (13, kv_heads), (13, kv_heads)))
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    wide[1:] = [x.repeat_interleave(q_heads // kv_heads, dim=1) for x in wide[1:]]
    scores = wide[0] @ wide[1].mT * 0.3
    exact = (scores.softmax(-1) @ wide[2]).transpose(1, 2)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 3e-2}
    # PyTorch's kernel of 16-bit floats approximates exp where the processor has AVX-512.
    of_sums = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2**-12}
    out, lse = functions.attention_with_lse(q, k, v, 0.3)
    torch.testing.assert_close(out.double(), exact, **tolerance)
    torch.testing.assert_close(functions.attention(q, k, v, scale=0.3).double(), exact, **tolerance)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).transpose(1, 2), **of_sums)
    other, sums = functions._attention_of_scores(
        *(
            x.transpose(1, 2)
            for x in (q, k.repeat_interleave(q_heads // kv_heads, 2), v.repeat_interleave(q_heads // kv_heads, 2))
        ),
        0.3,
    )
    torch.testing.assert_close(other.transpose(1, 2).double(), exact, **tolerance)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_are_quantized_by_their_largest_magnitude(dtype: torch.dtype) -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 1e4, 0.0, 7.0])[:, None]
    quantized, scale = functions.quantize_rows(x, dtype)
    assert quantized.dtype is dtype and scale.shape == (5, 1)
    step = 2.0**-4 if dtype is torch.float8_e4m3fn else 0.5 / 127
    largest = x.abs().amax(-1, keepdim=True)
    allowed = largest * step if dtype is torch.int8 else x.abs() * step + largest * 2.0**-9 / 448
    assert ((quantized.float() * scale - x).abs() <= allowed * 1.001).all()
    assert not quantized[3].float().any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_products_of_eight_bits_are_those_of_the_numbers_themselves(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = torch.randn(rows, 48), torch.randn(32, 48), torch.randn(32)
    (a, a_scale), (b, b_scale) = (functions.quantize_rows(t, dtype) for t in (x, weight))
    out = functions.quantized_product(a, a_scale, b.t(), b_scale.reshape(1, -1), bias, torch.float32)
    exact = a.double() @ b.double().t() * a_scale.double() * b_scale.double().t() + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_no_float_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^flagos: x is of torch.int64. Pass float32"):
        floats("flagos", x=torch.arange(3))
    with pytest.raises(TypeError, match=r"^flagos: x is a list"):
        floats("flagos", x=[1.0])
    with pytest.raises(RuntimeError, match=r"^flagos: its tensors lie apart: x on cpu, y on meta. Move"):
        floats("flagos", x=torch.ones(2), y=torch.ones(2, device="meta"))
