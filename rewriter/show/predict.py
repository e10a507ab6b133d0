"""A comparison of recipes: on the terminal tables, or where it is narrow a list per recipe; with --html a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rewriter.common.numbers import digits, duration, percent, size, times
from rewriter.common.tables import plain_table
from rewriter.predict.engines import engine_named
from rewriter.predict.results import ExactChoice, Phase, PredictedPoint, Prediction, RecipeComparison
from rewriter.predict.validation import COLUMNS as VALIDATED
from rewriter.predict.validation import Validation
from rewriter.predict.verdict import verdict
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS
from rewriter.show.charts import pareto
from rewriter.show.page import render
from rewriter.show.timeline import label_of, named, scale, shown, timeline

FIRST_TOKENS = {prompt: f"TTFT {prompt // 1024}k" for prompt in FIRST_TOKEN_PROMPTS}
SPEEDUPS = ("decode speedup", "prefill speedup", "end to end")
COLUMNS = (
    "prefill", *FIRST_TOKENS.values(), "per token", "80 %", "tokens/s", "exposed", "share", *SPEEDUPS, "break-even",
    "memory",
)  # fmt: skip
# first where the terminal is too narrow; the page and JSON have all
DROPPED = ("80 %", "memory", "prefill", "exposed", "tokens/s")
DROPPED_FOR_FIRST_TOKENS = ("break-even", "share")  # then, where there are times to first token
EXACT = ("prefill", *FIRST_TOKENS.values(), "per token", "tokens/s", "end to end", "memory", "available")
DROPPED_OF_EXACT = ("TTFT 1k", "TTFT 32k", "memory", "prefill", "TTFT 8k", "tokens/s")
MODELLED = "MODELLED: this fabric's figures are computed from other machines' or from data sheets, not measured."
PASSES = ("pass", "time", "computing", "waiting", "launching", "communicating")
SPENT = ("time", "computing", "waiting", "launching", "communicating", "waiting, share", "collectives", "kernels")
LEGEND = {
    **dict.fromkeys(
        FIRST_TOKENS.values(), "TTFT: time to first token of prompts of 1k, 8k and 32k tokens (1,024 each)."
    ),
    "per token": "Per token: one decode step (TPOT).",
    "80 %": "80 %: how far off that may be in 4 of 5 cases.",
    **dict.fromkeys(("exposed", "share"), "Exposed: waiting for communication in a decode step; share: of that step."),
    "tokens/s": "Tokens/s: of a whole generation, prefill included.",
    **dict.fromkeys(
        SPEEDUPS, "Speedups of a decode step, the prefill and a whole generation (end to end) are over {over}."
    ),
    "break-even": "Break-even: an all-reduce must take longer than this for the recipe to pay in decoding.",
}


@dataclass(frozen=True)
class ComparisonReport:
    """Output of `rewrite predict`; rich renders it as wide as the terminal is. `pareto`: with the table of points."""

    comparison: RecipeComparison
    pareto: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        c = self.comparison
        yield Text.assemble((model_name(c), "bold"), " on ", (c.fabric, "bold"), f": {setting(c)}")
        if c.what_if:
            yield Text(f"what if: {', '.join(c.what_if)}")
        if c.modelled:
            yield Text(MODELLED, style="bold yellow")
        yield Text()
        every = (*c.predictions, *([c.bound] if c.bound else []))
        columns = columns_of(every)
        rows = [(_name(p), cells(p), "" if p.fits else "dim") for p in c.predictions]
        rows += [(_name(p) + " [dim](bound)[/]", cells(p), "dim") for p in every[len(c.predictions) :]]
        more = DROPPED_FOR_FIRST_TOKENS if set(FIRST_TOKENS.values()) & set(columns) else ()
        dropped = (*DROPPED, *more, "prefill speedup", "decode speedup")
        table = _fitting(None, columns, dropped, rows, console, options)
        if table is not None:
            yield table
            yield Text(legend([str(column.header).replace("\n", " ") for column in table.columns], c), style="dim")
            if c.exact:
                yield Text()
                yield from _exact(c, console, options)
            yield Text()
            title, spent = "One pass of one rank", _times(c.predictions)
            if (passes := _fitting(title, PASSES, ("launching",), spent, console, options)) is not None:
                yield passes
        else:
            for prediction in every:
                yield _card(prediction)
            yield Text(legend(columns, c), style="dim")
            yield from (_exact_card(c, one) for one in c.exact)
        if self.pareto:
            yield Text()
            yield _pareto(c.pareto)
        lacking = [p.recipe for p in c.predictions if not p.fits or any(not one.fits for one in p.time_to_first_token)]
        said = [f"! More than a device's memory: {', '.join(lacking)}."] if lacking else []
        if said := [*said, *notes(c)]:
            yield Text()
            yield Text("\n".join(said))
        if found := verdict(c):
            yield Text()
            yield Text(found, style="bold")


def exact_rows(c: RecipeComparison) -> list[tuple[str, dict[str, str], str]]:
    """(name, cells of EXACT, style) of the exact choices."""
    best = next((one for one in c.exact if one.name == c.over), None)
    return [(escape(one.name), _exact_cells(one, best), "" if one.fits and one.available else "dim") for one in c.exact]


def _exact_cells(one: ExactChoice, best: ExactChoice | None) -> dict[str, str]:
    first = {f.prompt: duration(f.seconds) + ("" if f.fits else " !") for f in one.time_to_first_token}
    return {
        "prefill": duration(one.prefill_seconds),
        **{column: first.get(prompt, "–") for prompt, column in FIRST_TOKENS.items()},
        "per token": duration(one.decode_seconds),
        "tokens/s": digits(one.tokens_per_second),
        "end to end": times(one.tokens_per_second / best.tokens_per_second) if best else "–",
        "memory": "" if one.fits else "!",
        "available": ", ".join(one.switches) or "yes" if one.available else "not in this engine",
    }


def _exact(c: RecipeComparison, console: Console, options: ConsoleOptions) -> RenderResult:
    """The table of exact choices."""
    title = f"The model as it is, in {engine_title(c.engine)}"
    table = _fitting(title, EXACT, DROPPED_OF_EXACT, exact_rows(c), console, options, "choice")
    if table is not None:
        yield table
    else:
        yield from (_exact_card(c, one) for one in c.exact)


def _exact_card(c: RecipeComparison, one: ExactChoice) -> Table:
    table = plain_table(escape(one.name), show_header=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for column, cell in _exact_cells(one, next((x for x in c.exact if x.name == c.over), None)).items():
        if cell:
            table.add_row(column, escape(cell))
    return table


def engine_title(name: str) -> str:
    """ "vllm 0.33.0"."""
    return f"{name} {engine_named(name).version}"


def columns_of(predictions: Sequence[Prediction]) -> list[str]:
    """COLUMNS; without times to first token where none was predicted."""
    known = {FIRST_TOKENS[one.prompt] for p in predictions for one in p.time_to_first_token}
    return [column for column in COLUMNS if column in known or column not in FIRST_TOKENS.values()]


def legend(columns: Sequence[str], comparison: RecipeComparison) -> str:
    """The meanings of those of COLUMNS that are shown."""
    said = " ".join(dict.fromkeys(LEGEND[column] for column in columns if column in LEGEND))
    each = (comparison.over_decode, comparison.over_prefill, comparison.over)
    return said.replace("{over}", each[0] if len({*each}) == 1 else "{}, {} and {}".format(*each))


def cells(p: Prediction) -> dict[str, str]:
    """Cells of COLUMNS, for terminal and page."""
    exposed, seconds = p.exposed_communication_seconds_per_token, p.break_even_seconds
    first = {one.prompt: duration(one.seconds) + ("" if one.fits else " !") for one in p.time_to_first_token}
    return {
        "prefill": duration(p.prefill.seconds),
        **{column: first.get(prompt, "–") for prompt, column in FIRST_TOKENS.items()},
        "per token": duration(p.seconds_per_token),
        "80 %": _within(p),
        "tokens/s": digits(p.tokens_per_second),
        "exposed": duration(exposed),
        "share": percent(exposed, p.seconds_per_token),
        "decode speedup": times(p.decode_speedup),
        "prefill speedup": times(p.prefill_speedup),
        "end to end": times(p.end_to_end),
        # of a note, the words up to their explanation
        "break-even": re.split("[:,]", p.break_even_note or "–")[0] if seconds is None else duration(seconds),
        "memory": size(p.memory_bytes_per_rank) + ("" if p.fits else " !"),
    }


def _within(p: Prediction) -> str:
    """Uncertainty of the time per token."""
    if p.seconds_per_token_interval is None or p.seconds_per_token <= 0.0:
        return "–"
    return f"± {100 * (p.seconds_per_token_interval[1] / p.seconds_per_token - 1):.0f} %"


def parts(phase: Phase) -> dict[str, float]:
    """Seconds of a phase by what the compute stream does in them."""
    return {"computing": phase.compute_seconds, "waiting": phase.exposed_seconds, "launching": phase.host_seconds}


def setting(comparison: RecipeComparison) -> str:
    """The job: "tp 8 on 2 nodes, batch 1, 1,024 + 512 tokens, eager"."""
    if not comparison.predictions:
        return ""
    p = comparison.predictions[0]
    ranks = f"tp {p.tp}" + (f" × sp {p.sp}" if p.sp > 1 else "")
    nodes = f" on {p.nodes} nodes" if p.nodes > 1 else ""
    how = "graphed" if p.graphed else "eager"
    return f"{ranks}{nodes}, batch {p.batch}, {p.prompt:,} + {p.generate:,} tokens, {how}"


def model_name(comparison: RecipeComparison) -> str:
    """A hub id, or the last part of a path; of a bare config.json, with its directory."""
    parts = Path(comparison.model).parts
    if len(parts) <= 2 and not Path(comparison.model).is_absolute():
        return comparison.model
    return "/".join(parts[-2:] if parts[-1].endswith(".json") else parts[-1:])


def _table(title: str | None, columns: Sequence[str], first: str = "recipe") -> Table:
    names = [column.replace(" speedup", "\nspeedup") for column in columns]  # no wider than their figures
    numbers = [name for name in names if name not in ("pass", "available")]
    table = plain_table(title, first, *names, numbers=numbers, fold=(first,), whole=names)
    table.columns[0].max_width = 28
    return table


def _fitting(
    title: str | None,
    columns: Sequence[str],
    dropped: Sequence[str],
    rows: Sequence[tuple[str, Mapping[str, str], str]],
    console: Console,
    options: ConsoleOptions,
    first: str = "recipe",
) -> Table | None:
    """A table of (name, cells by column, style) without those `dropped` that have no room; None if it still lacks."""
    for count in range(len(dropped) + 1):
        kept = [column for column in columns if column not in dropped[:count]]
        table = _table(title, kept, first)
        for name, known, style in rows:
            table.add_row(name, *(escape(known[column]) for column in kept), style=style)
        if Measurement.get(console, options.update(width=1000), table).maximum <= options.max_width:
            return table
    return None


def _name(p: Prediction) -> str:
    return escape(p.recipe) + (" [dim](timing only)[/]" if p.kind == "timing only" else "")


def _times(predictions: Sequence[Prediction]) -> list[tuple[str, Mapping[str, str], str]]:
    rows: list[tuple[str, Mapping[str, str], str]] = []
    for p in predictions:
        for which, phase in (("prefill", p.prefill), ("decode", p.decode)):
            spent = {"time": phase.seconds, **parts(phase), "communicating": phase.communication_seconds}
            shown = {"pass": which, **{what: duration(seconds) for what, seconds in spent.items()}}
            rows.append((escape(p.recipe) if which == "prefill" else "", shown, ""))
    return rows


def _card(p: Prediction) -> Table:
    table = plain_table(_name(p), show_header=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    known = cells(p)
    for column in columns_of([p]):
        table.add_row(column, escape(known[column]))
    return table


def _pareto(points_of: Mapping[str, Sequence[PredictedPoint]]) -> Table:
    """The points that no other of their recipe beats in both; the page and JSON have all."""
    columns = ("tp", "batch", "per token", "tokens/s per GPU")
    table = _table("Best TP degrees and batches", columns)
    for recipe, points in points_of.items():
        name = escape(recipe)
        for q in sorted((q for q in points if q.front), key=lambda q: q.seconds_per_token):
            speed = digits(q.tokens_per_second_per_gpu)
            table.add_row(name, degree(q), f"{q.batch:,}", duration(q.seconds_per_token), speed)
            name = ""
        if name:
            table.add_row(name, *("–" for _ in columns))
    return table


def degree(q: PredictedPoint) -> str:
    """The ranks of a point: "8", and "4 × sp 2" where some share tokens."""
    return f"{q.tp}" if q.sp == 1 else f"{q.tp} × sp {q.sp}"


def notes(comparison: RecipeComparison) -> list[str]:
    """Sentences that belong to the numbers. A note that several recipes share is said once, in order of appearance."""
    by_note: dict[str, list[str]] = {}
    for p in comparison.predictions:
        for note in p.notes:
            by_note.setdefault(note, []).append(p.recipe)
    said = [
        ("" if len(recipes) == len(comparison.predictions) else f"{', '.join(recipes)}: ") + note
        for note, recipes in by_note.items()
    ]
    needs = dict.fromkeys(note for one in comparison.exact for note in one.notes)
    return [*said, *needs] + [f"{entry.recipe}: not predicted. {entry.reason}" for entry in comparison.skipped]


# --- the page ---


def predict_page(
    comparison: RecipeComparison,
    command: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    validation: Validation | None = None,
) -> str:
    """The file's text. `command`: what made it; `figures`: the fabric's, each with its value and its source;
    `validation`: what was measured as well."""
    predictions = comparison.predictions
    points = [
        (recipe, [degree(q), f"{q.batch:,}", duration(q.seconds_per_token), digits(q.tokens_per_second_per_gpu),
                  "best" if q.front else "" if q.fits else "does not fit"])
        for recipe, line in comparison.pareto.items()
        for q in sorted(line, key=lambda q: (not q.front, q.ranks, q.batch))
    ]  # fmt: skip
    columns = columns_of(predictions)
    mark, _, why = MODELLED.partition(":")
    passes = [
        _pass("One decode step", [(p, p.decode) for p in predictions]),
        _pass("Prefill", [(p, p.prefill) for p in predictions]),
    ]
    return render(
        "predict.html.j2", title=f"{model_name(comparison)}: what recipes gain on {comparison.fabric}",
        comparison=comparison,
        setting=setting(comparison), modelled=(mark, why), headline=headline(comparison),
        columns=columns, legend=legend(columns, comparison),
        exact=[(name, [known[column] for column in EXACT]) for name, known, _ in exact_rows(comparison)],
        exact_columns=EXACT, engine=engine_title(comparison.engine) if comparison.engine else "",
        speeds=[(p.recipe, [cells(p)[column] for column in columns]) for p in predictions],
        passes=passes if predictions else (),
        points=points, pareto=pareto(comparison.pareto), validation=validation, validated=VALIDATED,
        notes=notes(comparison), command=command, figures=[(what, cells) for what, *cells in figures],
    )  # fmt: skip


def headline(comparison: RecipeComparison) -> str:
    """The result in a sentence: the verdict, where exact choices were predicted."""
    predictions = comparison.predictions
    if not predictions:
        return "No recipe could be predicted."
    first, others = predictions[0], [p for p in predictions[1:] if p.kind != "timing only" and p.fits]
    share = percent(first.exposed_communication_seconds_per_token, first.seconds_per_token)
    waits = f"With {first.recipe}, a rank waits for communication during {share} of a decode step."
    if found := verdict(comparison):
        return f"{waits} {found}"
    if not others:
        return waits
    best = max(others, key=lambda p: round(p.end_to_end, 2))  # of equals, the first named
    if best.end_to_end <= 1:
        return f"{waits} None of the other recipes is faster."
    return (
        f"{waits} {best.recipe} gives {times(best.end_to_end)} its tokens per second: {digits(best.tokens_per_second)}."
    )


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
        spent = [phase.seconds, *parts(phase).values(), phase.communication_seconds]
        share = percent(phase.exposed_seconds, phase.seconds)
        rows.append((p.recipe, [*map(duration, spent), share, f"{phase.collectives:,}", f"{phase.kernels:,}"]))
    return {"title": title, "enlarged": enlarged, "drawings": drawings, "columns": SPENT, "rows": rows}
