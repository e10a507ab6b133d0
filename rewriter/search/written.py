"""The chosen mix as a recipe file, with what was measured and predicted of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rewriter.recipes.recipe import Measured, MeasuredRise
from rewriter.search.choices import Mix, recipe_of
from rewriter.search.losses import Rise
from rewriter.search.result import SearchResult

_DIGITS = 5


def recipe_with_measurements(result: SearchResult, orders: Mapping[str, str]) -> str:
    """YAML that `rewrite MODEL --recipe FILE` takes. `orders`: by block, the rank of each of its units."""
    chosen, load = result.chosen, result.workload
    name = re.sub(r"[^a-z0-9]+", "-", f"searched-{result.fabric}-tp{result.ranks['tp'] * result.ranks['sp']}".lower())
    parts = ", ".join(f"{name} in {count}" for name, count in chosen.mix.counts().items())
    around = "" if chosen.mix.base == Mix.base else f"{chosen.mix.base} with "
    around += f"keys and values in {chosen.mix.keys}, " if chosen.mix.keys else ""
    words = f"{around}{parts} of the layers" if parts else f"{around}nothing rewritten"
    summary = f"Found by a search on {result.fabric} within a rise in loss of {result.budget:.3g}: {words}."
    recipe = recipe_of(chosen.mix, orders, name[:64], summary, result.text)
    measured = Measured(
        model=Path(result.model).name,
        fabric=result.fabric,
        tp=result.ranks["tp"],
        sp=result.ranks["sp"],
        workload=f"batch {load['batch']}, {load['prompt']} + {load['generate']} tokens",
        speedup=round(chosen.speedup, _DIGITS),
        seconds_per_token=float(f"{chosen.speed.decode:.{_DIGITS}g}"),
        text=result.text,
        loss=round(result.loss, _DIGITS),
        budget=result.budget,
        calibration=_rise(chosen.rise),
        held_out=None if chosen.held_out is None else _rise(chosen.held_out),
    )
    return recipe.model_copy(update={"measured": measured}).to_yaml()


def _rise(rise: Rise) -> MeasuredRise:
    return MeasuredRise(
        loss=round(rise.loss, _DIGITS),
        rise=round(rise.relative, _DIGITS),
        error=round(rise.relative_error, _DIGITS),
        kl=round(rise.kl, _DIGITS),
        seen=round(rise.seen / rise.loss, _DIGITS),
    )
