"""torch.flagos and torch.accelerator: devices, memory, streams, events, seeds."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

flagos = torch.flagos


def test_checkpoint_and_others_ask_whether_the_device_is_open(device: torch.device) -> None:
    torch.ones(1, device=device)
    assert flagos._initialized


def test_devices(device: torch.device) -> None:
    torch.ones(1, device=device)
    assert flagos.is_available() and flagos.is_initialized()
    assert (flagos.device_count(), flagos.current_device()) == (1, 0)
    flagos.set_device("flagos:0")
    with flagos.device(0), flagos.device_of(torch.ones(1, device=device)), flagos.device_of(torch.ones(1)):
        pass
    properties = flagos.get_device_properties()
    assert properties.name == flagos.get_device_name(device)
    assert properties.total_memory > 0 and properties.multi_processor_count > 0
    assert torch.float32 in flagos.get_device_capability()["supported_dtypes"]
    assert torch.get_device_module("flagos") is flagos
    assert torch.bfloat16 in flagos.get_amp_supported_dtype() and flagos.is_bf16_supported()


def test_the_accelerator_of_a_program_that_uses_the_device(device: torch.device) -> None:
    torch.ones(1, device=device)
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1
    assert accelerator.current_accelerator() == torch.device("flagos")
    assert accelerator.current_device_index() == 0
    assert accelerator.memory_allocated() == flagos.memory_allocated()
    assert accelerator.current_stream().device == device
    accelerator.synchronize()
    accelerator.empty_cache()
    with accelerator.device_index(0):
        assert torch.ones(1, device=accelerator.current_accelerator()).is_flagos


def test_memory_is_counted(device: torch.device) -> None:
    gc.collect()
    flagos.reset_peak_memory_stats()
    flagos.reset_accumulated_memory_stats()
    before = flagos.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    del x
    assert flagos.memory_allocated() == flagos.memory_reserved() == before
    assert flagos.max_memory_allocated() == before + (1 << 20)
    stats = flagos.memory_stats()
    assert stats["allocated_bytes.all.freed"] == stats["allocated_bytes.all.allocated"] == 1 << 20
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 1
    assert "allocated_bytes.all.peak" in flagos.memory_summary()
    free, total = flagos.mem_get_info()
    assert 0 < free <= total


def test_a_memory_limit(device: torch.device) -> None:
    flagos.empty_cache()
    _, total = flagos.mem_get_info()
    flagos.set_per_process_memory_fraction((flagos.memory_allocated() + (1 << 20)) / total)
    try:
        torch.empty(1 << 10, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 8388608 bytes"):
            torch.empty(1 << 21, device=device)
    finally:
        flagos.set_per_process_memory_fraction(1.0)
    torch.empty(1 << 21, device=device)
    with pytest.raises(ValueError, match="Invalid fraction"):
        flagos.set_per_process_memory_fraction(2.0)


def test_streams_and_events() -> None:
    stream = flagos.Stream()
    start, end = flagos.Event(enable_timing=True), flagos.Event(enable_timing=True)
    assert isinstance(stream, torch.Stream) and isinstance(start, torch.Event)
    start.record()
    with flagos.stream(stream) as current:
        assert flagos.current_stream() is current is stream
        seen: list[torch.Stream] = []
        other = threading.Thread(target=lambda: seen.append(flagos.current_stream()))
        other.start()
        other.join()
        assert seen[0] is not stream
        torch.ones(100, device="flagos").sum()
    assert flagos.current_stream() is not stream
    stream.wait_stream(flagos.default_stream())
    stream.wait_event(stream.record_event())
    end.record(stream)
    end.synchronize()
    assert end.query() and stream.query()
    assert 0 < start.elapsed_time(end) < 1e5
    torch.ones(2, device="flagos").record_stream(stream)


def test_events_without_a_time() -> None:
    plain, timed = flagos.Event(), flagos.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="must be recorded"):
        timed.elapsed_time(flagos.Event(enable_timing=True))


RANDOM: list[Callable[[torch.device], Tensor]] = [
    lambda d: torch.rand(4, device=d),
    lambda d: torch.randn(4, device=d),
    lambda d: torch.randint(100, (8,), device=d),
    lambda d: torch.randint(5, 100, (8,), device=d),
    lambda d: torch.randperm(20, device=d),
    lambda d: torch.rand_like(torch.ones(4, device=d)),
    lambda d: torch.randn_like(torch.ones(4, device=d)),
    lambda d: torch.randint_like(torch.ones(8, device=d), 100),
    lambda d: torch.normal(0.0, 1.0, (4,), device=d),
    lambda d: torch.bernoulli(torch.full((64,), 0.5, device=d)),
    lambda d: torch.multinomial(torch.ones(20, device=d), 8),
    lambda d: torch.empty(4, device=d).exponential_(),
    lambda d: torch.nn.functional.dropout(torch.ones(64, device=d)),
    lambda d: torch.nn.functional.rrelu(-torch.ones(8, device=d), training=True),
    lambda d: torch.poisson(torch.full((8,), 5.0, device=d)),
    lambda d: torch.nn.functional.alpha_dropout(torch.ones(64, device=d), training=True),
]


@pytest.mark.parametrize("draw", RANDOM)
def test_random_numbers_have_a_stream_of_their_own(
    device: torch.device, draw: Callable[[torch.device], Tensor]
) -> None:
    host, state = torch.get_rng_state(), flagos.get_rng_state()
    first = draw(device)
    assert not torch.equal(first, draw(device))
    flagos.set_rng_state(state)
    assert torch.equal(first, draw(device))
    assert torch.equal(host, torch.get_rng_state())


def test_seeds(device: torch.device) -> None:
    torch.manual_seed(5)
    assert flagos.initial_seed() == 5
    first = torch.rand(3, device=device)
    flagos.manual_seed_all(5)
    assert torch.equal(first, torch.rand(3, device=device))
    assert flagos.seed() == flagos.initial_seed()
    with torch.random.fork_rng(devices=[0], device_type="flagos"):
        inside = torch.rand(3, device=device)
    assert torch.equal(inside, torch.rand(3, device=device))
    assert len(flagos.get_rng_state_all()) == len(flagos.default_generators) == 1
    flagos.set_rng_state_all(flagos.get_rng_state_all())


def test_generators(device: torch.device) -> None:
    generator = torch.Generator("flagos").manual_seed(3)
    assert generator.device == device
    first = torch.randn(3, generator=generator, device=device)
    copies = (generator.clone_state(), pickle.loads(pickle.dumps(generator)))
    assert all(made.device == device for made in copies)
    second = torch.randn(3, generator=generator, device=device)
    for made in copies:
        assert torch.equal(second, torch.randn(3, generator=made, device=device))
    assert torch.equal(first, torch.randn(3, generator=generator.manual_seed(3), device=device))
    assert not torch.equal(first, torch.randn(3, generator=torch.Generator("flagos"), device=device))


def test_generators_of_other_devices_are_refused(device: torch.device) -> None:
    """In PyTorch's words, however the generator is given."""
    x, host = torch.zeros(3, device=device), torch.Generator()
    calls: list[Callable[[], Any]] = [
        lambda: torch.randn(3, device=device, generator=host),
        lambda: torch.randint(0, 9, (3,), device=device, generator=host),
        lambda: torch.randperm(3, device=device, generator=host),
        lambda: torch.normal(0.0, 1.0, (3,), device=device, generator=host),
        lambda: torch.bernoulli(x, generator=host),
        lambda: torch.multinomial(x + 1, 1, generator=host),
        lambda: x.uniform_(generator=host),
        lambda: torch.nn.init.normal_(x, generator=host),
        lambda: x.random_(generator=torch.default_generator),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="Expected a 'flagos' device type for generator but found 'cpu'"):
            call()
    assert not x.any()


