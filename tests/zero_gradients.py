"""What a rank of `zero_optimizer` holds of a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def gradient_of(optimizer: Any, parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's gradient: zeros elsewhere, None where it has no part or none was computed.

    In the parameter's shape and the master weights' dtype; summed over the group it is the whole gradient.
    """
    for _, held in optimizer._places:
        if held.parameter is parameter and held.master is not None and held.master.grad is not None:
            whole = held.master.grad.new_zeros(parameter.numel())
            whole[held.mine.source] = held.master.grad
            return whole.view(parameter.shape)
    return None
