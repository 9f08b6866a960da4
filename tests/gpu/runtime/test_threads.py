"""Threads that use one device at once: while programs are captured, and before, when steps are launched one by one."""

from __future__ import annotations

import threading

import numpy as np
import torch

from cpu.native.harness import compile, get, put, run
from flagos_backend.devices import discovery
from plugin_abi.host import Artifact, Context, Memory

# Runs of a program, the second of which has it captured; and programs, for more streams than torch has.
RUNS, PROGRAMS = 3, 24


def test_copies_run_on_streams_that_torch_hands_to_nobody(context: Context) -> None:
    _, (_, *of_copies) = discovery.opened(0).handles()
    assert len(set(of_copies)) == 2
    assert not {torch.cuda.Stream().cuda_stream for _ in range(64)} & set(of_copies)


def test_copies_go_on_while_programs_are_captured(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    is_over = threading.Event()
    iterations: list[bool] = []
    errors: list[BaseException] = []

    def there_and_back(seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            while not is_over.is_set():
                sent = draw.standard_normal(5000).astype(np.float32)
                iterations.append(np.array_equal(get(put(memory, sent)), sent))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=there_and_back, args=(int(rng.integers(1 << 30)),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(PROGRAMS):
            text = f"""ENTRY main {{
              x = f32[{1000 + number},8] parameter(0)
              y = f32[8,{1000 + number}] transpose(x), dimensions={{1,0}}
              p = f32[8,8] dot(y, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}},
                operand_precision={{highest,highest}}
              ROOT r = f32[8,8] negate(p) }}"""
            executable = compile(context, text)
            for _ in range(RUNS):
                x = rng.standard_normal((1000 + number, 8)).astype(np.float32)
                expected = -(x.T.astype(np.float64) @ x)
                np.testing.assert_allclose(get(run(executable, put(memory, x))[0]), expected, rtol=1e-4, atol=1e-3)
            assert "not replayed" not in executable.artifact(Artifact.EXPLANATION).decode()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert iterations and all(iterations)


def test_products_keep_their_precision_side_by_side(context: Context, memory: Memory, rng: np.random.Generator) -> None:
    """Those that may be rounded to TF32 are, which errs a thousand times as much."""
    errors: dict[str, list[float]] = {"default": [], "highest": []}
    failures: list[BaseException] = []

    def multiply(precision: str, seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            for number in range(PROGRAMS):
                rows = 64 + number
                text = f"""ENTRY main {{
                  x = f32[{rows},512] parameter(0)
                  y = f32[512,{rows}] parameter(1)
                  ROOT p = f32[{rows},{rows}] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}},
                    operand_precision={{{precision},{precision}}} }}"""
                executable = compile(context, text)
                for _ in range(RUNS):
                    x, y = (draw.standard_normal(shape).astype(np.float32) for shape in ((rows, 512), (512, rows)))
                    found = get(run(executable, put(memory, x), put(memory, y))[0])
                    exact = x.astype(np.float64) @ y
                    errors[precision].append(float(np.abs(found - exact).max() / np.abs(exact).max()))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=multiply, args=(name, int(rng.integers(1 << 30)))) for name in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert max(errors["highest"]) < 2e-6, errors
    assert max(errors["default"]) < 2e-3, errors
    assert not torch.backends.cuda.matmul.allow_tf32
