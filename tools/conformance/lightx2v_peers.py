"""Two processes that share the tokens of a WAN block by sequence parallelism, over gloo. For lightx2v_worker.py."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

_PROCESSES, _TOKENS, _WIDTH, _SECONDS = 2, 48, 64, 300


def run(checkout: Path, kind: str, scheme: str, allowed: float) -> None:
    """Raises AssertionError where a process fails, or its part is farther from one process' stock than ``allowed``."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # They meet in this process, whose store takes a port that is free, as torchrun's does.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawned = multiprocessing.get_context("spawn")
    answers: Any = spawned.Queue()
    peers = [
        spawned.Process(target=_peer, args=(checkout, kind, scheme, allowed, rank, store.port, answers), daemon=True)
        for rank in range(_PROCESSES)
    ]
    for peer in peers:
        peer.start()
    try:
        said = [answers.get(timeout=_SECONDS) for _ in peers]
    finally:
        for peer in peers:
            peer.join(10)
            if peer.is_alive():
                peer.kill()
    if wrong := [text for text in said if text]:
        raise AssertionError("; ".join(wrong))


def _peer(checkout: Path, kind: str, scheme: str, allowed: float, rank: int, port: int, answers: Any) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": _PROCESSES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    here |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in here.items()})
    try:
        _compare(checkout, kind, scheme, allowed, rank)
        answers.put("")
    except BaseException as error:
        answers.put(f"process {rank}: {error!r}: {traceback.format_exc(limit=-1)}"[:400])


def _compare(checkout: Path, kind: str, scheme: str, allowed: float, rank: int) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from tools.conformance.lightx2v_blocks import (
        Block,
        Inputs,
        apart,
        configuration,
        import_lightx2v,
        quantized,
        weights,
    )

    import_lightx2v(checkout)
    from lightx2v_platform.registry_factory import PLATFORM_DEVICE_REGISTER

    PLATFORM_DEVICE_REGISTER["flagos"].init_parallel_env()
    torch.manual_seed(0)
    checkpoint, inputs = weights("t2v", _WIDTH), Inputs("t2v", _TOKENS, _WIDTH)
    expected = Block(configuration("t2v", None, _WIDTH), checkpoint)(inputs)
    mesh = init_device_mesh("cpu", (1, _PROCESSES), mesh_dim_names=("cfg_p", "seq_p"))
    shared = {"seq_parallel": True, "device_mesh": mesh, "parallel": {"seq_p_attn_type": kind}}
    block = Block(configuration("t2v", scheme, _WIDTH, **shared), quantized(checkpoint, scheme))
    inputs.x, inputs.frequencies = (t.chunk(_PROCESSES)[rank] for t in (inputs.x, inputs.frequencies))
    found = apart(block(inputs), expected.chunk(_PROCESSES)[rank])
    torch.distributed.destroy_process_group()
    if not found <= allowed:
        raise AssertionError(f"{found:.3g} apart, and {allowed} allowed")
