"""A comparison of recipes: on the terminal tables, of the columns that have room; with --html a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.text import Text

from rewriter.common.numbers import digits, duration, percent, size, times
from rewriter.common.tables import FittingTable
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
MEANT = dict(zip(SPEEDUPS, ("one decode step", "the prefill", "a whole generation"), strict=True))
COLUMNS = (
    "prefill", *FIRST_TOKENS.values(), "per token", "80 %", "tokens/s", "exposed", "share", *SPEEDUPS, "break-even",
    "memory",
)  # fmt: skip
# the least important first; the page and JSON have all
DROPPED = (
    "80 %", "memory", "exposed", "prefill", "tokens/s", "break-even", "share", "TTFT 32k", "TTFT 1k", "prefill speedup",
    "TTFT 8k", "decode speedup", "per token",
)  # fmt: skip
EXACT = (
    "prefill", *FIRST_TOKENS.values(), "per token", "tokens/s", "end to end", "memory", "available", "switches",
)  # fmt: skip
DROPPED_OF_EXACT = (
    "switches", "TTFT 1k", "TTFT 32k", "memory", "prefill", "TTFT 8k", "tokens/s", "per token",
)  # fmt: skip
# no wider than their figures
HEADERS = {**{name: name.replace(" speedup", "\nspeedup") for name in SPEEDUPS}, "per token": "per\ntoken",
           "end to end": "end\nto end", "break-even": "break-\neven"}  # fmt: skip
MODELLED = "MODELLED: this fabric's figures are computed from other machines' or from data sheets, not measured."
PASSES = ("pass", "time", "computing", "waiting", "launching", "communicating")
SPENT = ("time", "computing", "waiting", "launching", "communicating", "waiting, share", "collectives", "kernels")
LEGEND = {
    **dict.fromkeys(FIRST_TOKENS.values(), "TTFT: time to first token, by length of the prompts (1k: 1,024 tokens)."),
    "per token": "Per token: one decode step (TPOT).",
    "80 %": "80 %: how far off that may be in 4 of 5 cases.",
    **dict.fromkeys(("exposed", "share"), "Exposed: waiting for communication in a decode step; share: of that step."),
    "tokens/s": "Tokens/s: of a whole generation, prefill included.",
    "break-even": "Break-even: an all-reduce must take longer than this for the recipe's decode step to beat the first "
    "recipe's.",
}


@dataclass(frozen=True)
class ComparisonReport:
    """Output of `rewrite predict`; rich renders it as wide as the terminal is. `pareto`: with the table of points.
    `verbose`: with the notes that decide nothing."""

    comparison: RecipeComparison
    pareto: bool = False
    verbose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        c = self.comparison
        yield Text.assemble((model_name(c), "bold"), " on ", (c.fabric, "bold"), f": {setting(c)}")
        if c.what_if:
            yield Text(f"what if: {', '.join(c.what_if)}")
        if c.modelled:
            yield Text(MODELLED, style="bold yellow")
        yield Text()
        table = _recipes(c)
        yield table
        yield Text(legend(table.kept(console, options), c), style="dim")
        if c.exact:
            yield Text()
            yield _exact(c)
            yield Text(f"End to end: over {_named(c.over, c)}.", style="dim")
        yield Text()
        yield _passes(c.predictions)
        if self.pareto:
            yield Text()
            yield _pareto(c.pareto)
        lacking = [one for one in map(_lacking, c.predictions) if one]
        said = [f"! More than a device's memory: {', '.join(lacking)}."] if lacking else []
        if said := [*said, *notes(c, self.verbose)]:
            yield Text()
            yield Text("\n".join(said))
        if found := verdict(c):
            yield Text()
            yield Text(found, style="bold")


def _lacking(p: Prediction) -> str:
    """The recipe, if its generation does not fit, or with the prompts that do not; "" if all do."""
    prompts = [f"{one.prompt:,}" for one in p.time_to_first_token if not one.fits]
    if not p.fits or not prompts:
        return "" if p.fits else p.recipe
    return f"{p.recipe} with {p.batch} prompt{'s' * (p.batch > 1)} of {' or '.join(prompts)} tokens"


def _recipes(c: RecipeComparison) -> FittingTable:
    """The main table: a row per recipe, and one for what bounds them."""
    asked = any(c.bound and p.recipe == c.bound.recipe for p in c.predictions)
    every = [*c.predictions, *([c.bound] if c.bound and not asked else [])]
    rows = [{"recipe": _name(p)} | {name: escape(cell) for name, cell in cells(p).items()} for p in c.predictions]
    if c.bound and not asked:
        bound = {name: escape(cell) for name, cell in cells(c.bound).items()}
        rows.append({"recipe": f"{escape(c.bound.recipe)} [dim](nothing sent)[/]"} | bound)
    styles = ["" if p.fits and p is not c.bound else "dim" for p in every]
    return _table(None, "recipe", columns_of(every), rows, DROPPED, styles)


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
        "available": "yes" if one.available else "not in this engine",
        "switches": ", ".join(one.switches) if one.available else "",
    }


def _exact(c: RecipeComparison) -> FittingTable:
    """The table of exact choices."""
    rows = exact_rows(c)
    shown = [{"choice": name} | {column: escape(cell) for column, cell in known.items()} for name, known, _ in rows]
    columns = [column for column in EXACT if any(known[column] for _, known, _ in rows)]
    title = f"The model as it is, in {engine_title(c.engine)}"
    return _table(title, "choice", columns, shown, DROPPED_OF_EXACT, [style for *_, style in rows])


def engine_title(name: str) -> str:
    """ "vllm 0.33.0"."""
    return f"{name} {engine_named(name).version}"


def columns_of(predictions: Sequence[Prediction]) -> list[str]:
    """COLUMNS; without times to first token where none was predicted."""
    known = {FIRST_TOKENS[one.prompt] for p in predictions for one in p.time_to_first_token}
    return [column for column in COLUMNS if column in known or column not in FIRST_TOKENS.values()]


def legend(columns: Sequence[str], comparison: RecipeComparison) -> str:
    """The meanings of those of COLUMNS that are shown."""
    said = list(dict.fromkeys(LEGEND[column] for column in columns if column in LEGEND))
    return " ".join([*said, *_baselines([name for name in SPEEDUPS if name in columns], comparison)])


def _baselines(speedups: Sequence[str], c: RecipeComparison) -> list[str]:
    """A sentence per baseline: the speedups that are over it."""
    over = dict(zip(SPEEDUPS, (c.over_decode, c.over_prefill, c.over), strict=True))
    said = []
    for other in dict.fromkeys(over[name] for name in speedups):
        listed = ", ".join(f"{name} ({MEANT[name]})" for name in speedups if over[name] == other)
        said.append(f"{listed[:1].upper()}{listed[1:]}: over {_named(other, c)}.")
    return said


def _named(choice: str, c: RecipeComparison) -> str:
    """A baseline with the engine that runs it; the first recipe where there are no exact choices."""
    choice = choice or c.predictions[0].recipe
    return f"{choice} ({engine_title(c.engine)})" if c.exact and c.engine else choice


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
        "break-even": re.split("[:,]", p.break_even_note or "–")[0].removeprefix("the ").removesuffix(" recipe")
        if seconds is None
        else duration(seconds),
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


def _table(
    title: str | None,
    first: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    dropped: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> FittingTable:
    """A table whose `first` column names the rows; the columns of words are at the left, figures at the right."""
    numbers = [name for name in columns if name not in ("pass", "available", "switches")]
    look = {"numbers": numbers}
    return FittingTable((first, *columns), rows, dropped, {first: 28}, title, HEADERS, styles, look)


def _name(p: Prediction) -> str:
    return escape(p.recipe) + (" [dim](timing only)[/]" if p.kind == "timing only" else "")


def _passes(predictions: Sequence[Prediction]) -> FittingTable:
    """The table of where the time of a pass goes."""
    rows = []
    for p in predictions:
        for which, phase in (("prefill", p.prefill), ("decode", p.decode)):
            spent = {"time": phase.seconds, **parts(phase), "communicating": phase.communication_seconds}
            shown = {"pass": which, **{what: duration(seconds) for what, seconds in spent.items()}}
            rows.append({"recipe": escape(p.recipe) if which == "prefill" else ""} | shown)
    dropped = ("launching", "communicating", "computing", "waiting")
    return _table("One pass of one rank", "recipe", PASSES, rows, dropped)


def _pareto(points_of: Mapping[str, Sequence[PredictedPoint]]) -> FittingTable:
    """The points that no other of their recipe beats in both; the page and JSON have all."""
    columns = ("tp", "batch", "per token", "tokens/s per GPU")
    rows = []
    for recipe, points in points_of.items():
        name = escape(recipe)
        for q in sorted((q for q in points if q.front), key=lambda q: q.seconds_per_token):
            known = (degree(q), f"{q.batch:,}", duration(q.seconds_per_token), digits(q.tokens_per_second_per_gpu))
            rows.append({"recipe": name} | dict(zip(columns, known, strict=True)))
            name = ""
        if name:
            rows.append({"recipe": name} | dict.fromkeys(columns, "–"))
    return _table("Best TP degrees and batches", "recipe", columns, rows, ("batch",))


def degree(q: PredictedPoint) -> str:
    """The ranks of a point: "8", and "4 × sp 2" where some share tokens."""
    return f"{q.tp}" if q.sp == 1 else f"{q.tp} × sp {q.sp}"


def notes(comparison: RecipeComparison, verbose: bool = True) -> list[str]:
    """Sentences that belong to the numbers; with `verbose` also those that decide nothing. A note that several recipes
    share is said once, in order of appearance."""
    by_note: dict[str, list[str]] = {}
    for p in comparison.predictions:
        for note in (*p.notes, *(p.details if verbose else ())):
            by_note.setdefault(note, []).append(p.recipe)
    said = [
        ("" if len(recipes) == len(comparison.predictions) else f"{', '.join(recipes)}: ") + note
        for note, recipes in by_note.items()
    ]
    needs = dict.fromkeys(note for one in comparison.exact if verbose or one.available for note in one.notes)
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
