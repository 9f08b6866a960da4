"""Eager torch.distributed on the device flagos: collectives, and what PyTorch makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import Outcomes


@pytest.mark.parametrize(
    "check",
    [
        "what_moves_of_every_dtype",
        "reductions_of_every_kind",
        "coalesced",
        "strides_and_sizes",
        "works_and_futures",
        "works_in_the_order_of_a_stream",
        "point_to_point",
        "groups_of_every_name",
        "functional_collectives",
    ],
)
def test_collectives(device_outcomes: Outcomes, check: str) -> None:
    device_outcomes.expect(check, 2)


@pytest.mark.parametrize("check", ["distributed_data_parallel", "fully_sharded", "tensor_parallel", "dtensor"])
def test_parallel_models(device_outcomes: Outcomes, check: str) -> None:
    device_outcomes.expect(check, 2)


@pytest.mark.parametrize("check", ["what_is_refused", "sizes_that_differ", "a_peer_that_is_late"])
def test_errors(device_outcomes: Outcomes, check: str) -> None:
    device_outcomes.expect(check, 2)


def test_a_peer_that_ends(device_outcomes: Outcomes) -> None:
    """Process 1 does; the other hears of it."""
    device_outcomes.expect("a_peer_that_ends", 1)


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("flagos", device_id=torch.device("flagos", 0))
x = torch.full((2,), dist.get_rank() + 1.0, device="flagos")
dist.all_reduce(x)
dist.barrier()
os.write(1, f"{x.tolist()}\\n".encode())  # a line at once
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = {**os.environ, "FLAGOS_TORCH_DEVICE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[3.0, 3.0]"] * 2, done.stdout
