"""Units assigned to ranks, equally many to each, so that the error of their common output is small."""

from __future__ import annotations

import itertools

import torch

# Rounds of exchanges; each costs about as much as the exit projection forward and backward.
_ROUNDS = 32


@torch.no_grad()
def assign_units(errors: torch.Tensor, weight: torch.Tensor, units: int) -> list[int]:
    """The rank of each unit that makes ‖Σ_u errors[rank(u), :, u] · weight[u]‖² small; every rank gets equally many.

    `errors`, fp32 [ranks, tokens, units · width], is by how much each unit's activations are wrong on each rank, those
    of unit 0 first; `weight`, fp32 [units · width, outputs], is what they are multiplied by. First the sum of the
    units' own squared errors is minimised, exactly for two ranks; then units are exchanged between ranks as long as the
    error of the sum falls, where errors of different units also cancel.
    """
    ranks, _, size = errors.shape
    width = size // units
    own = _own_errors(errors, weight, units)
    rank_of = _balanced(own)
    step = max(1, units // (8 * ranks))
    wrong = _chosen(errors, rank_of, width)
    best = float((wrong @ weight).square().sum())
    for _ in range(_ROUNDS):
        towards = (wrong @ weight) @ weight.T
        # the change of the squared error if unit u alone went to rank q: [ranks, units]
        change = 2 * ((errors - wrong) * towards).sum(1).reshape(ranks, units, width).sum(-1)
        change += _own_errors(errors - wrong, weight, units)
        other = _exchanged(rank_of, change, step)
        if torch.equal(other, rank_of):
            break
        moved = _chosen(errors, other, width)
        cost = float((moved @ weight).square().sum())
        if cost < best:
            rank_of, wrong, best = other, moved, cost
        elif step == 1:
            break
        else:
            step = max(1, step // 2)
    return rank_of.tolist()


def _own_errors(errors: torch.Tensor, weight: torch.Tensor, units: int) -> torch.Tensor:
    """The squared error [ranks, units] of each unit's part of the output alone, summed over the tokens."""
    ranks, tokens, size = errors.shape
    width = size // units
    if width == 1:
        return errors.square().sum(1) * weight.square().sum(1)
    by_unit = weight.reshape(units, width, -1)
    gram = by_unit @ by_unit.transpose(1, 2)
    parts = errors.reshape(ranks, tokens, units, width)
    return torch.einsum("rtui,uij,rtuj->ru", parts, gram, parts)


def _chosen(errors: torch.Tensor, rank_of: torch.Tensor, width: int) -> torch.Tensor:
    """[tokens, units · width] of `errors`: those of each unit on its rank."""
    places = torch.arange(errors.shape[2])
    return errors[rank_of.repeat_interleave(width), :, places].T


def _balanced(own: torch.Tensor) -> torch.Tensor:
    """The rank [units] of each unit that makes the sum of `own` [ranks, units] small: best for every two ranks."""
    ranks, units = own.shape
    share = units // ranks
    rank_of = torch.arange(units) // share
    for _ in range(_ROUNDS):
        before = rank_of.clone()
        for first, second in itertools.combinations(range(ranks), 2):
            both = ((rank_of == first) | (rank_of == second)).nonzero()[:, 0]
            preference = (own[first] - own[second])[both]
            sorted_ = both[preference.argsort(stable=True)]
            rank_of[sorted_[:share]], rank_of[sorted_[share:]] = first, second
        if torch.equal(rank_of, before):
            break
    return rank_of


def _exchanged(rank_of: torch.Tensor, change: torch.Tensor, most: int) -> torch.Tensor:
    """`rank_of` after the most promising exchanges between every two ranks, at most `most` of each pair."""
    ranks, result = len(change), rank_of.clone()
    for first, second in itertools.combinations(range(ranks), 2):
        there = ((rank_of == first) & (result == first)).nonzero()[:, 0]
        back = ((rank_of == second) & (result == second)).nonzero()[:, 0]
        there = there[change[second, there].argsort(stable=True)[:most]]
        back = back[change[first, back].argsort(stable=True)[:most]]
        count = min(len(there), len(back))
        worth = change[second, there[:count]] + change[first, back[:count]] < 0
        result[there[:count][worth]], result[back[:count][worth]] = second, first
    return result
