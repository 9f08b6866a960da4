"""The device's guard: it is asked while exceptions pass through PyTorch, so it must answer without Python."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from flagos_backend.frontends.torch.device import registration

#: Each ended the process once: all but the last with PyTorch's own guard. By name: a program, and what it prints.
PROGRAMS = {
    "a hook": (
        """
        y = x * 2
        y.register_hook(lambda gradient: 1 / 0)
        raises(ZeroDivisionError, lambda: (y * 3).sum().backward())
        """,
        "division by zero",
    ),
    "a mode": (
        """
        class Refusing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.mul.Tensor:
                    raise ValueError("no products")
                return func(*args, **(kwargs or {}))

        y = x.exp().sum()
        with Refusing():
            raises(ValueError, y.backward)
        """,
        "no products",
    ),
    "what unpacks saved tensors": (
        """
        def unpack(saved):
            raise KeyError("lost")

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = x.sin().sum()
        raises(KeyError, y.backward)
        """,
        "'lost'",
    ),
    # The gradient of the value has a size that depends on data: PyTorch gives the graph up, or up to 2.12 refuses it.
    "index_fill, compiled": (
        """
        index, value = torch.tensor([0, 2], device="flagos"), torch.tensor(2.0, device="flagos", requires_grad=True)

        def gradients(function):
            return [g.sum().item() for g in torch.autograd.grad(function(x, value).sum(), (x, value))]

        def fill(x, value):
            return x.index_fill(0, index, value)

        try:
            assert gradients(torch.compile(fill, backend="aot_eager")) == [15.0, 10.0]
        except torch._dynamo.exc.BackendCompilerFailed:
            assert torch.__version__ < "2.13"
        print(gradients(fill))
        """,
        "[15.0, 10.0]",
    ),
    # The thread of the backward pass is the last to hold the mode in a fraction of the passes, the larger on one CPU.
    "a mode that is dropped at exit": (
        """
        import os, threading, time

        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        dropped = threading.Event()

        class Slow(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

            def __del__(self):
                if threading.current_thread() is not threading.main_thread():
                    dropped.set()
                    for _ in range(500):
                        time.sleep(0.001)

        for _ in range(20_000):
            y = x.exp().sum()
            with Slow():
                y.backward()
            time.sleep(0.0001)
            if dropped.is_set():
                print("dropped by the other thread")
                break
        """,
        "dropped by the other thread",
    ),
}

BEFORE = """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from flagos_backend.frontends.torch import autoload

    assert autoload.enable() == ""
    x = torch.randn(5, 5, device="flagos", requires_grad=True)

    def raises(expected, call):
        try:
            call()
        except expected as error:
            print(error)
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_backward_pass_leaves_the_process_alive(name: str) -> None:
    program, output = PROGRAMS[name]
    code = textwrap.dedent(BEFORE) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, output), done.stderr


def test_python_is_not_asked(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def type_(_: object) -> None:
        raise AssertionError("the guard asked Python")

    monkeypatch.setattr(registration._Guard, "type_", type_)
    x = torch.randn(5, 5, device=device, requires_grad=True)
    stream = torch.Stream(device=device)
    with stream:
        (x @ x).sum().backward()
    assert x.grad is not None and x.grad.device == device
    assert torch.accelerator.current_device_index() == 0


def test_its_answers(device: torch.device) -> None:
    """One for each function of the guard, through what of PyTorch asks for it."""
    torch.empty(0, device=device)  # torch.accelerator knows the device from its first use on
    assert torch.accelerator.current_device_index() == 0
    assert torch._C._accelerator_exchangeDevice(0) == 0
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.device_count() == 1
    stream = torch.Stream(device=device, priority=-1)
    torch.accelerator.set_stream(stream)
    for known in (stream, torch.accelerator.current_stream()):
        assert (known.device, known.stream_id, known.device_type) == (device, 0, 20)
        assert known.query()
        known.synchronize()
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    for event in (start, end):
        event.record(stream)
        stream.wait_event(event)
        assert event.query()
    with pytest.raises(RuntimeError, match="doesn't support"):
        start.elapsed_time(end)
