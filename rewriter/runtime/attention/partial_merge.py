"""Partial outputs of attention merged as they arrive; `rewriter.kernels.merge` merges those that are all there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rewriter.kernels import accumulation_dtype


def unseen(q_BHSD: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
    """(o_BHSE, lse_BHS) = (0, −inf) of queries that have seen no key, in the accumulation dtype."""
    o = q_BHSD.new_zeros(*q_BHSD.shape[:-1], v_BKTE.shape[-1], dtype=accumulation_dtype(q_BHSD.dtype))
    return o, o.new_full(o.shape[:-1], -torch.inf)


def merge_in_turn(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(o, lse) in the accumulation dtype of parts of which each is made when the one before is merged."""
    merger = Merger()
    for o, lse in parts:
        merger.add(o, lse)
    return merger.result()


class Merger:
    """Merges parts as they arrive, so that only the sum and one part are in memory.

    Numerator and denominator are kept apart until the end: dividing by a running log-sum-exp after every part would
    leave weights that add up to 1 ± |lse| · ε only.
    """

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, o: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """A part: o [..., S, E], lse [..., S]. It is copied, never written to.

        `rows` are those of all S that it is of, once a part of all of them has been added.
        """
        if self._sums is None:
            dtype = accumulation_dtype(o.dtype)
            self._sums = o.to(dtype, copy=True), lse.to(dtype, copy=True), torch.ones_like(lse, dtype=dtype)
        else:
            numerator, top, denominator = self._sums
            add_part(numerator[..., rows, :], top[..., rows], denominator[..., rows], o, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """(o, lse) in the accumulation dtype. At least one part must have been added."""
        if self._sums is None:
            raise ValueError("no part was added")
        return merged(*self._sums)


def add_part(numerator: Tensor, top: Tensor, denominator: Tensor, o: Tensor, lse: Tensor) -> None:
    """Add (o, lse) to running sums, in place; they may be views.

    numerator [..., E] = Σ exp(l_p − top) · o_p, top [...] = max l_p, denominator [...] = Σ exp(l_p − top). Sums begin
    as the first part and denominator 1; a row of numerator 0 and top −inf is one to which nothing was added.
    """
    largest = torch.maximum(top, lse)
    # where both are −inf, −inf − −inf would be NaN: weigh with exp(−inf − 0) = 0 instead
    shift = largest.masked_fill(largest == -torch.inf, 0)
    before, now = torch.exp(top - shift), torch.exp(lse - shift)
    numerator.mul_(before.unsqueeze(-1)).addcmul_(o.to(numerator.dtype), now.unsqueeze(-1))
    denominator.mul_(before).add_(now)
    top.copy_(largest)


def merged(numerator: Tensor, top: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) from running sums."""
    # the largest part weighs 1, so that a row's denominator is at least 1, or 0 if nothing saw a key
    denominator = denominator.clamp(min=1)
    return numerator / denominator.unsqueeze(-1), top + denominator.log()


# --- attention sinks: a logit per head that takes probability from the keys and returns no value ---


def fold_sinks(o_BHSE: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o', lse') of o and lse, both in the accumulation dtype; themselves without sinks. A query that saw no key keeps
    o' = 0.

    A sink is a key with value 0, one more partial result, which can be merged last, whichever ranks made the others:
    lse' = log(exp(lse) + exp(sink)), o' = o · exp(lse − lse'). The backward of the keys is unchanged with (o', lse').
    """
    if sinks_H is None:
        return o_BHSE, lse_BHS
    total = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    return o_BHSE * torch.exp(lse_BHS - total)[..., None], total


def sinks_gradient(do_BHSE: Tensor, o_BHSE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """dsink [H] = −Σ exp(sink − lse') · rowsum(do ∘ o') in the dtype of the sinks, from these queries, with what
    `fold_sinks` gave."""
    weight = torch.exp(sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS)
    delta = (do_BHSE.to(lse_BHS.dtype) * o_BHSE.to(lse_BHS.dtype)).sum(-1)  # a product of matrices would be autocast
    return -(weight * delta).sum((0, 2)).to(sinks_H.dtype)
