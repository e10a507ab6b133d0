"""The page of `rewrite search --html`: the front, what each rewrite costs alone, and the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.common.numbers import duration
from rewriter.search.choices import DOES
from rewriter.search.result import SearchResult, Single
from rewriter.show import search_tables as tables
from rewriter.show.charts import speed_for_loss
from rewriter.show.page import render


def search_page(result: SearchResult, command: str = "") -> str:
    """The file's text. `command`: what made it."""
    rewrites = [name for name in DOES if any(s.rewrite == name for s in result.singles)]
    chosen = result.chosen.mix
    points = [(tables.named(p.mix) + (" ◆" if p.mix == chosen else ""), tables.cells(p).values()) for p in result.front]
    return render(
        "search.html.j2", title=f"{tables.model_name(result)}: the recipe that fits {result.fabric}", result=result,
        setting=tables.setting(result), headline=tables.headline(result), layers=tables.layers_of(chosen),
        front=speed_for_loss(result), legend=tables.LEGEND, columns=tables.COLUMNS, points=points, rewrites=rewrites,
        singles=_singles(result.singles, rewrites), does=DOES, notes=tables.notes(result), command=command,
    )  # fmt: skip


def _singles(singles: Sequence[Single], rewrites: Sequence[str]) -> list[tuple[str, list[str]]]:
    """By layer what each rewrite costs alone, in thousandths of a nat per token, and last what it gains at most."""
    costs = {(s.layer, s.rewrite): f"{1e3 * s.cost:.2f}" for s in singles}
    rows = [
        (f"{layer}", [costs.get((layer, name), "") for name in rewrites])
        for layer in sorted({s.layer for s in singles})
    ]
    gains = []
    for name in rewrites:
        most = max((s.gain for s in singles if s.rewrite == name and s.gain is not None), default=None)
        gains.append("–" if most is None else duration(most) if most > 0 else "none")
    return [*rows, ("gain", gains)]
