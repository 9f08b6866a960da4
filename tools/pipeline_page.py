"""docs/pipeline.md, from the declaration in passes/pipelines.py and nothing else: python -m tools.pipeline_page"""

from __future__ import annotations

from pathlib import Path

from flagos_backend.codegen.cpu.pipelines import cpu_emission_pipeline, cpu_loop_pipeline, native_pipeline
from flagos_backend.codegen.triton.loop_pipeline import triton_loop_pipeline
from flagos_backend.devices.target import HOPPER, HOST, SIMULATED
from flagos_backend.passes.pass_manager import Pass, Pipeline, names
from flagos_backend.passes.pipelines import accelerator_pipeline, cpu_pipeline

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pipeline.md"

_HEAD = """# The pipeline

<!-- Written by tools.pipeline_page from flagos_backend/passes/pipelines.py; a test compares them. -->

A program is one HLO module. These passes change it, in this order, before it is fused into loop nests. Indented above a
pass is what prepares for it: it is dropped unless the pass then changes something. Indented below is what cleans up: it
runs only if the pass changed something. `flagos opt PROGRAM` runs the passes alone: see
[debugging](debugging.md).
"""
_PARTS = (
    ("The host CPU", cpu_pipeline(HOST), "Then, for what becomes a native program:"),
    ("Native programs of the host", native_pipeline(), ""),
    ("Accelerators", accelerator_pipeline(SIMULATED), ""),
)

_LOOPS = """# Loop nests

Fusion makes loop nests of the module. These transforms change them, one by one. Each result is verified as modules are.
"""
_LOOP_PARTS = (
    ("The host CPU, before memory is planned", cpu_loop_pipeline()),
    ("The host CPU, as loops are written", cpu_emission_pipeline()),
    ("Accelerators without a vendor's extras", triton_loop_pipeline(SIMULATED)),
    ("NVIDIA's H100 and H200", triton_loop_pipeline(HOPPER)),
)


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for title, pipeline, after in _PARTS:
        rows = ["| pass | why it stands there | establishes |", "|---|---|---|", *_rows(pipeline)]
        parts.append("\n".join([f"## {title}\n", *rows]) + "\n")
        if after:
            parts.append(after + "\n")
    parts.append(_LOOPS)
    for title, loops in _LOOP_PARTS:
        rows = ["| transform | why it stands there |", "|---|---|"]
        rows += [f"| `{step.name}` | {step.reason} |" for step in loops]
        parts.append("\n".join([f"## {title}\n", *rows]) + "\n")
    return "\n".join(parts)


def _rows(pipeline: Pipeline) -> list[str]:
    numbered = iter(names(pipeline))

    def rows(steps: tuple[Pass, ...], depth: int) -> list[str]:
        made = []
        for step in steps:
            made += rows(step.before, depth + 1)
            forms = ", ".join(form.name for form in step.establishes)
            made.append(f"| {'&emsp;' * depth}`{next(numbered)}` | {step.reason} | {forms} |")
            made += rows(step.after, depth + 1)
        return made

    return rows(pipeline, 0)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
