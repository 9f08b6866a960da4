"""LSTM and GRU cells: PyTorch fuses them on devices other than the host, and has no functions of the host for them.

Gates are in PyTorch's order: input, forget, cell, output; reset, update, new. Shapes: [N, gates * H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flagos_backend.torch.device.memory import unwrap, wrap


def _inner(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else unwrap(tensor) for tensor in tensors)


def _wrapped(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else wrap(tensor.contiguous()) for tensor in tensors)


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_lstm_cell: hidden state, cell state, and the gates' values for the backward."""
    given = _inner(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    i, h, c, i_bias, h_bias = given
    assert i is not None and h is not None and c is not None
    ingate, forget, cell, out = (_biased(i, i_bias) + _biased(h, h_bias)).chunk(4, 1)
    ingate, forget, cell, out = ingate.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * c + ingate * cell
    return _wrapped(out * cy.tanh(), cy, torch.cat([ingate, forget, cell, out], 1))


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_lstm_cell_backward_impl: gradients of gates, cell state and bias."""
    g_hy, g_cy, c, new_c, gates = _inner(grad_hy, grad_cy, cx, cy, workspace)
    if g_hy is None and g_cy is None:
        return None, None, None
    assert c is not None and new_c is not None and gates is not None
    ingate, forget, cell, out = gates.chunk(4, 1)
    squashed = new_c.tanh()
    g_hidden = torch.zeros_like(squashed) if g_hy is None else g_hy
    g_cell = g_hidden * out * (1 - squashed * squashed)
    if g_cy is not None:
        g_cell = g_cell + g_cy
    grads = torch.cat(
        [
            g_cell * cell * ingate * (1 - ingate),
            g_cell * c * forget * (1 - forget),
            g_cell * ingate * (1 - cell * cell),
            g_hidden * squashed * out * (1 - out),
        ],
        1,
    )
    return _wrapped(grads, g_cell * forget, grads.sum(0) if has_bias else None)


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_gru_cell: hidden state, and [reset, update, new, hx, hidden part of new] for the backward."""
    i, h, x, i_bias, h_bias = _inner(input_gates, hidden_gates, hx, input_bias, hidden_bias)
    assert i is not None and h is not None and x is not None
    i_reset, i_update, i_new = _biased(i, i_bias).chunk(3, 1)
    h_reset, h_update, h_new = _biased(h, h_bias).chunk(3, 1)
    reset, update = (i_reset + h_reset).sigmoid(), (i_update + h_update).sigmoid()
    new = (i_new + reset * h_new).tanh()
    return _wrapped(new + update * (x - new), torch.cat([reset, update, new, x, h_new], 1))


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """aten::_thnn_fused_gru_cell_backward: gradients of input gates, hidden gates, hx and both biases."""
    grad, saved = _inner(grad_hy, workspace)
    assert grad is not None and saved is not None
    reset, update, new, x, h_new = saved.chunk(5, 1)
    g_update = grad * (x - new) * update * (1 - update)
    g_new = grad * (1 - update) * (1 - new * new)
    g_reset = g_new * h_new * reset * (1 - reset)
    g_input = torch.cat([g_reset, g_update, g_new], 1)
    g_hidden = torch.cat([g_reset, g_update, g_new * reset], 1)
    biases = (g_input.sum(0), g_hidden.sum(0)) if has_bias else (None, None)
    return _wrapped(g_input, g_hidden, grad * update, *biases)
