"""Quotients in fewer instructions than a division, against those of float64, rounded."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flagos_backend.codegen.triton import formulas as fm
from flagos_backend.codegen.triton import nvidia_formulas as nv

SIZE = 1 << 20
# As generated kernels are compiled.
OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


@triton.jit
def divide(a, b, out, BY_SUM: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    dividend, divisor = tl.load(a + at), tl.load(b + at)
    inverse = nv.divide_straight(tl.full([1024], 1.0, tl.float32), divisor)
    if BY_SUM:
        quotient = fm.divide_by_sum(dividend, divisor, inverse)
    else:
        quotient = fm.divide_corrected(dividend, divisor, inverse)
    tl.store(out + at, quotient)


@pytest.mark.skipif(torch.version.cuda is None, reason="the formulas are in NVIDIA's assembly")
@pytest.mark.parametrize("by_sum", [True, False], ids=["of an exponential by a sum", "of any number"])
def test_quotients_are_rounded_once(by_sum, rng):
    dividends = np.exp2(rng.uniform(-99, 0, SIZE)).astype(np.float32)
    dividends[::7] = rng.uniform(0.5, 1, dividends[::7].shape)
    divisors = np.exp2(rng.uniform(0, 24, SIZE)).astype(np.float32)
    divisors[::3] = rng.uniform(1, 2, divisors[::3].shape)
    if not by_sum:
        dividends[1::2] *= np.float32(-(2.0**40))
        dividends[4:6] = np.inf, -np.inf
    dividends[:4], divisors[6:8] = (0, 1, np.nan, 2.0**-90), (1, np.nan)
    given = [torch.from_numpy(array).cuda() for array in (dividends, divisors)]
    found = torch.empty_like(given[0])
    divide[(SIZE // 1024,)](*given, found, BY_SUM=by_sum, **OPTIONS)
    with np.errstate(invalid="ignore"):
        expected = (dividends.astype(np.float64) / divisors.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(found.cpu().numpy(), expected)
