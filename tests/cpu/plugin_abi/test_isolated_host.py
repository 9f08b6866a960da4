"""What a backend in a process of its own asks of its host: callbacks, a key-value store; and its profiles."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cpu.native.harness import add_one, get, program, put
from plugin_abi import cache, isolation, loader, rights
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Context, Executable, HostArray
from support import isolation as isolated


@pytest.fixture(scope="module")
def backend() -> loader.Backend:
    accepted = loader.load(environment=isolated.environment()).accepted
    assert accepted is not None
    return accepted


CALLS_THE_HOST = """
ENTRY main {
  x = f32[3] parameter(0)
  ROOT called = f32[3] custom-call(x), custom_call_target="flagos.host_callback", backend_config="{\\"id\\": 1}"
}"""


def test_a_callback_uses_the_device_and_its_errors_are_the_programs(
    backend: loader.Backend, rng: np.random.Generator
) -> None:
    array = rng.standard_normal(3).astype(np.float32)

    def square(number: int, arguments: Sequence[HostArray], results: Sequence[HostArray]) -> None:
        x = np.frombuffer(arguments[0].data, np.float32)
        if x[0] > 100:
            raise FlagosStatusError(StatusCode.OUT_OF_RANGE, f"callback {number} takes no more than 100")
        one_more, _ = adds.execute([[put(context.devices[0].default_memory, x)]])
        np.frombuffer(results[0].data, np.float32)[:] = get(one_more[0][0]) ** 2

    with Context(backend, host_callback=square) as context:
        adds, calls = (Executable.compile(context, program(text)) for text in (add_one(3), CALLS_THE_HOST))
        launched = [calls.execute([[put(context.devices[0].default_memory, array)]])[0][0][0] for _ in range(5)]
        for output in launched:
            np.testing.assert_array_equal(get(output), (array + np.float32(1)) ** 2)
        beyond = put(context.devices[0].default_memory, np.full(3, 200, np.float32))
        with pytest.raises(FlagosStatusError, match="callback 1 takes no more than 100") as failed:
            calls.execute([[beyond]])[0][0][0].wait(60)
        assert failed.value.code == StatusCode.OUT_OF_RANGE


def test_a_process_that_ends_during_a_callback_leaves_the_host_its_functions(backend: loader.Backend) -> None:
    ended = []

    def survive(_number: int, _arguments: Sequence[HostArray], _results: Sequence[HostArray]) -> None:
        os.kill(isolated.process_of(context), signal.SIGKILL)
        time.sleep(0.3)
        ended.append(True)

    with Context(backend, host_callback=survive) as context:
        argument = put(context.devices[0].default_memory, np.ones(3, np.float32))
        calls = Executable.compile(context, program(CALLS_THE_HOST))
        with pytest.raises(FlagosStatusError) as failed:
            calls.execute([[argument]])[0][0][0].wait(60)
        assert failed.value.code == StatusCode.UNAVAILABLE
    assert ended  # the context ends after the last call of its functions


def test_a_profile_shows_what_the_process_did(backend: loader.Backend, rng: np.random.Generator) -> None:
    with Context(backend) as context:
        executable = Executable.compile(context, program(add_one(50)))
        context.profiler_start()
        argument = put(context.devices[0].default_memory, rng.standard_normal(50).astype(np.float32))
        executable.execute([[argument]])[1][0].wait(60)
        events = json.loads(context.profiler_stop())["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)


def test_the_process_loads_no_backend_but_its_own(
    backend: loader.Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch, which the backend imports, would try one for the device flagos, and the verdict would be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert backend.manifest is not None
    command = isolation.child_command(backend.manifest, rights=None)
    assert command is not None
    own = isolated.backend_of(command)
    assert isinstance(own, loader.Backend), own
    with Context(own, host_callback=lambda *_: None) as context:
        calls = Executable.compile(context, program(CALLS_THE_HOST))
        argument = put(context.devices[0].default_memory, np.ones(3, np.float32))
        np.testing.assert_array_equal(get(calls.execute([[argument]])[0][0][0]), np.zeros(3))
    verdicts = cache.cache_folder(os.environ, privileged=False)
    assert verdicts is not None and verdicts.is_relative_to(tmp_path)
    assert not list(verdicts.iterdir())


class _Store:
    """A key-value store of one process, in which all other processes have one device."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, key: bytes, timeout_ms: int) -> bytes:
        return self.values.get(key, b"1")

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value


def test_contexts_of_several_processes_need_sockets_and_use_the_hosts_store(backend: loader.Backend) -> None:
    with pytest.raises(FlagosStatusError, match=f"{rights.NEEDS_VARIABLE}=network") as refused:
        Context(backend, num_processes=2, key_value_store=_Store())
    assert refused.value.code == StatusCode.PERMISSION_DENIED
    assert backend.manifest is not None
    command = isolation.child_command(backend.manifest, rights=None)
    assert command is not None
    allowed = isolated.backend_of(command)
    assert isinstance(allowed, loader.Backend), allowed
    store = _Store()
    with Context(allowed, process_index=1, num_processes=2, key_value_store=store) as context:
        assert context.devices[0].process_index == 0
        assert context.addressable_devices[0].process_index == 1
        own = len(context.addressable_devices)
    assert store.values[b"flagos/devices/1"] == str(own).encode()
