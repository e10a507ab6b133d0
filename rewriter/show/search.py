"""The result of a search: on the terminal the front as a table, with --html a page with its plot."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rewriter.common.numbers import duration, times
from rewriter.common.svg import log_ticks, path, svg, ticks
from rewriter.common.tables import FittingTable
from rewriter.passes.selection import spans
from rewriter.predict.search.choices import REWRITES, STANDARD, Mix, Option
from rewriter.predict.search.run import SearchPoint, SearchResult
from rewriter.recipes.recipe import MeasuredRise
from rewriter.recipes.verdicts import Verdict, command, converting
from rewriter.show.charts import HEIGHT, SHAPES, WIDTH, Plot
from rewriter.show.page import render

COLUMNS = ("per token", "speedup", "rise in loss", "KL", "held out")
DROPPED = ("KL", "held out", "per token")  # the least important first
MEANINGS = {
    "speedup": "Speedup: of a whole generation, over plain tensor parallelism with the same sums.",
    "rise in loss": "Rise: of the loss on the calibration text, as a share of it, ± its standard error.",
    "KL": "KL: from the original, nats per token.",
    "held out": "Held out: the rise on text that nothing was chosen by.",
}
LEGEND = " ".join(MEANINGS.values())
CHOSEN = "m0-8l8 8-8 8-8-8z"


@dataclass(frozen=True)
class SearchReport:
    """Output of `rewrite search`; rich renders it as wide as the terminal is."""

    result: SearchResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        result = self.result
        model, fabric = (result.measured.model, "bold"), (result.measured.fabric, "bold")
        yield Text.assemble(model, " on ", fabric, f": {setting(result)}")
        if result.modelled:
            yield Text("MODELLED: this fabric's figures are computed, not measured.", style="bold yellow")
        yield Text()
        table = _table(result)
        yield table
        yield Text(" ".join(MEANINGS[name] for name in table.kept(console, options) if name in MEANINGS), style="dim")
        yield Text()
        yield Text.assemble("chosen: ", (headline(result), "bold"))
        for line in layers_of(result.chosen.mix):
            yield Text(f"  {line}")
        for note in notes(result):
            yield Text(note, style="dim")


def setting(result: SearchResult) -> str:
    """The job, as a phrase."""
    found = result.measured
    return f"{found.tp * found.sp} ranks, {found.workload}, a rise in loss of {share(found.budget)} at most"


def headline(result: SearchResult) -> str:
    """The result in a sentence."""
    chosen, found = result.chosen, result.measured
    held_out = "" if chosen.held_out is None else f", {share(chosen.held_out.rise)} on text that was held out"
    over = "" if found.end_to_end is None else f" and {times(found.end_to_end)} that of {found.over} end to end"
    return (
        f"{times(chosen.speedup)} the speed of plain tensor parallelism (predicted){over}, for a rise in loss of "
        f"{share(chosen.calibration.rise)}{held_out}"
    )


def layers_of(mix: Mix) -> list[str]:
    """A line for each rewrite, with its layers."""
    lines = [] if mix.base == STANDARD else [f"{mix.base}: ranks share the tokens of a sequence"]
    layers = mix.layers
    width = max((len(name) for name in layers), default=0)
    return lines + [f"{name:{width}}  layers {spans(some)}: {REWRITES[name].does}" for name, some in layers.items()]


def keep_the_model(result: SearchResult) -> bool:
    """True where what was found is slower than the model can be as it is."""
    return result.measured.end_to_end is not None and result.measured.end_to_end < 1


def verdict(result: SearchResult, model: str, recipe: str) -> Verdict:
    """The next step with the recipe that was written to the file `recipe`. `model`: as the user named it."""
    found = result.measured
    if keep_the_model(result):
        return Verdict(
            _advice(result)[0],
            command("predict", model, "--recipe", "tensor-parallel", "--fabric", found.fabric,
                    "--tp", f"{found.tp * found.sp}"),
        )  # fmt: skip
    gain = f"{times(result.chosen.speedup)} of plain tensor parallelism"
    if found.end_to_end is not None:
        gain = f"{times(found.end_to_end)} of {found.over} end to end"
    rise = share(result.chosen.worst)
    said = f"The recipe gives {gain} (predicted), for a rise in loss of {rise} at most (measured)."
    return Verdict(said, shlex.join(converting(model, recipe, found.tp, found.sp)))


def _advice(result: SearchResult) -> list[str]:
    over = result.measured.over
    return [f"Keep the model: as it is, it is faster with {over}."] if keep_the_model(result) else []


def notes(result: SearchResult) -> list[str]:
    """Sentences that belong to the figures."""
    found = result.measured
    said = [f"Measured on {found.text}. The original's loss is {found.loss:.3f} nats per token."]
    return [*said, *(f"Not applied, {name}: {why}" for name, why in result.not_applied.items())]


def cells(point: SearchPoint) -> dict[str, str]:
    """Cells of COLUMNS, for terminal and page."""
    return {
        "per token": duration(point.speed.seconds_per_token),
        "speedup": times(point.speedup),
        "rise in loss": rise_of(point.calibration),
        "KL": f"{point.calibration.kl:.4f}",
        "held out": "–" if point.held_out is None else rise_of(point.held_out),
    }


def named(mix: Mix) -> str:
    """A mix in few words: how many layers each rewrite has."""
    counts = [f"{len(layers)} {name}" for name, layers in mix.layers.items()]
    return ", ".join([*([] if mix.base == STANDARD else [mix.base]), *counts]) or mix.base


def share(value: float) -> str:
    """A share of the loss: "0.83 %"; "0 %"."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent == 0 or abs(percent) >= 100 else f"{percent:.3g} %"


