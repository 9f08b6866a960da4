"""Worker of the model suite: trains a model for two steps and compares with eager PyTorch. Started by models.py."""

from __future__ import annotations

import copy
import warnings
import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tools.conformance import tensors
from tools.conformance.model_zoo import MODELS, declare_torchvision_operators
from tools.conformance.models import Way
from tools.conformance.results import Status
from tools.conformance.worker import serve

_STEPS = 2


def _train(module: torch.nn.Module, call: Any, inputs: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of a few steps of SGD, by name; on the CPU."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        torch.manual_seed(seed + step)
        optimizer.zero_grad()
        outcome = call(**inputs)
        loss = outcome if isinstance(outcome, torch.Tensor) else outcome.loss
        loss.backward()
        found[f"loss {step}"] = loss
        found.update({f"gradient of {n} {step}": p.grad for n, p in module.named_parameters() if p.grad is not None})
        found.update({f"buffer {n} {step}": b for n, b in module.named_buffers()})
        found = {name: value.detach().cpu().clone() for name, value in found.items()}
        optimizer.step()
    return found


def _run(name: str) -> tuple[Status, str]:
    model_name, way = name.split(", ")
    model = MODELS[model_name]
    seed = zlib.crc32(name.encode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        module, inputs = model.make().train(), model.inputs()
        reference = _train(twin := copy.deepcopy(module), twin, inputs, seed)
        try:
            found = _on_flagos(copy.deepcopy(module), inputs, Way(way), seed)
        except Exception as error:  # whatever it raises is the result of the test
            return Status.FAILED, f"{type(error).__name__}: {error}"[:1500]
        if found.keys() != reference.keys():
            return Status.FAILED, f"there is no {', '.join(reference.keys() - found.keys())}"[:1500]
        wide = _wide(inputs)
        # Gradients of what a normalization takes out again are zero but for roundings of the others.
        scale = max(float(g.abs().max()) for name, g in reference.items() if name.startswith("gradient") and g.numel())
        truth: dict[str, torch.Tensor] = {}
        for part, expected in reference.items():

            def exact(part: str = part) -> Any:
                if not truth:
                    truth.update(_train(double := copy.deepcopy(module).double(), double, wide, seed))
                return truth[part]

            difference = tensors.compare(found[part], expected, exact, scale=scale)
            if difference:
                return Status.FAILED, f"{part}: {difference}"
    return Status.PASSED, ""


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)


def _on_flagos(module: torch.nn.Module, inputs: dict[str, Any], way: Way, seed: int) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    if way is not Way.COMPILED_CPU:
        module = module.to("flagos")
        inputs = tree_map_only(torch.Tensor, lambda t: t.to("flagos"), inputs)
    call = module if way is Way.EAGER else torch.compile(module, backend="flagos")
    return _train(module, call, inputs, seed)


if __name__ == "__main__":
    declare_torchvision_operators()  # transformers imports torchvision too, where there is one
    serve(_run)
