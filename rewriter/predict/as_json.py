"""A comparison of recipes as plain data: what `rewrite predict --json` prints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from rewriter.predict.results import Phase, RecipeComparison
from rewriter.predict.verdict import verdict


def to_json(comparison: RecipeComparison, next_words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One object per recipe, of JSON types; seconds, bytes and tokens per second as in `Prediction`. Where points were
    asked for, "pareto" lists the recipe's, as in `PredictedPoint`. Exact choices follow, as in `ExactChoice`, under
    "exact", what bounds all recipes, under "bound", and the "verdict", with the words of the command that follows from
    it as "next", one text for a shell."""
    objects: list[dict[str, Any]] = []
    for p in (*comparison.predictions, *([comparison.bound] if comparison.bound else [])):
        known = {field.name: getattr(p, field.name) for field in fields(p)}
        known["time_to_first_token"] = [asdict(one) for one in p.time_to_first_token]
        known |= {key: getattr(p, key) for key in ("seconds_per_token", "exposed_communication_seconds_per_token")}
        asked = {name: getattr(comparison, name) for name in ("model", "over", "over_decode", "over_prefill")}
        asked["what_if"] = list(comparison.what_if)
        seconds = {"prefill_seconds": p.prefill.seconds, "decode_seconds": p.decode.seconds}
        phases: dict[str, Any] = {"prefill": _phase(p.prefill), "decode": _phase(p.decode), "notes": list(p.notes)}
        phases["details"] = list(p.details)
        objects.append(known | asked | seconds | phases | {"bound": p is comparison.bound})
        if p.recipe in comparison.pareto:
            objects[-1]["pareto"] = [asdict(point) for point in comparison.pareto[p.recipe]]
    objects += [{"exact": asdict(one), "engine": comparison.engine} for one in comparison.exact]
    said = verdict(comparison)
    if not said:
        return objects
    return [*objects, {"verdict": said, "next": shlex.join(next_words), "parameters": comparison.parameters}]


def _phase(phase: Phase) -> dict[str, Any]:
    values = asdict(replace(phase, spans=()))
    del values["spans"]
    return values | {"exposed_by_layer": {str(layer): seconds for layer, seconds in phase.exposed_by_layer.items()}}
