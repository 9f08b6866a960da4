"""What stages know of chips: from one place, and of chips that nobody described too."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import flagos_backend
from flagos_backend.devices.target import HOPPER, HOST, SIMULATED, Target, facts_of

_NAMES = frozenset({"amd", "cuda", "nvidia"})
# Front ends that get tensors ask for the type of their device as PyTorch names it.
_OF_TENSORS = frozenset({"frontends/lightx2v/functions.py", "frontends/lightx2v/products.py"})


def test_no_stage_asks_for_a_vendors_name() -> None:
    root = Path(flagos_backend.__file__).parent
    asking = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and constant.value in _NAMES
    }
    assert {path for path in asking if not path.startswith("devices/")} == _OF_TENSORS


def test_a_chip_that_is_not_measured_has_its_share_of_the_roofline() -> None:
    """The shares are those of the chip that is measured, and grow with the roofline."""
    a100 = replace(HOPPER, architecture="sm_80", multiprocessors=108)
    assert a100.roofline is not None and HOPPER.roofline is not None
    measured, derived = HOPPER.single_program, a100.single_program
    assert derived.bytes_per_second < measured.bytes_per_second
    memory = a100.roofline.bytes_per_second / HOPPER.roofline.bytes_per_second * 132 / 108
    units = a100.roofline.flops_per_second / HOPPER.roofline.flops_per_second * 132 / 108
    assert derived.bytes_per_second == pytest.approx(measured.bytes_per_second * memory, rel=0.05)
    assert derived.operations_per_second == pytest.approx(measured.operations_per_second * units, rel=0.05)
    assert derived.start_seconds == measured.start_seconds


@pytest.mark.parametrize("target", [SIMULATED, Target("npu", "ascend", "910B", multiprocessors=20)])
def test_of_an_unknown_chip_the_measured_one_is_assumed(target: Target) -> None:
    assert target.roofline is None
    assert target.single_program == HOPPER.single_program


def test_what_a_vendor_has_is_asked_for_by_fact() -> None:
    assert facts_of("nvidia").nccl and not facts_of("amd").nccl and facts_of("unknown") == HOST.facts
    assert HOPPER.has_fused_attention and not SIMULATED.has_fused_attention
