"""Worker of the model suite: trains a model for two steps and compares with eager PyTorch. Started by models.py."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flagos_backend.frontends.torch import autoload
from flagos_backend.frontends.torch.compile.backend import flagos
from tools.conformance import tensors
from tools.conformance.device import FLAGOS
from tools.conformance.model_zoo import MODELS, Model, declare_torchvision_operators, without_dropout
from tools.conformance.models import Way
from tools.conformance.records import HOST, Status
from tools.conformance.worker import serve

_STEPS = 2

_Inputs = dict[str, Any]
_Values = dict[str, torch.Tensor]


def _train(module: torch.nn.Module, call: Any, inputs: _Inputs, seed: int) -> _Values:
    """Losses, gradients and buffers of a few steps of SGD, by name; on the CPU."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    found: _Values = {}
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


class _Runner:
    """``device``: the type of the accelerator's tensors, where it has some."""

    def __init__(self, device: str) -> None:
        self._device, self._used = device, HOST.kind

    def __call__(self, name: str) -> tuple[Status, str]:
        model, way = name.split(", ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._run(MODELS[model], Way(way), zlib.crc32(name.encode()))

    def _run(self, model: Model, way: Way, seed: int) -> tuple[Status, str]:
        torch.manual_seed(seed)
        try:
            module, inputs = model.make().train(), model.inputs()
            if way is Way.COMPILED_ACCELERATOR:
                without_dropout(module)
            reference = _train(twin := copy.deepcopy(module), twin, inputs, seed)
        except Exception as error:  # its library is missing, say
            return Status.NOT_APPLICABLE, f"eager on the CPU: {type(error).__name__}: {error}"[:300]

        @functools.cache
        def truth() -> _Values:
            return _train(double := copy.deepcopy(module).double(), double, _wide(inputs), seed)

        if way is Way.COMPILED_ACCELERATOR:
            drawn = _difference(
                lambda: _train(twin := copy.deepcopy(module), twin, inputs, seed + _STEPS), reference, truth
            )
            if drawn:
                return Status.NOT_APPLICABLE, f"depends on random numbers, which differ between devices: {drawn}"
        difference = _difference(lambda: self._on_flagos(copy.deepcopy(module), inputs, way, seed), reference, truth)
        if difference and way is Way.COMPILED_ACCELERATOR:
            theirs = _difference(lambda: self._eagerly(copy.deepcopy(module), inputs, seed), reference, truth)
            if theirs:
                return Status.NOT_APPLICABLE, f"eager on {self._device}: {theirs}; compiled: {difference}"
        return (Status.FAILED, difference) if difference else (Status.PASSED, "")

    def _on_flagos(self, module: torch.nn.Module, inputs: _Inputs, way: Way, seed: int) -> _Values:
        torch._dynamo.reset()
        if way is not Way.COMPILED_CPU:
            self._used = self._device if way is Way.COMPILED_ACCELERATOR else FLAGOS
            if self._used == FLAGOS:
                autoload.enable()  # beside another accelerator it is not there by itself
            module, inputs = _moved(module, inputs, self._used)
        call = module if way is Way.EAGER else torch.compile(module, backend=flagos)
        return _train(module, call, inputs, seed)

    def _eagerly(self, module: torch.nn.Module, inputs: _Inputs, seed: int) -> _Values:
        module, inputs = _moved(module, inputs, self._device)
        return _train(module, module, inputs, seed)

    def probe(self) -> None:
        """Raises if the device computes no more."""
        (torch.ones(2, device=self._used) + 1).sum().item()


def _difference(run: Callable[[], _Values], reference: _Values, truth: Callable[[], _Values]) -> str:
    """What of what ``run`` gives is not as in ``reference``, or ""."""
    try:
        found = run()
    except Exception as error:  # whatever it raises is the result of the test
        return f"{type(error).__name__}: {error}"[:1500]
    if found.keys() != reference.keys():
        return f"there is no {', '.join(reference.keys() - found.keys())}"[:1500]
    # Gradients of what a normalization takes out again are zero but for roundings of the others.
    scale = max(float(g.abs().max()) for name, g in reference.items() if name.startswith("gradient") and g.numel())
    for part, expected in reference.items():
        difference = tensors.compare(found[part], expected, functools.partial(_part, truth, part), scale=scale)
        if difference:
            return f"{part}: {difference}"
    return ""


def _part(values: Callable[[], _Values], name: str) -> torch.Tensor:
    return values()[name]


def _wide(inputs: _Inputs) -> _Inputs:
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)


def _moved(module: torch.nn.Module, inputs: _Inputs, device: str) -> tuple[torch.nn.Module, _Inputs]:
    return module.to(device), tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)


if __name__ == "__main__":
    declare_torchvision_operators()  # transformers imports torchvision too, where there is one
    runner = _Runner(sys.argv[1])
    with tensors.exact_products():
        serve(runner, runner.probe)
