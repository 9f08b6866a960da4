"""What is measured is kept in a folder of the user's alone, under a key that changes with everything that matters."""

import contextlib
import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from flagos_backend.devices.device_lock import device_lock
from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode, Precision
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels import tuning

CHIP = Target("chip", vendor="vendor")
# More than these kernels take, also on a machine that has other things to do.
AMPLE = 10.0


def dot(rows=4, precision=Precision.DEFAULT):
    builder = Builder("dot")
    operands = [builder.parameter(ArrayShape(ElementType.F32, dims)) for dims in ((rows, 5), (5, 6))]
    attributes = DotAttributes((1,), (0,), precision=precision)
    return builder.add(Opcode.DOT, operands, attributes, shape=ArrayShape(ElementType.F32, (rows, 6)))


def task(rows=4, precision=Precision.DEFAULT):
    return tuning.Task.of(dot(rows, precision))


class Clock:
    """The device's, which the kernels advance."""

    now = 0.0


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """A device of host tensors; its name can be changed."""
    module = SimpleNamespace(
        name="chip one",
        mem_get_info=lambda: (1 << 30, 1 << 30),
        get_device_name=lambda: module.name,
        current_device=lambda: 0,
        synchronize=lambda: pytest.fail("waits for what other threads have the device do"),
        device=lambda device: contextlib.nullcontext(),
        Event=Event,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch, "device", lambda kind, index=0: SimpleNamespace(type=kind))
    monkeypatch.setattr(tuning, "_dummy_launch", lambda device: lambda: None)
    monkeypatch.setattr(tuning, "_arguments", lambda task, device: [torch.zeros(shape.dims) for shape in task.operands])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return module


def kernels(calls):
    def make(name, seconds):
        def kernel(run, *operands):
            calls.append(name)
            Clock.now += seconds

        return kernel

    return {"slow": make("slow", 0.002), "quick": make("quick", 0.001)}


def test_the_fastest_is_chosen_and_remembered(chip, tmp_path):
    calls = []
    first = tuning.fastest(task(), CHIP, kernels(calls), AMPLE)
    assert first.name == "quick"
    assert "against slow" in first.text
    assert calls
    calls.clear()
    assert tuning.fastest(task(), CHIP, kernels(calls), AMPLE).name == "quick"
    assert not calls
    folder = tmp_path / "flagos" / "tuning"
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()).keys() == {"slow", "quick"}


def test_a_kernel_that_computes_something_else_is_not_used(chip, caplog):
    """What it should compute, the first kernel that is not checked and that can run says."""
    right = torch.tensor([1.0, torch.inf, torch.nan, -2.0])
    calls = []

    def make(name, result, seconds):
        def kernel(run, *operands):
            calls.append(name)
            Clock.now += seconds
            if result is None:
                raise RuntimeError("cannot run")
            return result

        return kernel

    offered = {
        "wrong": make("wrong", torch.tensor([1.1, torch.inf, torch.nan, -2.0]), 0.001),
        "rounded": make("rounded", torch.tensor([1.001, torch.inf, torch.nan, -2.0]), 0.002),
        "broken": make("broken", None, 0.0),
        "trusted": make("trusted", right, 0.003),
    }
    checked = ("wrong", "rounded")
    for _ in range(2):  # measured, then remembered
        outcome = tuning.fastest(task(), CHIP, offered, AMPLE, checked=checked)
        assert outcome.name == "rounded"
        assert "wrong, which computes something else" in outcome.text
        assert "broken not measured" in outcome.text
        offered["trusted"] = make("trusted", None, 0.0)
    assert calls.count("wrong") == 1
    assert "wrong computes something else than the others" in caplog.text
    assert tuning.fastest(task(5), CHIP, {**offered, "trusted": make("trusted", right, 0.003)}, AMPLE).name == "wrong"


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (torch.zeros(3, dtype=torch.float16), False),
        (torch.ones(3), False),
        (torch.ones(3, dtype=torch.float16) * 1.01, True),
        (torch.ones(4, dtype=torch.float16), False),
        (torch.full((3,), torch.nan, dtype=torch.float16), False),
        (torch.full((3,), torch.inf, dtype=torch.float16), False),
        ((torch.ones(3, dtype=torch.float16),), False),
    ],
)
def test_what_agrees(found, agrees):
    ones = torch.ones(3, dtype=torch.float16)
    assert tuning._agree(found, ones) is agrees
    assert tuning._agree((ones, torch.tensor([2])), (ones, torch.tensor([2])))
    assert not tuning._agree((ones, torch.tensor([1])), (ones, torch.tensor([2])))
    assert tuning._agree(torch.empty(0), torch.empty(0))


