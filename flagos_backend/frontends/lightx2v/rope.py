"""The key flagos_rope: rotary position embedding in both layouts, of every form that LightX2V gives frequencies in."""

from __future__ import annotations

from typing import Any, Final

import torch
from lightx2v.common.ops.rope.template import RopeTemplate, broadcast_freqs
from torch import Tensor

from flagos_backend.frontends.lightx2v import functions
from flagos_backend.frontends.lightx2v.refusal import floats, refuse

KEY: Final = "flagos_rope"
_Pair = tuple[Tensor, Tensor]


class Rope(RopeTemplate):  # type: ignore[misc]
    """Rotates the pairs of x's last dimension: neighbours in the layout interleaved, halves in split_half.

    Frequencies: complex [S, (1,) D/2]; (cos, sin) of width D/2, or D with a value for each of a pair; or cos and sin
    one after the other, [S, (1,) D].
    """

    def prepare_freqs(self, freqs: Any, rotary_dim: int | None = None) -> Any:
        """Complex frequencies as cos and sin one after the other, f32 or the compute dtype, made once for all blocks;
        others as they are."""
        if isinstance(freqs, Tensor) and freqs.is_complex():
            return torch.cat((freqs.real, freqs.imag), dim=-1).to(self.compute_dtype).contiguous()
        return freqs

    def apply_single(
        self,
        x: Tensor,
        freqs: Any,
        rotary_dim: int | None = None,
        unsqueeze_dim: int = -2,
        positions: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """x [..., S, H, D] rotated, of its size and dtype; what lies beyond ``rotary_dim`` stays. ``positions``: int
        [S], the row of ``freqs`` for each token. Raises TypeError, ValueError or RuntimeError, naming the key."""
        width = x.shape[-1] if rotary_dim is None else rotary_dim
        floats(KEY, x=x)
        if width % 2 or not 0 < width <= x.shape[-1]:
            refuse(KEY, f"{width} of {x.shape[-1]} numbers are to be turned", "Take an even rotary_dim, at most D.")
        cosines, sines = self._pairs(freqs, width)
        if cosines[0].device != x.device:
            fact = f"x lies on {x.device} and the frequencies on {cosines[0].device}"
            refuse(KEY, fact, "Move them to one device.", RuntimeError)
        if positions is not None:
            cosines, sines = ((a[positions], b[positions]) for a, b in (cosines, sines))
        half = x[..., : width // 2]
        try:
            fitting = [
                tuple(broadcast_freqs(part.to(self.compute_dtype), half, unsqueeze_dim) for part in pair)
                for pair in (cosines, sines)
            ]
            torch.broadcast_shapes(half.shape, fitting[0][0].shape, fitting[1][0].shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            fact = f"frequencies of {list(cosines[0].shape)} do not fit x {list(x.shape)}"
            refuse(KEY, fact, "They have a row for each token of x, and positions if they have more.")
        out = functions.rotate(
            x[..., :width], (fitting[0][0], fitting[0][1]), (fitting[1][0], fitting[1][1]), self.layout
        )
        return torch.cat((out, x[..., width:]), dim=-1) if width < x.shape[-1] else out

    def _pairs(self, freqs: Any, width: int) -> tuple[_Pair, _Pair]:
        """Cosines and sines, each for the first and the second of the pairs."""
        if isinstance(freqs, Tensor):
            if freqs.is_complex():
                cos, sin = freqs.real, freqs.imag
            elif freqs.is_floating_point() and freqs.ndim and freqs.shape[-1] == width:
                cos, sin = freqs[..., : width // 2], freqs[..., width // 2 :]
            else:
                cure = f"A cache of cos and sin is of floats and {width} wide."
                refuse(KEY, f"frequencies are {list(freqs.shape)} of {freqs.dtype}", cure)
        elif isinstance(freqs, tuple | list) and len(freqs) == 2 and all(isinstance(f, Tensor) for f in freqs):
            cos, sin = freqs
        else:
            cure = "Pass a complex tensor, (cos, sin), or a cache of both."
            refuse(KEY, f"frequencies are a {type(freqs).__name__}", cure, TypeError)
        if cos.shape != sin.shape or not cos.ndim or cos.shape[-1] not in (width, width // 2):
            fact = f"cos is {list(cos.shape)} and sin {list(sin.shape)}"
            refuse(KEY, fact, f"Both are {width // 2} wide, or {width}.")
        if cos.shape[-1] == width // 2:
            return (cos, cos), (sin, sin)
        return self._of_each(cos), self._of_each(sin)

    def _of_each(self, whole: Tensor) -> _Pair:
        if self.layout == "interleaved":
            return whole[..., 0::2], whole[..., 1::2]
        first, second = whole.chunk(2, dim=-1)
        return first, second
