"""Which forward pass of a model is costed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardPass:
    """Which forward pass: `tokens` new ones of each of `batch` sequences; `keys` that a new token reads in attention,
    where there are earlier ones (0: the prompt, of which each token sees those before it).

    The static cache of `rewriter.runtime` is read in full, so `keys` is its length. `logits` is of how many last tokens
    the head is wanted (0: of all). `fused`: the module is compiled.
    """

    batch: int
    tokens: int
    keys: int = 0
    logits: int = 1
    fused: bool = True

    @property
    def is_decode(self) -> bool:
        return self.keys > 0
