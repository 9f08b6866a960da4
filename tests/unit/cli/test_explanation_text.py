"""An explanation in words, from data made by hand."""

from __future__ import annotations

from flagos_backend.cli import explanation_text as text
from flagos_backend.cli.measuring import Measured
from flagos_backend.compile.explanation import Buffer, Explanation, Step

PRODUCT = Step(0, "product p", "product", "blas", "jit(f)/dot", "model.py:7", flops=4e9, bytes=1e6, seconds=4e-2)
LOOP = Step(1, "loop l", "loop", "native", flops=1e3, bytes=2e6, seconds=2e-3)
CALL = Step(2, "call sort s", "call", "torch", bytes=1e6, seconds=1e-3, fallback="sort has no native form")
PROGRAM = Explanation(
    name="jit_f",
    target="the host CPU",
    form="as native code",
    arguments=1,
    outputs=2,
    argument_bytes=2048,
    output_bytes=3 * 2**20,
    temporary_bytes=512,
    library_bytes=512,
    peak_bytes=2048 + 3 * 2**20 + 1024,
    flops=4.1e9,
    bytes_accessed=9e6,
    flops_per_second=1e11,
    bytes_per_second=1e9,
    steps=(PRODUCT, LOOP, CALL),
    buffers=(Buffer("a", 512, 0, 1), Buffer("b", 256, 1, 1), Buffer("c", 600, 2, 2)),
    notes=("attention of dot.1",),
)


def test_half_a_page_says_what_runs_and_what_it_costs() -> None:
    assert text.summary(PROGRAM).splitlines() == [
        "jit_f on the host CPU: 1 argument, 2 outputs",
        "  runs      as native code",
        "  steps     1 product (BLAS), 1 loop (native), 1 library call (PyTorch)",
        "  memory    at most 3.00 MiB: arguments 2.00 KiB, outputs 3.00 MiB, temporaries 1.00 KiB",
        "  work      4.00 Gflop and 3.81 MiB moved (8.58 MiB before fusion)",
        "  expected  at least 43.0 ms, each step by itself, of a device of 100 Gflop/s and 954 MiB/s",
        "  slowest   by expected time",
        "     93% 40.0 ms: product p, model.py:7 (arithmetic: 4.00 Gflop)",
        "      5% 2.00 ms: loop l (memory: 1.91 MiB moved)",
        "      2% 1.00 ms: call sort s (memory: 977 KiB moved)",
        "  fell back",
        "    sort has no native form",
    ]


def test_a_measured_time_stands_beside_the_expected_one() -> None:
    lines = text.summary(PROGRAM, Measured(0.086, 20)).splitlines()
    expected = "86.0 ms, median of 20 launches on random arguments, of which the expected time is 50%"
    assert f"  measured  {expected}" in lines


def test_a_device_without_a_known_roofline_has_no_expected_time() -> None:
    bare = Explanation("f", target="acme a1", steps=(Step(0, "kernel", "kernel", "triton", bytes=8.0),))
    lines = text.summary(bare).splitlines()
    assert "  expected  unknown: nobody stated the roofline of this device" in lines
    assert not any("slowest" in line for line in lines)
    assert lines[-1] == "  fell back nothing"


def test_an_empty_program_is_explained() -> None:
    empty = Explanation("f")
    assert "steps     none" in text.summary(empty)
    assert text.kernels(empty).splitlines()[0].split() == ["step", "expected", "by", "flop", "moved", "what", "where"]
    assert text.memory(empty) == "temporaries: 0 bytes; at their peak live 0 bytes"
    assert text.matches(empty) == "nothing was matched"


def test_every_step_has_a_line_with_its_place() -> None:
    lines = text.kernels(PROGRAM).splitlines()
    assert lines[1].split() == ["0", "40.0", "ms", "blas", "4.00", "G", "977", "KiB", "product", "p", "model.py:7"]
    assert lines[-1] == "fell back: sort has no native form"


def test_what_lives_at_the_peak_is_marked() -> None:
    lines = text.memory(PROGRAM).splitlines()
    assert lines[0] == "temporaries: 1.00 KiB; at their peak live 768 bytes"
    assert [line.split()[2] for line in lines if line.endswith("yes")] == ["a", "b"]


def test_steps_of_one_function_are_one() -> None:
    one, other = Step(3, "a", flops=1.0, bytes=2.0, seconds=3.0), Step(3, "b", flops=4.0, bytes=5.0, seconds=6.0)
    assert text.merged([one, other]) == [Step(3, "a; b", flops=5.0, bytes=7.0, seconds=9.0)]


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [text.size(n) for n in (0, 1023, 1024, 150 * 2**20, 2**52)] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "150 MiB",
        "4096 TiB",
    ]
    assert [text.quantity(n) for n in (12, 1200, 3.5e13)] == ["12 ", "1.20 k", "35.0 T"]
    assert [text.seconds(n) for n in (2.0, 1.5e-3, 2.25e-5, 4e-8)] == ["2.00 s", "1.50 ms", "22.5 us", "40 ns"]
