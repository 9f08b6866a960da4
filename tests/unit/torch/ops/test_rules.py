"""A class that breaks a rule is refused when it is made; the message names it, its methods and the cure."""

from __future__ import annotations

from typing import Any

import pytest

from flagos_backend.frontends.torch import ops


def _method(*args: Any, **kwargs: Any) -> None:
    return None


def _make(*names: str, base: type = ops.BasicOperation, **attributes: Any) -> type:
    return type("Mine", (base,), dict.fromkeys(names, _method) | attributes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("op_forward", "op_forward_compute", "op_backward"), "Mine.*op_forward and op_forward_compute.*Remove"),
        (("op_forward", "op_forward_save_ctx", "op_backward"), "Mine.*op_forward and op_forward_save_ctx.*Remove"),
        (("op_forward_compute", "op_backward"), "Mine.*op_forward_compute without op_forward_save_ctx.*Define"),
        (("op_forward_save_ctx", "op_backward"), "Mine.*op_forward_save_ctx without op_forward_compute.*Define"),
        (("fuser_forward", "fuser_forward_save_ctx"), "Mine.*fuser_forward and fuser_forward_save_ctx.*Remove"),
        (("fuser_forward", "fuser_forward_compute"), "Mine.*fuser_forward and fuser_forward_compute.*Remove"),
        (("fuser_forward_compute",), "Mine.*fuser_forward_compute without fuser_forward_save_ctx.*Define"),
        (("fuser_forward_save_ctx",), "Mine.*fuser_forward_save_ctx without fuser_forward_compute.*Define"),
        (("op_forward",), "Mine.*op_forward without op_backward.*Define"),
        (("op_forward_compute", "op_forward_save_ctx"), "Mine.*op_forward_compute without op_backward.*Define"),
    ],
)
def test_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _make(*names)
    if names[0].startswith("fuser"):
        with pytest.raises(TypeError, match=message):
            _make(*names, base=ops.FusedOperation)


@pytest.mark.parametrize("count", ["num_extra_inputs", "num_extra_outputs"])
def test_extra_tensors_need_the_fusers_level(count: str) -> None:
    with pytest.raises(TypeError, match=r"Mine.*only op_forward.*Define fuser_forward_compute"):
        _make("op_forward", "op_backward", **{count: 1})
    _make("fuser_forward_compute", "fuser_forward_save_ctx", "fuser_backward", **{count: 1})


def test_the_nearest_forward_decides() -> None:
    split = _make("op_forward_compute", "op_forward_save_ctx", "op_backward")
    assert split.splits_forward
    whole = _make("op_forward", base=split)
    assert not whole.splits_forward
    assert _make("op_forward_compute", "op_forward_save_ctx", base=whole).splits_forward
    with pytest.raises(TypeError, match="op_forward_compute without op_forward_save_ctx"):
        _make("op_forward_compute", base=whole)


def test_fused_operation_needs_parts() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ops.FusedOperation([])
