"""The keys flagos, flagos-fp8 and flagos-int8: linear layers. Loading, LoRA and offloading are LightX2V's own."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from lightx2v.common.ops.mm.mm_weight import MMWeight, MMWeightQuantTemplate
from torch import Tensor

from flagos_backend.frontends.lightx2v import functions
from flagos_backend.frontends.lightx2v.refusal import floats, refuse

KEY: Final = "flagos"
# The first chips of NVIDIA's that multiply fp8 matrices with a scale for each row.
_FIRST_WITH_FP8 = (9, 0)


class Product(MMWeight):  # type: ignore[misc]
    """x [S, in] times the weight, kept as [in, out], plus bias and the branch of a LoRA: [S, out], of x's dtype."""

    def apply(self, input_tensor: Tensor) -> Tensor:
        """Raises TypeError, ValueError or RuntimeError, naming the key, for what does not fit the weight."""
        _check_loaded(KEY, self)
        weight, bias = self._get_actual_weight(), self._get_actual_bias()
        _check_input(KEY, self.weight_name, input_tensor, weight)
        floats(KEY, x=input_tensor, weight=weight, **({} if bias is None else {"bias": bias}))
        if input_tensor.dtype != weight.dtype:
            fact = f"x is of {input_tensor.dtype} and {self.weight_name} of {weight.dtype}"
            refuse(KEY, fact, "Convert one; LightX2V's variable DTYPE says what weights become.", TypeError)
        out = torch.mm(input_tensor, weight) if bias is None else torch.addmm(bias, input_tensor, weight)
        return out + self.apply_lora(input_tensor) if self.has_lora_branch else out


class _QuantizedProduct(MMWeightQuantTemplate):  # type: ignore[misc]
    """Weights of 8 bits with a scale for each output channel, times activations that are quantized by each token."""

    key: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.weight_need_transpose = True
        self.scale_force_fp32 = True
        self.load_func = self.load_quantized

    def load(self, weight_dict: dict[str, Tensor]) -> None:
        """Takes the weight and its scales, or quantizes the weight where the configuration has ``weight_auto_quant``.
        Raises ValueError without scales, or for scales that do not fit, and TypeError for a weight of another dtype."""
        from_memory = not self.lazy_load
        if from_memory and self.config.get("weight_auto_quant", False):
            weight_dict = self._quantized(weight_dict)
        if from_memory and self.weight_name in weight_dict and self.weight_scale_name not in weight_dict:
            self._refuse_missing_scales()
        try:
            self.load_quantized(weight_dict)
        except Exception as error:
            if self.weight_scale_name in str(error):  # of a file
                self._refuse_missing_scales(error)
            raise
        self.post_process()
        self._check_weights()

    def _quantized(self, weight_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = weight_dict.get(self.weight_name)
        if weight is None or self.weight_scale_name in weight_dict:
            return weight_dict
        floats(self.key, weight=weight)
        quantized, scale = functions.quantize_rows(weight, self.dtype)
        return {**weight_dict, self.weight_name: quantized, self.weight_scale_name: scale}

    def _refuse_missing_scales(self, error: Exception | None = None) -> None:
        raise ValueError(
            f"{self.key}: {self.weight_name} comes without its scales, {self.weight_scale_name}. Quantize the "
            "checkpoint with LightX2V's tools/convert/converter.py, set weight_auto_quant in the configuration of the "
            f"weight, or take the key {KEY}."
        ) from error

    def _check_weights(self) -> None:
        for prefix, suffix in (("", ""), ("pin_", ""), ("", "_cuda_buffer")):
            weight, scale = (getattr(self, f"{prefix}{part}{suffix}", None) for part in ("weight", "weight_scale"))
            if weight is not None:
                self._check_weight(weight, scale)

    def _check_weight(self, weight: Tensor, scale: Tensor | None) -> None:
        if weight.dtype is not self.dtype:
            cure = f"It takes {self.dtype}: quantize the checkpoint so, or take the key of what it is."
            refuse(self.key, f"{self.weight_name} is of {weight.dtype}", cure, TypeError)
        if scale is None:
            self._refuse_missing_scales()
            return
        if weight.ndim != 2 or scale.numel() != weight.shape[1] or scale.shape[:1] != weight.shape[1:]:
            fact = f"{self.weight_scale_name} is {list(scale.shape)} for {weight.shape[1]} output channels"
            refuse(self.key, fact, f"It takes one scale a channel, [{weight.shape[1]}, 1].")
        if self.dtype is torch.float8_e4m3fn:
            _check_fp8_device(self.key, self.weight_name, weight)

    def apply(self, input_tensor: Tensor) -> Tensor:
        """x [S, in]: [S, out], of x's dtype; a LoRA's differences are added in it. Raises TypeError, ValueError
        or RuntimeError, naming the key, for what does not fit the weight."""
        _check_loaded(self.key, self)
        weight, scale, bias = self.weight, self.weight_scale, self._get_actual_bias()
        if scale is None:
            self._refuse_missing_scales()
        _check_input(self.key, self.weight_name, input_tensor, weight)
        floats(self.key, x=input_tensor, scale=scale, **({} if bias is None else {"bias": bias}))
        if weight.dtype is not self.dtype:
            refuse(self.key, f"{self.weight_name} is of {weight.dtype}", f"It takes {self.dtype}.", TypeError)
        x, x_scale = functions.quantize_rows(input_tensor, self.dtype)
        row = scale.reshape(1, -1)
        out = functions.quantized_product(x, x_scale, weight, row, bias, input_tensor.dtype)
        if hasattr(self, "weight_diff"):
            out = out + torch.mm(input_tensor, self.weight_diff)
        return out + self.apply_lora(input_tensor) if self.has_lora_branch else out


class Fp8Product(_QuantizedProduct):
    """e4m3 weights and activations. On accelerators it takes matrix units that have fp8; on the host the products of
    the 8-bit numbers are computed in f32."""

    key = "flagos-fp8"
    dtype = torch.float8_e4m3fn


class Int8Product(_QuantizedProduct):
    """int8 weights and activations, summed in int32."""

    key = "flagos-int8"
    dtype = torch.int8


def _check_loaded(key: str, layer: Any) -> None:
    if getattr(layer, "weight", None) is None:
        cure = "Call load, and to_cuda or load_state_dict where weights are offloaded."
        refuse(key, f"{layer.weight_name} is not loaded", cure, RuntimeError)


def _check_input(key: str, name: str, x: Tensor, weight: Tensor) -> None:
    floats(key, x=x)
    if x.ndim != 2 or x.shape[1] != weight.shape[0]:
        refuse(key, f"x is {list(x.shape)}, and {name} takes [S, {weight.shape[0]}]", "Pass a matrix of that width.")
    if x.device != weight.device:
        fact = f"x lies on {x.device} and {name} on {weight.device}"
        refuse(key, fact, "Move them to one device; to_cuda moves weights.", RuntimeError)


def _check_fp8_device(key: str, name: str, weight: Tensor) -> None:
    device = weight.device
    if device.type != "cuda":
        return
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _FIRST_WITH_FP8:
        cure = "Take flagos-int8, or flagos with the checkpoint as it was."
        refuse(key, f"{torch.cuda.get_device_name(device)} multiplies no fp8 matrices by rows", cure, RuntimeError)
    if any(size % functions.FP8_MULTIPLE for size in weight.shape):
        cure = "Its products take multiples of 16: leave this layer as it was, with the key flagos."
        refuse(key, f"{name} is {list(weight.shape)[::-1]}", cure)
