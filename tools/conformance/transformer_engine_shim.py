"""Pytest plugin: gives TransformerEngine's tests of fusible operations ours in place of its own, and nothing more.

Modules named transformer_engine hold what those tests import. Quantised types are names without content: a case that
needs one is not applicable. Tests whose default device is CUDA run on the device of FLAGOS_CONFORMANCE_DEVICE.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flagos_backend.frontends.torch import ops
from flagos_backend.frontends.torch.ops.basic import grouped
from flagos_backend.frontends.torch.ops.fuser import OperationFuser
from tools.conformance.pytest_files import NOT_APPLICABLE
from tools.conformance.transformer_engine import DEVICE

_THEIRS = "cuda"
_QUANTISED = "quantised operands: TransformerEngine has them on CUDA devices alone, and these operations not yet"
#: Of tests without a parameter that says so.
_QUANTISED_TESTS = ("test_fp8_scale_update", "test_situglu_mxfp8_quantization", "test_grouped_mlp_nvfp4_rht_srelu")
_HOST_AUTOCAST = (torch.bfloat16, torch.float16)


class _DType(enum.Enum):
    kByte = kInt32 = kFloat32 = kFloat16 = kBFloat16 = kFloat8E4M3 = kFloat8E5M2 = kFloat4E2M1 = enum.auto()


class _Unavailable:
    """A quantised type, or what makes one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip(NOT_APPLICABLE + _QUANTISED)


class _Role:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class _Recipe:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


@contextlib.contextmanager
def _unquantised(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    if enabled:
        pytest.skip(NOT_APPLICABLE + _QUANTISED)
    yield


def _available(return_reason: bool = False) -> Any:
    """Quantised cases are collected, so that they are counted."""
    return (True, "") if return_reason else True


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _unavailable(*names: str) -> dict[str, type]:
    return {name: type(name, (_Unavailable,), {}) for name in names}


def install() -> None:
    """Make the modules. Raises RuntimeError where another transformer_engine was imported."""
    if "transformer_engine" in sys.modules:
        raise RuntimeError("transformer_engine is imported already: this runs its tests against other operations")
    ours = {name: getattr(ops, name) for name in ops.__all__}
    _module("transformer_engine")
    _module("transformer_engine.common")
    recipes = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling")
    _module(
        "transformer_engine.common.recipe",
        Recipe=_Recipe,
        Format=enum.Enum("Format", ["E4M3", "E5M2", "HYBRID"]),
        **{name: type(name, (_Recipe,), {}) for name in recipes},
    )
    quantizers = ("Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "MXFP8Quantizer")
    available = ("is_fp8_available", "is_mxfp8_available", "is_nvfp4_available", "is_fp8_block_scaling_available")
    _module(
        "transformer_engine.pytorch",
        DType=_DType,
        QuantizerRole=_Role,
        is_bf16_available=lambda: True,
        autocast=_unquantised,
        quantized_model_init=_unquantised,
        **_unavailable("QuantizedTensor", "NVFP4Quantizer", "InferenceParams", *quantizers),
        **dict.fromkeys(available, _available),
    )
    _module("transformer_engine.pytorch._extra_state", UNSAFE_PICKLE_EXTRA_STATE_ENV="UNSAFE_PICKLE_EXTRA_STATE")
    _module("transformer_engine.pytorch.ops", **ours)
    _module("transformer_engine.pytorch.ops.basic", **ours)
    _module("transformer_engine.pytorch.ops.basic.grouped_linear", **vars(grouped))
    _module("transformer_engine.pytorch.ops.fused", **ours)
    _module("transformer_engine.pytorch.ops.fuser", OperationFuser=OperationFuser)
    # What the tests' helpers import for attention.
    _module("transformer_engine.pytorch.attention")
    _module("transformer_engine.pytorch.attention.dot_product_attention", _attention_backends={})
    _module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils",
        get_attention_backend=None,
        check_set_window_size=None,
        **_unavailable("AttentionParams", "AttentionLogging"),
    )
    _module("transformer_engine.pytorch.cpp_extensions")
    _module("transformer_engine.pytorch.cpp_extensions.fused_attn", FusedAttnBackend={})
    _module("transformer_engine.pytorch.module")
    _module("transformer_engine.pytorch.module.base", get_dummy_wgrad=None)
    if not torch.cuda.is_available():
        vars(torch.cuda).update(get_rng_state=torch.get_rng_state, set_rng_state=lambda state: None)


def _on_device(function: Any, device: str) -> None:
    """Change the device that a test or a helper runs on where nothing else is said."""
    function = inspect.unwrap(function)
    if isinstance(function, types.FunctionType) and function.__kwdefaults__ is not None:
        for name, value in function.__kwdefaults__.items():
            if value == _THEIRS:
                function.__kwdefaults__[name] = device


def _reason(item: pytest.Function, device: str) -> str:
    """Why a case says nothing about these operations on this device; empty where it does."""
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if item.originalname in _QUANTISED_TESTS or parameters.get("quantization") is not None:
        return _QUANTISED
    if device != _THEIRS and "device" in parameters and torch.device(parameters["device"]).type == _THEIRS:
        return "asks for CUDA beside the host by name"
    wanted = parameters.get("autocast_dtype")
    if device == "cpu" and wanted not in (None, *_HOST_AUTOCAST, parameters.get("model_dtype")):
        return f"PyTorch's autocast on the host does not go to {wanted}, it warns and does nothing"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    device = os.environ[DEVICE]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for owner in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
            for value in list(vars(owner).values()):
                _on_device(value, device)
    for item in items:
        if isinstance(item, pytest.Function) and (reason := _reason(item, device)):
            item.add_marker(pytest.mark.skip(reason=NOT_APPLICABLE + reason))


install()
