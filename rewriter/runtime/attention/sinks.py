"""Attention sinks: a logit per head that takes probability from the keys and returns no value.

A sink is a key with value 0, so it is one more partial result and can be merged last, whichever ranks found the others:

    lse' = log(exp(lse) + exp(sink))        o' = o · exp(lse − lse')

The backward of the keys is unchanged with (o', lse'), and dsink = −Σ exp(sink − lse') · rowsum(do ∘ o').
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold(o_BHSE: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o', lse') of o and lse, both in the accumulation dtype; themselves without sinks. A query that saw no key keeps
    o' = 0."""
    if sinks_H is None:
        return o_BHSE, lse_BHS
    total = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    return o_BHSE * torch.exp(lse_BHS - total)[..., None], total


def gradient(do_BHSE: Tensor, o_BHSE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """dsink [H] in the dtype of the sinks, from these queries; `o` and `lse` are what `fold` gave."""
    weight = torch.exp(sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS)
    delta = (do_BHSE.to(lse_BHS.dtype) * o_BHSE.to(lse_BHS.dtype)).sum(-1)  # a product of matrices would be autocast
    return -(weight * delta).sum((0, 2)).to(sinks_H.dtype)
