"""Predicted against measured: the result, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from rewriter.common.numbers import duration
from rewriter.common.tables import plain_table

WITHIN = 0.03  # error that is allowed where real launches agree better than half of it
BUSY = 0.1  # on an idle machine the ranks of a calibration lack their cores for a smaller share of the time
PASSES = ("prefill", "decode")
COLUMNS = ("pass", "predicted", "measured", "error", "spread", "holds")
_BUSY = (
    "This machine is busy: something else had the ranks' cores for {:.0f} % of the time, so that the calibrated fabric "
    "is too slow, and errors are no measure of the prediction. Repeat it on an idle machine."
)


@dataclass(frozen=True)
class Row:
    recipe: str
    kind: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """Difference of the medians, as a share of what was measured; positive where the prediction is too slow."""
        return median(self.predicted) / median(self.measured) - 1

    @property
    def spread(self) -> float:
        """Between the slowest and the fastest real launch, as a share of the median."""
        return (max(self.measured) - min(self.measured)) / median(self.measured)

    @property
    def holds(self) -> bool:
        """True if the error is within 3 % or twice the real launches' own spread, whichever is larger."""
        return abs(self.error) <= max(WITHIN, 2 * self.spread)


@dataclass(frozen=True)
class Validation:
    """Comparison of predictions with real ranks. `real`: how the real ranks ran; `fabric`: whose delays the emulated
    ones had. `reason`: why nothing was compared, None where it was. `busy`: the share of the calibration's time in
    which something else had the ranks' cores."""

    real: str
    fabric: str
    rows: tuple[Row, ...]
    reason: str | None = None
    busy: float | None = None

    @property
    def misordered(self) -> list[tuple[str, str, str]]:
        """(recipe, recipe, pass) that the prediction ranks the wrong way, among those that differ by more than the
        spread of either."""
        wrong = []
        for kind in dict.fromkeys(row.kind for row in self.rows):
            for a, b in combinations([row for row in self.rows if row.kind == kind], 2):
                measured = median(b.measured) / median(a.measured) - 1
                predicted = median(b.predicted) / median(a.predicted) - 1
                if abs(measured) > max(a.spread, b.spread) and measured * predicted < 0:
                    wrong.append((a.recipe, b.recipe, kind))
        return wrong

    def of(self, recipe: str) -> dict[str, Any]:
        if self.reason is not None:
            return {"reason": self.reason}
        rows = {
            row.kind: {
                "predicted_seconds": median(row.predicted),
                "measured_seconds": median(row.measured),
                **{figure: getattr(row, figure) for figure in ("error", "spread", "holds")},
                "predicted_launches": list(row.predicted),
                "measured_launches": list(row.measured),
            }
            for row in self.rows
            if row.recipe == recipe
        }
        return {"real": self.real, "fabric": self.fabric, "busy": self.busy, **rows}

    def cells(self) -> list[tuple[str, list[str]]]:
        """Cells of COLUMNS, by recipe."""
        cells = []
        for row in self.rows:
            seconds = [duration(median(side)) for side in (row.predicted, row.measured)]
            shares = [f"{100 * row.error:+.1f} %", f"{100 * row.spread:.1f} %"]
            cells.append((row.recipe, [row.kind, *seconds, *shares, "yes" if row.holds else "no"]))
        return cells

    def said(self) -> list[str]:
        """Sentences that belong to the table."""
        if self.reason is not None:
            return [f"Not validated: {self.reason}"]
        return [
            f"Predicted: one real rank, its peers emulated ({self.fabric}). Measured: {self.real}.",
            f"Medians of {len(self.rows[0].measured)} launches of each, in turns. Spread: between the real launches. "
            f"It holds if the error is within {100 * WITHIN:g} % or twice the spread.",
            *([_BUSY.format(100 * self.busy)] if self.busy is not None and self.busy > BUSY else []),
            *(f"Ranked the wrong way in {kind}: {a} and {b}." for a, b, kind in self.misordered),
        ]

    def __rich__(self) -> Group:
        words = Text("\n".join(self.said()), style="" if self.reason else "dim")
        if self.reason is not None:
            return Group(words)
        table = plain_table("Validation", "recipe", *COLUMNS, numbers=COLUMNS[1:], fold=("recipe",))
        for recipe, row in self.cells():
            table.add_row(escape(recipe), *row)
        return Group(table, words)
