"""The page of `rewrite predict --html`: a comparison's figures and drawings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter.common.numbers import digits, duration, percent, times
from rewriter.predict.results import Phase, Prediction, RecipeComparison
from rewriter.predict.validation import COLUMNS as VALIDATED
from rewriter.predict.validation import Validation
from rewriter.show import predict_tables as tables
from rewriter.show.charts import bars, pareto
from rewriter.show.page import render
from rewriter.show.timeline import label_of, named, scale, shown, timeline

_COLUMNS = ("time", "computing", "waiting", "launching", "communicating", "waiting, share", "collectives", "kernels")


def predict_page(
    found: RecipeComparison,
    command: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    validation: Validation | None = None,
) -> str:
    """The file's text. `command`: what made it; `figures`: the fabric's, each with its value and its source;
    `validation`: what was measured as well."""
    predictions = found.predictions
    points = [
        (recipe, [tables.degree(q), f"{q.batch:,}", duration(q.seconds_per_token), digits(q.tokens_per_second_per_gpu),
                  "best" if q.front else "" if q.fits else "does not fit"])
        for recipe, line in found.pareto.items()
        for q in sorted(line, key=lambda q: (not q.front, q.ranks, q.batch))
    ]  # fmt: skip
    mark, _, why = tables.MODELLED.partition(":")
    passes = [
        _pass("One decode step", [(p, p.decode) for p in predictions]),
        _pass("Prefill", [(p, p.prefill) for p in predictions]),
    ]
    return render(
        "predict.html.j2", title=f"{tables.model_name(found)}: what recipes gain on {found.fabric}", found=found,
        setting=tables.setting(found), modelled=(mark, why), headline=headline(predictions), bars=bars(predictions),
        first=predictions[0].recipe if predictions else "", columns=tables.COLUMNS, legend=tables.LEGEND,
        speeds=[(p.recipe, tables.cells(p).values()) for p in predictions], passes=passes if predictions else (),
        points=points, pareto=pareto(found.pareto), validation=validation, validated=VALIDATED,
        notes=tables.notes(found), command=command, figures=[(what, cells) for what, *cells in figures],
    )  # fmt: skip


def headline(predictions: Sequence[Prediction]) -> str:
    """The result in a sentence."""
    if not predictions:
        return "No recipe could be predicted."
    first, others = predictions[0], [p for p in predictions[1:] if p.kind != "timing only" and p.fits]
    share = percent(first.exposed_communication_seconds_per_token, first.seconds_per_token)
    waits = f"With {first.recipe}, a rank waits for communication during {share} of a decode step."
    if not others:
        return waits
    best = max(others, key=lambda p: round(p.speedup, 2))  # of equals, the first named
    if best.speedup <= 1:
        return f"{waits} None of the other recipes is faster."
    return f"{waits} {best.recipe} gives {times(best.speedup)} its tokens per second: {digits(best.tokens_per_second)}."


def _pass(title: str, phases: Sequence[tuple[Prediction, Phase]]) -> dict[str, Any]:
    """The timelines of one kind of pass, their enlarged spans as a table for who cannot see them, and the figures."""
    drawn = [(p.recipe, phase) for p, phase in phases if phase.spans]  # measured passes have none
    drawings, enlarged = [], ""
    if drawn:
        common = scale([phase for _, phase in drawn])
        enlarged = named(common.layers) if common.layers else ""
        for recipe, phase in drawn:
            spans = [
                ("waits" if s.lane == "compute" and s.exposed else label_of(s), s.start, s.seconds)
                for s in (shown(phase, common) if common.layers else ())
            ]
            drawing = timeline(f"{recipe}, {title[:1].lower()}{title[1:]}", phase, common)
            drawings.append((recipe, phase.seconds, drawing, spans))
    rows = []
    for p, phase in phases:
        spent = [phase.seconds, *tables.parts(phase).values(), phase.communication_seconds]
        share = percent(phase.exposed_seconds, phase.seconds)
        rows.append((p.recipe, [*map(duration, spent), share, f"{phase.collectives:,}", f"{phase.kernels:,}"]))
    return {"title": title, "enlarged": enlarged, "drawings": drawings, "columns": _COLUMNS, "rows": rows}
