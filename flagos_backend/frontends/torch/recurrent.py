"""LSTM and GRU cells: PyTorch fuses them on devices other than the host, and has no functions of the host for them.
What the device computes, and what torch.compile takes apart.

Gates are in PyTorch's order: input, forget, cell, output; reset, update, new. Shapes: [N, gates * H].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_thnn_fused_lstm_cell: hidden state, cell state, and the gates' values for the backward."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    ingate, forget, cell, out = gates.chunk(4, 1)
    ingate, forget, cell, out = ingate.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * cx + ingate * cell
    return out * cy.tanh(), cy, torch.cat([ingate, forget, cell, out], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_lstm_cell_backward_impl: gradients of gates, cell state and bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    ingate, forget, cell, out = workspace.chunk(4, 1)
    squashed = cy.tanh()
    g_hidden = torch.zeros_like(squashed) if grad_hy is None else grad_hy
    g_cell = g_hidden * out * (1 - squashed * squashed)
    if grad_cy is not None:
        g_cell = g_cell + grad_cy
    grads = torch.cat(
        [
            g_cell * cell * ingate * (1 - ingate),
            g_cell * cx * forget * (1 - forget),
            g_cell * ingate * (1 - cell * cell),
            g_hidden * squashed * out * (1 - out),
        ],
        1,
    )
    return grads, g_cell * forget, grads.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_thnn_fused_gru_cell: hidden state, and [reset, update, new, hx, hidden part of new] for the backward."""
    i_reset, i_update, i_new = _biased(input_gates, input_bias).chunk(3, 1)
    h_reset, h_update, h_new = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (i_reset + h_reset).sigmoid(), (i_update + h_update).sigmoid()
    new = (i_new + reset * h_new).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, h_new], 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_gru_cell_backward: gradients of input gates, hidden gates, hx and both biases."""
    reset, update, new, hx, h_new = workspace.chunk(5, 1)
    g_update = grad_hy * (hx - new) * update * (1 - update)
    g_new = grad_hy * (1 - update) * (1 - new * new)
    g_reset = g_new * h_new * reset * (1 - reset)
    g_input = torch.cat([g_reset, g_update, g_new], 1)
    g_hidden = torch.cat([g_reset, g_update, g_new * reset], 1)
    biases = (g_input.sum(0), g_hidden.sum(0)) if has_bias else (None, None)
    return g_input, g_hidden, grad_hy * update, *biases


#: By operator.
CELLS: Final[Mapping[Any, Callable[..., tuple[Tensor | None, ...]]]] = {
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
}
