"""Exceptions of functions that programs call back."""

from __future__ import annotations

import threading

from flagos_backend.torch.compile.callbacks import Failures


def test_each_thread_takes_what_its_own_launch_raised() -> None:
    failures, both = Failures(), threading.Barrier(2)
    found: dict[str, BaseException | None] = {}
    raised = {name: ValueError(name) for name in ("one", "other")}

    def launch(name: str) -> None:
        failures.put(7, raised[name])
        both.wait(30)
        found[name] = failures.take([3, 7])

    threads = [threading.Thread(target=launch, args=(name,)) for name in raised]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == raised and failures.take([7]) is None


def test_what_another_thread_raised_for_this_one_is_taken() -> None:
    failures, error = Failures(), ValueError("on the device's thread")
    thread = threading.Thread(target=failures.put, args=(7, error))
    thread.start()
    thread.join()
    assert failures.take([3]) is None and failures.take([7]) is error