def test_random_numbers_for_another_device_are_drawn_there(device: torch.device) -> None:
    """randn_like of a tensor on the device, for the host: from the host's generator, as PyTorch does."""
    x = torch.zeros(3, device=device)
    flagos.manual_seed(1)
    state = flagos.get_rng_state()
    torch.default_generator.manual_seed(5)
    drawn = torch.randn_like(x, device="cpu")
    torch.default_generator.manual_seed(5)
    assert torch.equal(drawn, torch.randn(3))
    assert torch.equal(flagos.get_rng_state(), state)


def test_generators_of_the_host_are_as_before() -> None:
    generator = torch.Generator()
    assert type(generator) is torch._C.Generator
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator) and torch.Generator == torch._C.Generator
    assert pickle.loads(pickle.dumps(generator)).device.type == "cpu"
    assert copy.copy(torch.Generator("cpu").manual_seed(1)).initial_seed() == 1


def test_threads_share_the_device(device: torch.device) -> None:
    results: dict[int, Tensor] = {}

    def work(number: int) -> None:
        x = torch.full((16, 16), float(number), device=device, requires_grad=True)
        for _ in range(50):
            y = (x @ x).relu().sum()
            y.backward()
        assert x.grad is not None
        results[number] = x.grad

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert torch.equal(results[number].cpu(), torch.full((16, 16), 50.0 * 2 * 16 * number))


def test_no_memory_is_lost_in_training(device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 16, device=device)
    held = []
    for step in range(60):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if step % 20 == 19:
            held.append(flagos.memory_allocated())
    assert held[0] == held[-1]
