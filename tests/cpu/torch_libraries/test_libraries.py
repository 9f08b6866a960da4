"""Each library by the line that the README of frontends/torch has for it; PyTorch on the host is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
accelerate = pytest.importorskip("accelerate", reason="needs accelerate", exc_type=ImportError)
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors", exc_type=ImportError)

TOKENS = torch.tensor([[3, 4, 5]])


def logits(model: Any, device: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS.to(device)).logits
    return found


def test_torch_accelerator_once_it_is_used(device: torch.device) -> None:
    torch.ones(1, device=device)
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1
    assert accelerator.current_accelerator() == torch.device("flagos")
    accelerator.synchronize()
    accelerator.set_device_index(0)
    accelerator.set_stream(accelerator.current_stream())
    with accelerator.device_index(0):
        kept = torch.ones(1000, device=device)
    assert accelerator.memory_allocated() >= 4000 and accelerator.max_memory_allocated() >= 4000
    assert accelerator.memory_stats()["allocated_bytes.all.current"] >= kept.nbytes
    accelerator.reset_peak_memory_stats()
    accelerator.empty_cache()


# ---- safetensors and peft -------------------------------------------------------------------------------------------


def test_safetensors(device: torch.device, tmp_path: Path) -> None:
    x = torch.randn(3, 2)
    safetensors_torch.save_file({"x": x.to(device)}, tmp_path / "x.safetensors")
    for loaded in (
        safetensors_torch.load_file(tmp_path / "x.safetensors", device=0),
        {name: value.to("flagos") for name, value in safetensors_torch.load_file(tmp_path / "x.safetensors").items()},
    ):
        assert loaded["x"].device == device
        assert_close(loaded["x"].cpu(), x, rtol=0, atol=0)


def test_peft(device: torch.device, model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    base = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base.to("flagos"), tmp_path)
    assert {parameter.device for parameter in loaded.parameters()} == {device}
    assert_close(logits(loaded, device).cpu(), logits(adapted, "cpu"), rtol=1e-4, atol=1e-4)


# ---- accelerate -----------------------------------------------------------------------------------------------------


Named = Callable[[str | None], None]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Named]:
    """Sets accelerate's variable for a device that it does not know. It keeps what it found for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    def name(device: str | None) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if device is None:
            monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
        else:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)

    yield name
    name(None)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_accelerate(device: torch.device, named: Named, precision: str, compiled: bool) -> None:
    named("flagos")
    accelerator = accelerate.Accelerator(mixed_precision=precision)
    assert accelerator.device.type == "flagos"
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    if compiled:
        layer.compile(backend="flagos")
    layer, optimizer, loader = accelerator.prepare(layer, optimizer, DataLoader(torch.ones(2, 2), batch_size=2))
    for batch in loader:
        assert batch.device == device
        accelerator.backward(layer(batch).sum())
        accelerator.clip_grad_norm_(layer.parameters(), 100.0)
        optimizer.step()
    assert layer.weight.device == device
    assert_close(layer.weight.detach().cpu(), before - 0.2)


def test_dispatched_models(device: torch.device, model: Any, saved: Path) -> None:
    expected = logits(model, "cpu")
    with accelerate.init_empty_weights():
        empty = type(model)(model.config)
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(saved / "model.safetensors"), device_map={"": 0})
    divided = accelerate.dispatch_model(
        copy.deepcopy(model), {"model": "flagos", "lm_head": "cpu"}, main_device="flagos"
    )
    for dispatched in (accelerate.dispatch_model(model, {"": "flagos"}), loaded, divided):
        assert next(dispatched.parameters()).device == device
        assert_close(logits(dispatched, device).cpu(), expected, rtol=1e-4, atol=1e-4)


# ---- transformers ---------------------------------------------------------------------------------------------------


def test_device_maps(device: torch.device, model: Any, saved: Path) -> None:
    loaded = type(model).from_pretrained(saved, device_map="flagos")
    assert {parameter.device for parameter in loaded.parameters()} == {device}
    assert_close(logits(loaded, device).cpu(), logits(model, "cpu"), rtol=1e-4, atol=1e-4)


def test_pipelines(model: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "a": 3, "b": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="?")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="flagos")
    assert pipeline.model.device.type == "flagos"
    assert pipeline("a b", max_new_tokens=2)[0]["generated_text"].startswith("a b")


@pytest.mark.parametrize("compiled", [False, True])
def test_trainer(device: torch.device, model: Any, named: Named, compiled: bool, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 60, (4, 6))]

    def train(model: Any, **place: Any) -> tuple[str, Any]:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, disable_tqdm=True, report_to=[], **place
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return arguments.device.type, model

    ours = copy.deepcopy(model)
    if compiled:
        ours.compile(backend="flagos")
    named("flagos")
    assert train(ours)[0] == "flagos" and next(ours.parameters()).device == device
    named(None)
    assert train(model, use_cpu=True)[0] == "cpu"
    for mine, host in zip(ours.parameters(), model.parameters(), strict=True):
        assert_close(mine.detach().cpu(), host.detach(), rtol=1e-3, atol=1e-4)


# ---- Lightning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
def test_lightning(device: torch.device, mixed: bool) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="needs Lightning")
    from flagos_backend.frontends.torch.lightning import strategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.devices: set[torch.device] = set()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.devices |= {batch.device, self.layer.weight.device}
            found: torch.Tensor = self.layer(batch)
            assert found.dtype == (torch.bfloat16 if mixed else torch.float32)
            return found.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Module()
    before = module.layer.weight.detach().clone()
    plugins = [lightning.plugins.MixedPrecision("bf16-mixed", device="flagos")] if mixed else None
    trainer = lightning.Trainer(strategy=strategy(), plugins=plugins, max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(torch.ones(4, 2), batch_size=2, num_workers=0))
    assert module.devices == {device}
    assert_close(module.layer.weight.detach().cpu(), before - 0.4)
