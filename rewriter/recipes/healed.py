"""Recipes that real models were healed from, by the project's own runs (benchmarks/healing)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

HEALED = 0.10  # a recipe heals where a run ends within it of the original's loss
FILE = Path(__file__).parent / "healed.yaml"


@dataclass(frozen=True)
class HealedRun:
    """A run of `rewrite adapt`: `ranks` that the recipe was bound to (None: any), `parameters` of the model, `above`:
    the loss at the end over the original's, less one."""

    recipe: str
    model: str
    parameters: int
    ranks: int | None
    tokens: int
    above: float


@cache
def healed_runs() -> tuple[HealedRun, ...]:
    """All that were recorded."""
    return tuple(HealedRun(**row) for row in yaml.safe_load(FILE.read_text(encoding="utf-8")))
