"""The answer of a comparison in a sentence or two: what to run, and what that rests on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rewriter.common.numbers import digits, duration, percent, times
from rewriter.predict.results import ExactChoice, Prediction, RecipeComparison
from rewriter.recipes.healed import HEALED, healed_runs

LEAST = 1.05  # a smaller gain is not told from none: predicted gains are off by about as much
_ALIKE = 3.0  # a model of up to so many times the parameters is of the same size
_REACH = 4.0  # a link of up to so many times the bandwidth is alike
_SUMS = {
    "measured": "measured on such a machine",
    "extrapolated": "extrapolated from those among other numbers of GPUs",
    "by formula": "by formula",
}


class Decision(NamedTuple):
    """`best`: the fastest exact choice of the engine that fits, if one does. `over`: the one that recipes are compared
    with. `recipe`: the fastest recipe that fits, if its whole generations gain LEAST over `over`."""

    best: ExactChoice | None
    over: ExactChoice
    recipe: Prediction | None


def decide(comparison: RecipeComparison) -> Decision | None:
    """The decision that a comparison gives; None without exact choices."""
    if not comparison.exact:
        return None
    usable = [one for one in comparison.exact if one.available and one.fits and not one.rounds]
    best = max(usable, key=lambda one: one.tokens_per_second, default=None)
    over = next((one for one in comparison.exact if one.name == comparison.over), comparison.exact[0])
    found = max(_runnable(comparison), key=lambda p: p.tokens_per_second, default=None)
    gains = best is not None and found is not None and found.end_to_end >= LEAST
    return Decision(best, over, found if gains else None)


def _runnable(comparison: RecipeComparison) -> list[Prediction]:
    return [p for p in comparison.predictions if p.kind in ("approximating", "exact") and p.fits]


def verdict(comparison: RecipeComparison) -> str:
    """The advice: the best exact choice that the engine has, or a recipe that gains more and heals; and what the
    prediction rests on. Empty without exact choices."""
    found = decide(comparison)
    if found is None:
        return ""
    if found.best is None:
        return f"Nothing fits: {comparison.device} has too little memory for this model on so many GPUs."
    parts = (_exact(found.best, comparison), _recipe(found, found.best, comparison), rests_on(comparison))
    return " ".join(part for part in parts if part)


def _exact(best: ExactChoice, comparison: RecipeComparison) -> str:
    alone = " Do not shard it." if best.tp == 1 and best.stages == 1 else ""
    how = f" ({comparison.engine}: {', '.join(best.switches)})" if best.switches else ""
    return (
        f"Best as it is: {best.name}{how}, {duration(best.decode_seconds)} per token and "
        f"{digits(best.tokens_per_second)} tokens/s.{alone}"
    )


def _recipe(decision: Decision, best: ExactChoice, comparison: RecipeComparison) -> str:
    """The recipe that gains most over the best exact choice; recipes are predicted without drafts, on all ranks."""
    over, found = decision.over, decision.recipe
    what = "that" if best.name == over.name else over.name
    if found is not None:
        drafts = " (both without a draft)" if "draft" in best.options else ""
        speedups = {
            "decode speedup": (found.decode_speedup, comparison.over_decode),
            "prefill speedup": (found.prefill_speedup, comparison.over_prefill),
        }
        parts = ", ".join(
            f"{name} {times(ratio)}" + (f" over {other}" if other not in ("", over.name) else "")
            for name, (ratio, other) in speedups.items()
        )
        changes = "it computes the same" if found.kind == "exact" else heals(found, comparison.parameters)
        return f"{found.recipe} gives {times(found.end_to_end)} of {what} end to end{drafts}: {parts}; {changes}."
    changed = [p for p in _runnable(comparison) if p.kind == "approximating"]
    if not changed:
        return ""
    most = max(changed, key=lambda p: p.tokens_per_second)
    gain = f"{most.recipe} {100 * (most.end_to_end - 1):+.1f} % end to end"
    drafts = " (recipes are compared without drafts)" if best.name != over.name else ""
    return f"No recipe gains 5 % over {what}{drafts}: keep the model ({gain})." + _on_fewer(over, most)


def _on_fewer(over: ExactChoice, most: Prediction) -> str:
    """The next step where the best exact choice has replicas of several GPUs: recipes on one's ranks."""
    if not of_several(over):
        return ""
    return f" Recipes share layers among all {most.tp} GPUs; --tp {over.tp} compares them in one of these replicas."


def of_several(choice: ExactChoice) -> bool:
    """True for replicas of several GPUs each."""
    return choice.replicas > 1 and choice.tp > 1


def heals(p: Prediction, parameters: int) -> str:
    """A clause on whether the recipe was seen to heal on as many ranks, at such a size."""
    runs = [run for run in healed_runs() if run.recipe == p.recipe]
    near = [r for r in runs if r.ranks in (None, p.tp) and 1 / _ALIKE <= r.parameters / max(1, parameters) <= _ALIKE]
    best = {run.model: run for run in sorted(near, key=lambda run: -run.above)}  # of each model
    if best:
        healed = [run.above <= HEALED for run in best.values()]
        said = "heals" if all(healed) else "heals on some models" if any(healed) else "did not heal"
        ended = ", ".join(
            f"{run.model} ended {100 * run.above:.1f} % above its loss" for run in reversed(best.values())
        )
        return f"it {said}: {ended}"
    where = "" if all(run.ranks is None for run in runs) else f" on {p.tp} ranks"
    smaller = min(runs, key=lambda run: run.above, default=None)
    seen = ""
    if smaller is not None:
        seen = f" ({smaller.model}, {_size(smaller.parameters)}, ended {100 * smaller.above:.1f} % above its loss)"
    return f"nobody measured that it heals at this size{where}{seen}"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def rests_on(comparison: RecipeComparison) -> str:
    """The measured share, the part by formula, and the distance of published figures of such links from predictions."""
    first = comparison.predictions[0]
    share = percent(first.decode.measured_seconds, first.decode.compute_seconds)
    kernels = f"{share} of the computing measured" if first.decode.measured_seconds else "computing by roofline"
    if first.decode.measured_seconds and first.kernels_of:
        kernels = f"{share} of the computing extrapolated from kernels of {first.kernels_of}"
    if first.all_reduces == "none":
        return f"Rests on: {kernels}."
    known = published().get(comparison.link)
    near = known is not None and known["from"] / _REACH <= comparison.bandwidth <= known["to"] * _REACH
    reach = (
        f"{known['points']} published figures over such a link are {percent(known['median'], 1)} off in the median"
        if known and near
        else "no published figure over such a link is within reach"
    )
    return f"Rests on: all-reduces {_SUMS[first.all_reduces]}, {kernels}; {reach}."


@cache
def published() -> dict[str, dict[str, Any]]:
    """By kind of link, how many published figures there are and how far predictions are from them
    (benchmarks/predict/backtest.py writes it)."""
    text = (Path(__file__).parent / "backtest.yaml").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return known
