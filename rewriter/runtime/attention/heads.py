"""The exchange by heads (DeepSpeed Ulysses, arXiv 2309.14509): from all heads of a rank's tokens to a rank's heads of
more tokens, and back. With a grid of (P, 1, 1) it is the full algorithm; with h < P each of h sets of ranks is left
with attention over H/h heads, of any kind.

q, k and v travel in one all-to-all, as one tensor. Key/value heads are repeated only where there are fewer than h of
them: max(K, h) travel. The gradients of the copies are summed in fp32 where the tokens live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.attention2d_gathered import interleaved
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.exchange import all_to_all_start


def to_heads(tensors: Sequence[Tensor], mesh: AttentionMesh, name: str) -> tuple[Tensor, ...]:
    """[B, heads, n, D] of own tokens → [B, max(heads / h, 1), h·n, D] of h ranks' tokens, for each of `tensors`.

    Rank a of h gets the heads that its query heads a·H/h … need. Tokens come out sorted: t ≡ i + r·j (mod rc).
    """
    parts = [[own_heads(t, rank, mesh.heads) for t in tensors] for rank in range(mesh.heads)]
    return interleaved(all_to_all_start(parts, mesh.by_heads, name).wait())


def to_tokens(tensors: Sequence[Tensor], mesh: AttentionMesh, name: str) -> tuple[Tensor, ...]:
    """The way back of `to_heads`: [B, heads, h·n, D] of h ranks' tokens → [B, h · heads, n, D] of own ones."""
    parts = [[t[:, :, rank :: mesh.heads] for t in tensors] for rank in range(mesh.heads)]
    arrived = all_to_all_start(parts, mesh.by_heads, name).wait()
    return tuple(torch.cat(t, 1) if mesh.heads > 1 else t[0] for t in zip(*arrived, strict=True))


def own_heads(x_BHSD: Tensor, rank: int, ranks: int) -> Tensor:
    """The run of heads that rank `rank` of `ranks` needs: one that others need too, where there are fewer heads than
    ranks."""
    heads = x_BHSD.shape[1]
    return x_BHSD.narrow(1, rank * heads // ranks, max(1, heads // ranks))


def summed_copies(x_BHSD: Tensor, heads: int) -> Tensor:
    """[B, heads, S, D]: neighbouring heads of `x` are gradients of copies of one."""
    copies = x_BHSD.shape[1] // heads
    if copies == 1:
        return x_BHSD
    return x_BHSD.unflatten(1, (heads, copies)).sum(2, dtype=accumulation_dtype(x_BHSD.dtype)).to(x_BHSD.dtype)