def test_one_thread_measures_at_a_time(chip):
    """What another one has the device do would be in its times."""
    inside, most = [], []

    def kernel(run, *operands):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    def measure(rows):
        tuning.fastest(task(rows), CHIP, {"one": kernel, "two": kernel}, 0.01)

    threads = [threading.Thread(target=measure, args=(rows,)) for rows in (4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) > 12 and max(most) == 1


def test_nothing_is_captured_while_kernels_are_measured(chip):
    def kernel(run, *operands):
        assert device_lock.locked()

    assert "measured" in tuning.fastest(task(), CHIP, {"one": kernel, "two": kernel}, 0.001).text


def test_whatever_changes_the_order_changes_the_key(chip, tmp_path):
    seconds = 0.001
    tuning.fastest(task(), CHIP, kernels([]), seconds)
    tuning.fastest(task(5), CHIP, kernels([]), seconds)
    tuning.fastest(task(precision=Precision.HIGHEST), CHIP, kernels([]), seconds)
    tuning.fastest(task(), Target("chip", vendor="other"), kernels([]), seconds)
    tuning.fastest(task(), CHIP, {**kernels([]), "third": kernels([])["quick"]}, seconds)
    chip.name = "chip two"
    tuning.fastest(task(), CHIP, kernels([]), seconds)
    assert len(list((tmp_path / "flagos" / "tuning").iterdir())) == 6


def test_a_kernel_that_fails_is_no_candidate(chip):
    def fails(run, *operands):
        raise RuntimeError("not on this chip")

    assert tuning.fastest(task(), CHIP, {"fails": fails, **kernels([])}, AMPLE).name == "quick"


def test_when_all_fail_the_first_is_used_and_nothing_is_kept(chip, tmp_path):
    def fails(run, *operands):
        raise RuntimeError("not on this chip")

    outcome = tuning.fastest(task(), CHIP, {"one": fails, "two": fails}, 0.001)
    assert outcome.name == "one"
    assert "none could be measured" in outcome.text
    assert not list((tmp_path / "flagos" / "tuning").iterdir())


def test_what_is_compiled_is_measured_before_the_time_is_up(chip, monkeypatch):
    """The first kernel runs on; what would have to be compiled after it is left out, and the text says so."""
    moments = iter(range(1000))
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: float(next(moments)))
    outcome = tuning.fastest(task(), CHIP, kernels([]), 1.0, {"quick"})
    assert outcome.name == "quick"
    assert "slow not measured" in outcome.text


def test_a_damaged_file_is_measured_again(chip, tmp_path):
    tuning.fastest(task(), CHIP, kernels([]), AMPLE)
    (file,) = (tmp_path / "flagos" / "tuning").iterdir()
    for damage in ("{", "[]", '{"quick": "fast"}', '{"other": 1.0}'):
        file.write_text(damage)
        calls = []
        assert tuning.fastest(task(), CHIP, kernels(calls), AMPLE).name == "quick"
        assert calls


def test_a_folder_that_others_can_write_is_not_used(chip, tmp_path):
    folder = tmp_path / "flagos" / "tuning"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert tuning.fastest(task(), CHIP, kernels([]), AMPLE).name == "quick"
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("target", "seconds", "reason"), [(HOST, 1.0, "host"), (CHIP, 0.0, "AUTOTUNE_SECONDS is 0")])
def test_nothing_to_measure_with(chip, target, seconds, reason):
    calls = []
    outcome = tuning.fastest(task(), target, kernels(calls), seconds)
    assert outcome.name == "slow"
    assert reason in outcome.text
    assert not calls


