"""The answer of a comparison in a sentence or two: what to run, and what that rests on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rewriter.common.numbers import digits, duration, percent, times
from rewriter.predict.results import ExactChoice, Prediction, RecipeComparison
from rewriter.recipes.healed import HEALED, healed_runs

LEAST = 1.05  # a smaller gain is not told from none: predicted gains are off by about as much
_ALIKE = 3.0  # a model of up to so many times the parameters is of the same size


def verdict(comparison: RecipeComparison) -> str:
    """What to run: the best exact choice that the engine has, or a recipe that gains more and heals; and what the
    prediction rests on. Empty without exact choices."""
    usable = [one for one in comparison.exact if one.available and one.fits]
    if not comparison.exact:
        return ""
    if not usable:
        return f"Nothing fits: {comparison.device} has too little memory for this model on so many GPUs."
    best = max(usable, key=lambda one: one.tokens_per_second)
    alike = next(one for one in comparison.exact if one.name == comparison.over)
    parts = (_exact(best, comparison), _recipe(alike, best, comparison), rests_on(comparison))
    return " ".join(part for part in parts if part)


def _exact(best: ExactChoice, comparison: RecipeComparison) -> str:
    alone = " Do not shard it." if best.tp == 1 and best.stages == 1 else ""
    how = f" ({comparison.engine}: {', '.join(best.switches)})" if best.switches else ""
    return (
        f"Best as it is: {best.name}{how}, {duration(best.decode_seconds)} per token and "
        f"{digits(best.tokens_per_second)} tokens/s.{alone}"
    )


def _recipe(over: ExactChoice, best: ExactChoice, comparison: RecipeComparison) -> str:
    """The recipe that gains most over the best exact choice; recipes are predicted without drafts."""
    changed = [p for p in comparison.predictions if p.kind == "approximating" and p.fits]
    found = max(changed, key=lambda p: p.tokens_per_second, default=None)
    if found is None:
        return ""
    gain, what = found.tokens_per_second / over.tokens_per_second, "that"
    if best.name != over.name:
        what = f"{over.name}, both without a draft" if "draft" in best.options else over.name
    if gain < LEAST:
        return f"No recipe gains 5 % over {what}: keep the model ({found.recipe} gives {times(gain)})."
    parts = f"a decode step {times(over.decode_seconds / found.decode.seconds)}, the prefill " + times(
        over.prefill_seconds / found.prefill.seconds
    )
    return f"{found.recipe} gives {times(gain)} of {what} end to end ({parts}); {heals(found, comparison.parameters)}."


def heals(p: Prediction, parameters: int) -> str:
    """Whether a recipe was seen to heal on as many ranks, at such a size."""
    runs = [run for run in healed_runs() if run.recipe == p.recipe]
    near = [r for r in runs if r.ranks in (None, p.tp) and 1 / _ALIKE <= r.parameters / max(1, parameters) <= _ALIKE]
    done = min(near, key=lambda run: run.above, default=None)
    if done is not None:
        said = "heals" if done.above <= HEALED else "did not heal"
        return f"it {said}: {done.model} ended {done.above:.0%} above its loss"
    where = "" if all(run.ranks is None for run in runs) else f" on {p.tp} ranks"
    smaller = min(runs, key=lambda run: run.above, default=None)
    seen = (
        "" if smaller is None else f" ({smaller.model}, {_size(smaller.parameters)}, ended {smaller.above:.0%} above)"
    )
    return f"nobody measured that it heals at this size{where}{seen}"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def rests_on(comparison: RecipeComparison) -> str:
    """What was measured, what is by formula, and how far published figures of such links are from predictions."""
    first = comparison.predictions[0]
    sums = "measured on such a machine"
    if comparison.modelled or first.extrapolated:
        sums = "by formula" if comparison.modelled else "extrapolated from those among other numbers of GPUs"
    share = percent(first.decode.measured_seconds, first.decode.compute_seconds)
    kernels = f"{share} of the computing measured" if first.decode.measured_seconds else "computing by roofline"
    known = published().get(comparison.link)
    reach = (
        f"{known['points']} published figures over such a link are {known['median']:.0%} off in the median"
        if known
        else "no published figure over such a link is within reach"
    )
    return f"Rests on: all-reduces {sums}, {kernels}; {reach}."


@cache
def published() -> dict[str, dict[str, Any]]:
    """By kind of link, how many published figures there are and how far predictions are from them
    (benchmarks/predict/backtest.py writes it)."""
    text = (Path(__file__).parent / "backtest.yaml").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return known
