"""The keys flagos_rms_norm and flagos_layer_norm. Loading, LoRA differences and offloading are LightX2V's own."""

from __future__ import annotations

from typing import Final

from lightx2v.common.ops.norm.layer_norm_weight import LNWeightTemplate
from lightx2v.common.ops.norm.rms_norm_weight import RMSWeightTemplate
from torch import Tensor

from flagos_backend.frontends.lightx2v import functions
from flagos_backend.frontends.lightx2v.refusal import floats, refuse

RMS_KEY: Final = "flagos_rms_norm"
LAYER_KEY: Final = "flagos_layer_norm"


class RmsNorm(RMSWeightTemplate):  # type: ignore[misc]
    """x [..., dim] over its root mean square, computed in f32 and rounded once; of x's dtype."""

    def apply(self, input_tensor: Tensor) -> Tensor:
        """Raises TypeError, ValueError or RuntimeError, naming the key, for what does not fit the weight."""
        weight = self._get_actual_weight()
        _check(RMS_KEY, self.weight_name, input_tensor, weight=weight)
        return functions.rms_norm(input_tensor, weight, self.eps)


class LayerNorm(LNWeightTemplate):  # type: ignore[misc]
    """x [..., dim] without its mean, over its deviation; with f32 statistics, rounded once. Of x's dtype, or of the
    inference dtype where LightX2V keeps sensitive layers in another."""

    def apply(self, input_tensor: Tensor) -> Tensor:
        """Raises TypeError, ValueError or RuntimeError, naming the key, for what does not fit weight and bias."""
        weight, bias = self._get_actual_weight(), self._get_actual_bias()
        _check(LAYER_KEY, self.weight_name, input_tensor, weight=weight, bias=bias)
        out = functions.layer_norm(input_tensor, weight, bias, self.eps)
        return out.to(self.infer_dtype) if self.sensitive_layer_dtype != self.infer_dtype else out


def _check(key: str, name: str | None, x: Tensor, **weights: Tensor | None) -> None:
    if name is not None and weights["weight"] is None:
        refuse(key, f"{name} is not loaded", "Call load, and to_cuda where weights are offloaded.", RuntimeError)
    given = {kind: weight for kind, weight in weights.items() if weight is not None}
    floats(key, x=x, **given)
    for kind, weight in given.items():
        if x.ndim < 1 or weight.shape != x.shape[-1:]:
            fact = f"the {kind} of {name} is {list(weight.shape)} and x {list(x.shape)}"
            refuse(key, fact, f"The last size of x is that of the {kind}.")