def test_arrays_too_large_to_make_twice(chip):
    chip.mem_get_info = lambda: (100, 100)
    assert "too large" in tuning.fastest(task(), CHIP, kernels([]), 1.0).text


def test_arguments_are_random_and_leave_the_user_s_generator_alone():
    before = torch.get_rng_state()
    arguments = tuning._arguments(task(), torch.device("cpu"))
    assert [a.shape for a in arguments] == [(4, 5), (5, 6)] and all(a.std() > 0 for a in arguments)
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_warm_up_side_by_side(chip, monkeypatch):
    """Each waits for the other. One that fails is measured all the same, and is a candidate only if it runs."""
    monkeypatch.setenv("FLAGOS_COMPILE_THREADS", "2")
    together = threading.Barrier(2)
    warm = set()

    def make(name, seconds):
        def warm_up():
            together.wait(timeout=30)
            if name == "broken":
                raise RuntimeError("no such instruction")
            warm.add(name)

        def kernel(run, *operands):
            if name not in warm:
                raise RuntimeError("no such instruction")
            Clock.now += seconds

        return kernel, warm_up

    made = {name: make(name, seconds) for name, seconds in (("quick", 0.001), ("broken", 0.0005))}
    found = {name: kernel for name, (kernel, _) in made.items()} | {"library": kernels([])["slow"]}
    warm_ups = {name: warm_up for name, (_, warm_up) in made.items()}
    outcome = tuning.fastest(task(), CHIP, found, 0.01, ("library",), warm_ups)
    assert outcome.name == "quick" and "broken not measured" in outcome.text
    assert warm == {"quick"}


def test_what_is_warm_is_measured_after_the_time_is_up(chip, monkeypatch):
    moments = iter(range(1000))
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: float(next(moments)))
    found = {"first": kernels([])["slow"], **kernels([])}
    outcome = tuning.fastest(task(), CHIP, found, 1.0, ("first",), {"quick": lambda: None})
    assert outcome.name == "quick"
    assert "slow not measured" in outcome.text


def slowed(seconds, when, calls):
    """Kernels of ``seconds`` by name; the device takes ten times as long while ``when`` of the number of the call."""

    def make(name):
        def kernel(run, *operands):
            calls.append(name)
            Clock.now += seconds[name] * (10 if when(len(calls)) else 1)

        return kernel

    return {name: make(name) for name in seconds}


def test_other_work_on_the_device_falls_on_all_kernels(chip):
    """It begins and ends at any moment. One after the other, the kernel that it falls on would lose."""
    length = random.randrange(9, 14)
    for begin in range(length):
        calls = []
        found = slowed({"slow": 0.0012, "quick": 0.001}, lambda n, at=begin: n < at or n > at + length, calls)
        assert tuning.fastest(task(begin + 1), CHIP, found, AMPLE).name == "quick"


def test_the_first_is_left_for_what_is_clearly_faster(chip):
    def never(number):
        return False

    close = slowed({"first": 0.00101, "other": 0.001}, never, [])
    assert tuning.fastest(task(4), CHIP, close, AMPLE).name == "first"
    assert tuning.fastest(task(4), CHIP, close, AMPLE).name == "first", "nor when it is remembered"
    assert tuning.fastest(task(5), CHIP, slowed({"first": 0.0011, "other": 0.001}, never, []), AMPLE).name == "other"
    among = slowed({"first": 0.0011, "other": 0.00101, "third": 0.001}, never, [])
    assert tuning.fastest(task(6), CHIP, among, AMPLE).name == "third"


def test_what_is_beaten_clearly_runs_no_longer(chip):
    calls = []
    tuning.fastest(task(), CHIP, slowed({"slow": 0.01, "quick": 0.001, "near": 0.0011}, lambda n: False, calls), AMPLE)
    assert calls.count("slow") < 6
    assert calls.count("quick") == calls.count("near") > 15
