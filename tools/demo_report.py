"""What the parts of the demo share: two training runs side by side, and whether they are one and the same curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Training:
    """One training run. Times in seconds; ``step_time`` is the median."""

    losses: np.ndarray
    compile_time: float
    step_time: float


def compare(ours: Training, peer: Training, peer_name: str, *, fall: float, tolerance: float) -> list[str]:
    """Prints the comparison; returns what is wrong with it: losses that fall by less than ``fall``, or that differ by
    ``tolerance`` or more."""
    difference = np.abs(ours.losses - peer.losses)
    everything = np.concatenate([ours.losses, peer.losses])
    runs = {"flagos": ours, peer_name: peer}
    for name, run in runs.items():
        line = _curve(run.losses[:: max(1, len(run.losses) // 50)], everything.min(), everything.max())
        print(f"  loss on {name:11} {run.losses[0]:.4f} → {run.losses[-1]:.4f}  {line}")
    print(f"  difference: first step {difference[0]:.2e}, mean {difference.mean():.2e}, largest {difference.max():.2e}")
    for name, mine, theirs in (
        ("compile", ours.compile_time, peer.compile_time),
        ("step (median)", ours.step_time, peer.step_time),
    ):
        if theirs:
            print(f"  {name}: flagos {mine * 1e3:.1f} ms, {peer_name} {theirs * 1e3:.1f} ms, ratio {mine / theirs:.2f}")
        else:
            print(f"  {name}: flagos {mine * 1e3:.1f} ms, {peer_name} none")
    problems = []
    for name, run in runs.items():
        fell = run.losses[:5].mean() - run.losses[-5:].mean()
        if not fell > fall:
            problems.append(f"the loss on {name} fell by {fell:.3f} only; expected {fall}")
    if not difference.max() < tolerance:
        problems.append(f"the curves differ by {difference.max():.4f}; at most {tolerance:.2g} is rounding")
    return problems


def _curve(values: np.ndarray, low: float, high: float) -> str:
    """The values as one line of block characters."""
    levels = np.clip((values - low) / (high - low) * 7.99, 0, 7).astype(int)
    return "".join("▁▂▃▄▅▆▇█"[level] for level in levels)


def conclude(problems: list[str]) -> int:
    """Prints what is wrong, and the last line; the exit status."""
    for problem in problems:
        print(f"FAILED: {problem}")
    print("demo failed" if problems else "demo passed")
    return 1 if problems else 0
