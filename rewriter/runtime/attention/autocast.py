"""What torch.autocast asks of attention: it knows `scaled_dot_product_attention`, but no operators of ours."""

from __future__ import annotations

import torch
from torch import Tensor


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` cast as autocast casts the arguments of scaled_dot_product_attention: not fp64, and none outside of it.

    Queries and keys that were rotated are often fp32 there, where values are bf16.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