def rise_of(rise: MeasuredRise) -> str:
    """ "0.83 % ± 0.11 %"."""
    return share(rise.rise) + (f" ± {share(rise.error)}" if rise.error else "")


def _table(result: SearchResult) -> FittingTable:
    rows = [{"mix": named(point.mix), **cells(point)} for point in result.front]
    styles = ["bold" if point.mix == result.chosen.mix else "" for point in result.front]
    return FittingTable(("mix", *COLUMNS), rows, DROPPED, {"mix": 26}, styles=styles)


# --- the page ---


def place(rise: float, low: float, high: float) -> float:
    """Place of a rise on the axis, from 0 to 1; what is exact, at 0."""
    if rise < low:
        return 0.0
    return 0.06 + 0.94 * math.log(rise / low) / math.log(high / low)


def search_page(result: SearchResult, command_line: str = "") -> str:
    """The file's text. `command_line`: what made it."""
    rewrites = [name for name in REWRITES if any(option.part.name == name for option in result.singles)]
    does = {name: REWRITES[name].does for name in rewrites}
    chosen = result.chosen.mix
    points = [(named(p.mix) + (" ◆" if p.mix == chosen else ""), cells(p).values()) for p in result.front]
    title = f"{result.measured.model}: the recipe that fits {result.measured.fabric}"
    return render(
        "search.html.j2", title=title, result=result,
        setting=setting(result), headline=headline(result), layers=layers_of(chosen),
        front=speed_for_loss(result), legend=LEGEND, columns=COLUMNS, points=points, rewrites=rewrites,
        singles=_singles(result.singles, rewrites), does=does, notes=[*_advice(result), *notes(result)],
        command=command_line,
    )  # fmt: skip


def _singles(singles: Sequence[Option], rewrites: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Rows by layer: the cost of each rewrite alone, in thousandths of a nat per token, and last its largest gain."""
    costs = {(o.part.start, o.part.name): f"{1e3 * o.cost:.2f}" for o in singles}
    layers = sorted({layer for layer, _ in costs})
    rows = [(f"{layer}", [costs.get((layer, name), "") for name in rewrites]) for layer in layers]
    gains = []
    for name in rewrites:
        most = max(o.gain for o in singles if o.part.name == name)
        gains.append(duration(most) if most > 0 else "none")
    return [*rows, ("gain", gains)]


def speed_for_loss(result: SearchResult) -> str:
    """Speedups over rises in loss. The rise is logarithmic; what is exact stands at the left edge."""
    above = [p.calibration.rise for p in result.points if p.calibration.rise > 1e-6] or [0.01]
    low, high = min(above), max(max(above), min(above) * 10)
    speeds = [p.speedup for p in result.points]
    bottom, top = min(speeds), max(max(speeds), min(speeds) + 0.01)
    plot = Plot(24.0, lambda rise: place(rise, low, high), lambda speed: (speed - bottom) / (top - bottom))
    parts = plot.axes(
        {value: share(value) for value in log_ticks(low, high)},
        {value: times(value) for value in ticks(bottom, top)},
        "rise in loss (less is better); dashed: the budget",
    )
    budget, line = result.measured.budget, result.front
    if low <= budget <= high:
        parts.append(plot.vertical(budget, "r1"))
    if len(line) > 1:
        parts.append(path("M" + "L".join(plot.at(p.calibration.rise, p.speedup) for p in line), "pl s1"))
    for p in result.points:
        chosen = p.mix == result.chosen.mix
        shape, look = (CHOSEN, "pp s2") if chosen else (SHAPES[0], "pp s1" if p in line else "pp s0 o")
        said = f"{named(p.mix)}: {times(p.speedup)}, a rise of {share(p.calibration.rise)}"
        parts.append(path(f"M{plot.at(p.calibration.rise, p.speedup)}{shape}", look, said))
    said = "Predicted speedups over measured rises in loss; the table below has the points of the front."
    return svg(WIDTH, HEIGHT, "Speed for loss", said, "", parts)
