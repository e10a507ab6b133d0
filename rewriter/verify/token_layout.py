"""Which tokens each rank of a sequence axis holds, and sequences taken apart and joined again, differentiably.

The runtime computes this otherwise. This one is the plain definition, so that each shows a fault of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rewriter.ops import SequencePlan


@dataclass(frozen=True)
class TokenLayout:
    """Sequences of `length` tokens over the ranks of `plan`, padded at the right to a multiple of `plan.multiple`."""

    plan: SequencePlan
    length: int

    @property
    def padded(self) -> int:
        multiple = self.plan.multiple
        return max(1, -(-self.length // multiple)) * multiple

    def tokens(self, rank: int) -> list[int]:
        """The positions of rank p's tokens: p, p + P, p + 2P, … or, zigzag, chunk p of 2P and its mirror image."""
        ranks = self.plan.ranks
        if self.plan.layout == "cyclic":
            return [t for t in range(self.padded) if t % ranks == rank]
        chunk = self.padded // (2 * ranks)
        return [t for t in range(self.padded) if t // chunk in (rank, 2 * ranks - 1 - rank)]

    def split(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        """Per rank, its tokens of `x` [length along `dim`]; padding is 0."""
        dim %= x.dim()
        padded = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, self.padded - self.length))
        places = [torch.tensor(self.tokens(r), device=x.device) for r in range(self.plan.ranks)]
        return tuple(padded.index_select(dim, p) for p in places)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """All tokens in their order, without padding, from every rank's own."""
        order = [t for r in range(self.plan.ranks) for t in self.tokens(r)]
        places = torch.tensor(order, device=parts[0].device).argsort()[: self.length]
        return torch.cat(tuple(parts), dim).index_select(dim, places)
