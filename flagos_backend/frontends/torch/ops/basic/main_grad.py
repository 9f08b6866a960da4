"""Weight gradients that go to the parameter's `main_grad` instead of `grad`, as distributed optimizers ask for it."""

from __future__ import annotations

from typing import Any

import torch


def accumulate(weight: torch.nn.Parameter, gradient: torch.Tensor, owner: str) -> torch.Tensor | None:
    """Add a gradient to `weight.main_grad`, or replace it where `weight.overwrite_main_grad` is set.

    Returns what autograd is to take for it: None, or zeros where the owner of the weight has hooks on its gradient and
    says so with the attribute `grad_added_to_main_grad`. Raises RuntimeError where there is no main_grad.
    """
    parameter: Any = weight
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if main is None:
        raise RuntimeError(
            f"{owner} accumulates into main_grad, and its weight has none. Set weight.main_grad before the backward."
        )
    if getattr(parameter, "overwrite_main_grad", False):
        main.copy_(gradient)
    else:
        main.add_(gradient)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(weight)
