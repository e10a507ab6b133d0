"""Chunks of a sequence, in which a recurrence is a matrix, and decays between their tokens.

Logarithms of decays are summed in fp64: a sum over a chunk of strong decays, of −1000, has in fp32 an error that shows
in the decay from one token to the next. Only differences that are at most 0 are exponentiated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def chunked(x: Tensor, tokens: int, length: int = CHUNK) -> Tensor:
    """`x` [..., S, ...] as [..., chunks, length, ...], the last chunk filled up with zeros."""
    missing = -x.shape[tokens] % length
    if missing:
        x = F.pad(x, [*[0, 0] * (x.dim() - 1 - tokens), 0, missing])
    return x.unflatten(tokens, (-1, length))


def lower(length: int, like: Tensor, diagonal: int = 0) -> Tensor:
    """bool [length, length]: True where the column is at most the row plus `diagonal`."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril(diagonal)


def decay_matrix(log_L: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(log[i] − log[j]) [..., L, L] for j ≤ i, else 0, of sums of logarithms [..., L]."""
    difference = (log_L[..., :, None] - log_L[..., None, :]).to(dtype)
    return difference.masked_fill(~lower(log_L.shape[-1], log_L), -torch.inf).exp()
