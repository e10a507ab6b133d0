"""What mixes are estimated to cost, from what their parts cost alone and what other mixes were measured to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from rewriter.search.choices import Mix, Placement

_TRUST = 0.05  # weight of "costs add up" against one measured mix


@dataclass(frozen=True)
class Costs:
    """What each part of a mix costs alone, nats per token, and a `factor` by rewrite: how much more it costs in a
    mix."""

    placements: Mapping[Placement, float]
    formats: Mapping[tuple[int, str], float]
    factors: Mapping[str, float] = field(default_factory=dict)

    def by_rewrite(self, mix: Mix) -> dict[str, float]:
        """The sums of what the parts of a mix cost alone."""
        found: dict[str, float] = {}
        for p in mix.placements:
            found[p.rewrite] = found.get(p.rewrite, 0.0) + self.placements[p]
        for layer, name in mix.formats:
            found[name] = found.get(name, 0.0) + self.formats[layer, name]
        return found

    def of(self, mix: Mix) -> float:
        """The estimate."""
        return sum(self.factors.get(name, 1.0) * cost for name, cost in self.by_rewrite(mix).items())

    def weighted(self) -> tuple[dict[Placement, float], dict[tuple[int, str], float]]:
        """Costs of placements and formats with their factors."""
        placements = {p: self.factors.get(p.rewrite, 1.0) * cost for p, cost in self.placements.items()}
        return placements, {key: self.factors.get(key[1], 1.0) * cost for key, cost in self.formats.items()}

    def fitted(self, measured: Mapping[Mix, float]) -> Costs:
        """The same costs with the factors that estimate `measured` mixes best: least squares of relative errors, and of
        the factors' distance from 1."""
        mixes = [mix for mix, cost in measured.items() if cost > 0]
        names = sorted({name for mix in mixes for name in self.by_rewrite(mix)})
        if not mixes or not names:
            return self
        rows = torch.zeros(len(mixes), len(names), dtype=torch.float64)
        for row, mix in zip(rows, mixes, strict=True):
            for name, cost in self.by_rewrite(mix).items():
                row[names.index(name)] = cost / measured[mix]
        trust = _TRUST * torch.eye(len(names), dtype=torch.float64)
        left, right = rows.T @ rows + trust, rows.T @ torch.ones(len(mixes), dtype=torch.float64) + trust.sum(1)
        found = torch.linalg.solve(left, right).clamp(0.1, 10.0)
        return Costs(self.placements, self.formats, dict(zip(names, found.tolist(), strict=True)))


def agreement(estimated: Sequence[float], measured: Sequence[float], errors: Sequence[float]) -> float:
    """Kendall's τ of two orders, over the pairs that differ by more than their errors: 1 where they agree, 1 without
    pairs."""
    agreeing = pairs = 0
    for i, j in combinations(range(len(measured)), 2):
        if abs(measured[i] - measured[j]) > errors[i] + errors[j] and estimated[i] != estimated[j]:
            pairs += 1
            agreeing += 1 if (measured[i] < measured[j]) == (estimated[i] < estimated[j]) else -1
    return agreeing / pairs if pairs else 1.0
