"""What the words of a captured kernel's parameters may be, where captures differ (native/cuda/comparison.h)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "flagos_backend/native"
STACK = 1  # stands for an address on the stack, another one in the second capture
SAME = 17  # stands for an address on the stack, the same one in all captures
UPPER = 2  # stands for the number 2 beside the upper half of an address, of another one in the second capture

A, MOVED = 0x7F2610000000, 0x600  # an array of 4096 bytes, and how far the second capture moves it
OWN, OTHER, THIRD = 0x7FE400000000, 0x7FE6A0000000, 0x7FE900000000
HEAP, HEAP_TOO, HEAP_AGAIN = 0x17D28AF0, 0x17D2BEC0, 0x17D38D10

# Where the temporaries of the capture that is kept are.
SHARED = 0x7FEB00000000

# Of conditional nodes in each capture. The first differs by as much as memory of the captures' own moved; the second
# cannot be told from a number that follows from where the arrays are.
HANDLES = (0x600000010, 0x700000010, 0x600000010 + THIRD - OWN, 0x900000010), (40, 80, 40, 40)

# In the three captures that are compared, and the one that is kept; in that as in the first if it is not said.
Words = Sequence[tuple[int, ...]]


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Words], str]:
    program = tmp_path_factory.mktemp("comparison") / "comparison"
    sources = [Path(__file__).with_name("comparison.cc"), NATIVE / "error.cc"]
    sources += [NATIVE / "cuda/comparison.cc", NATIVE / "cuda/verification.cc"]
    include = [f"-I{NATIVE}", f"-I{ROOT / 'plugin_abi/include'}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", *include, *map(str, sources), "-o", str(program), "-pthread"], check=True)

    def compare(words: Words, distance: int = MOVED) -> str:
        numbers = [1, A, A + distance, 4096]
        for begin in (OWN, OTHER, THIRD, SHARED):
            numbers += [1, begin, begin + 0x100000]
        numbers += [len(HANDLES), *(handle for handles in HANDLES for handle in handles)]
        numbers += [len(words), *(value for word in words for value in (*word, word[0])[:4])]
        text = " ".join(f"{number:x}" for number in numbers)
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return compare


def moved(offset: int) -> tuple[int, int, int]:
    return A + offset, A + MOVED + offset, A + offset


@pytest.mark.parametrize(
    ("words", "patches"),
    [
        ([(5, 5, 5)], ""),
        ([moved(0)], "0+0@0"),
        ([(3, 3, 3), moved(16), moved(4096)], "0+10@1 0+1000@2"),
        ([(OWN + 8, OTHER + 8, THIRD + 8, SHARED + 8)], ""),
        # What is kept allocates in another order.
        ([(OWN + 8, OTHER + 8, THIRD + 8, SHARED + 0xFFFFF)], ""),
        ([HANDLES[0]], ""),
        ([moved(8), HANDLES[0], (3, 3, 3)], "0+8@0"),
        # What a stack left: addresses of the heap, of the stack, halves of addresses beside numbers.
        ([(HEAP, HEAP_TOO, HEAP_AGAIN)], ""),
        ([(STACK, STACK, STACK)], ""),
        ([(UPPER, UPPER, UPPER)], ""),
        ([(HEAP, 0x37F8000, HEAP)], ""),
        ([(0, HEAP, 0)], ""),
        ([(0x7F4F8AC37422, 0xA, 0x7F4F8AC37422)], ""),
        # A flag over the highest bytes of an address.
        ([(1 << 48 | OWN, 1 << 48 | OTHER, 1 << 48 | THIRD)], ""),
        ([(1 << 48 | A, 1 << 48 | A + MOVED, 1 << 48 | A)], ""),
        ([(8 << 32 | OWN + 4 & 0xFFFFFFFF, 8 << 32 | OTHER + 4 & 0xFFFFFFFF, 8 << 32 | THIRD + 4 & 0xFFFFFFFF)], ""),
        ([(0x3F80000010000000, 0x3F80000010000600, 0x3F80000010000000)], ""),
        ([(OWN & 0xFFFFFFFF | 0x30, OTHER & 0xFFFFFFFF | 0x30, OWN & 0xFFFFFFFF | 0x30)], ""),
        ([((OWN >> 32) << 32 | 0xFFFFFF02, (OTHER >> 32) << 32 | 0xFFFFFF02, (OWN >> 32) << 32 | 0xFFFFFF02)], ""),
    ],
)
def test_what_is_patched_or_left(compare: Callable[[Words], str], words: Words, patches: str) -> None:
    assert compare(words) == patches


@pytest.mark.parametrize(
    "words",
    [
        [(4, 8, 4)],  # a number that follows from where the arrays are
        [(4 << 32 | 7, 8 << 32 | 7, 4 << 32 | 7)],
        [(HEAP, HEAP + MOVED // 4, HEAP)],
        [HANDLES[1]],
        [(HANDLES[0][0], HANDLES[0][1] + 16, HANDLES[0][2])],  # a node's handle in two captures only
        [(A - 64, A + MOVED - 64, A - 64)],  # before the array
        [(A + 8192, A + MOVED + 8192, A + 8192)],  # behind it
        [(OWN - A, OTHER - A - MOVED, THIRD - A)],  # a distance
        [((OWN - A) // 4, (OTHER - A - MOVED) // 4, (THIRD - A) // 4)],  # in elements
        # An address of the array that is not aligned to a word.
        [
            ((A & 0xFFFFFFFF) << 32 | 7, ((A + MOVED) & 0xFFFFFFFF) << 32 | 7, (A & 0xFFFFFFFF) << 32 | 7),
            (A >> 32, A >> 32, A >> 32),
        ],
    ],
)
def test_what_cannot_be_patched_is_refused(compare: Callable[[Words], str], words: Words) -> None:
    assert compare(words).startswith("refused: a word of node 7 depends on where the arrays are")


@pytest.mark.parametrize(
    "word", [(0, 0xE0, 0), (3, 0x70, 3), (0x70, 0x25, 0x70), (3 << 32 | 7, 0x25 << 32 | 7, 3 << 32 | 7)]
)
def test_small_numbers_follow_no_array_that_moves_far(compare: Callable[..., str], word: tuple[int, ...]) -> None:
    """No distance, no remainder and no flag changes so."""
    assert compare([word], 1 << 20) == ""
    assert compare([word], 3 << 20) == ""
    for distance in (MOVED, 1 << 19, (1 << 20) + 512):
        assert compare([word], distance).startswith("refused: a word of node 7 depends on where the arrays are")


def test_flags_may_follow_arrays_however_far_they_move(compare: Callable[..., str]) -> None:
    assert compare([(0, 4, 0)], 1 << 20).startswith("refused: a word of node 7 depends on where the arrays are")


@pytest.mark.parametrize(
    ("word", "patches"),
    [
        # What a stack left is anything.
        ((HEAP, HEAP_TOO, HEAP_AGAIN, 3), ""),
        ((7, 7, 9, 12), ""),
        ((STACK, STACK, STACK, A + 8), ""),
        # What a stack left, the same three times.
        ((SAME, SAME, SAME, STACK), ""),
        ((5, 5, 5, 6), ""),
        ((0x7F6200000001, 0x7F6200000001, 0x7F6200000001, 0x7F6300000001), ""),
    ],
)
def test_what_the_kept_capture_may_have(compare: Callable[[Words], str], word: tuple[int, ...], patches: str) -> None:
    assert compare([word]) == patches


@pytest.mark.parametrize(
    "word",
    [
        (0, 0, 0, A),  # an array where there was none
        (*moved(8), A + 16),  # another place in it
        (*moved(8), SHARED + 8),
        (OWN + 8, OTHER + 8, THIRD + 8, OWN + 8),  # memory of a capture that goes
        (OWN + 8, OTHER + 8, THIRD + 8, SHARED + 0x100000),  # behind its own
        (OWN + 8, OTHER + 8, THIRD + 8, A + 8),  # an array
        (*HANDLES[0][:3], HANDLES[0][0]),  # the node of another capture
    ],
)
def test_what_the_kept_capture_may_not_have(compare: Callable[[Words], str], word: tuple[int, ...]) -> None:
    assert compare([word]).startswith("refused: a word of node 7 is not what the captures that were compared have")
