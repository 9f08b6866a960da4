"""What a row shares is loaded before its elements, and waited for after them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from support.triton_programs import bf16, s32
from support.triton_sources import sources


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.take_along_axis(wide, labels[:, None], -1).mean()


@pytest.mark.parametrize("length", [1000, 32000, 50257, 128256])
def test_a_label_of_each_row(length: int) -> None:
    source = sources(jax.value_and_grad(cross_entropy), [bf16(4096, length), s32(4096)]).split("def kernel(")[1]
    label = re.search(r"(v\d+) = tl\.load\(in1 \+ \(x\)", source)
    assert label is not None
    row = re.search(r"tl\.load\(in0 \+ \((?:tl\.multiple_of\()?x \* \d+ \+ r", source)
    assert row is not None and label.start() < row.start()
    first_use = re.search(rf"\b{label[1]}\b", source[label.end() :])
    assert first_use is not None and label.end() + first_use.start() > source.index(", 1, fm.maximum")
