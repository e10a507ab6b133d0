"""A comparison as one HTML file that needs no network, no script and no other file, in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from rewriter.common.numbers import digits, duration, percent, times
from rewriter.predict import comparison_tables as tables
from rewriter.predict.draw_bars import bars
from rewriter.predict.draw_pareto import pareto
from rewriter.predict.draw_timeline import Scale, label_of, named, scale, shown, timeline
from rewriter.predict.results import Phase, PredictedPoint, Prediction, RecipeComparison
from rewriter.predict.validation import COLUMNS as VALIDATED
from rewriter.predict.validation import Validation

_FRAME = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(
    found: RecipeComparison,
    command: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    validation: Validation | None = None,
) -> str:
    """The file's text. `command`: what made it; `figures`: the fabric's, each with its value and its source, in
    words; `validation`: what was measured beside it.

    The same arguments give the same bytes.
    """
    title = f"{tables.model_name(found)}: what recipes gain on {found.fabric}"
    mark, _, why = tables.MODELLED.partition(":")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(tables.setting(found))} · {escape(found.fabric_summary)}</p>',
        f'<p><span class="mark">{escape(mark)}</span>{escape(why)}</p>' if found.modelled else "",
        f"<p>What if: <code>{escape(', '.join(found.what_if))}</code></p>" if found.what_if else "",
        f'<p class="lead">{escape(headline(found.predictions))}</p>',
        _speed(found),
        _passes("decode", "One decode step", [(p, p.decode) for p in found.predictions]),
        _passes("prefill", "Prefill", [(p, p.prefill) for p in found.predictions]),
        _points(found.pareto),
        _validated(validation),
        _notes(tables.notes(found)),
        _origin(found, command, figures),
    ]
    return _FRAME.substitute(title=escape(title), body="\n".join(filter(None, body)))


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


# --- sections ---------------------------------------------------------------------------------------------------------


def _speed(found: RecipeComparison) -> str:
    rows = [(p.recipe, [*tables.cells(p).values()]) for p in found.predictions]
    first = found.predictions[0].recipe if found.predictions else ""
    caption = f"Tokens per second as multiples of {first}'s, the first recipe named (the dashed line)."
    return (
        f"<h2>Speed</h2><figure>{bars('bars', found.predictions)}<figcaption>{escape(caption)}</figcaption></figure>"
        f"{_table('recipe', tables.COLUMNS, rows, 'Recipes')}"
        f'<p class="muted">{escape(tables.LEGEND)} ! marks what exceeds the memory of a device.</p>'
    )


def _passes(name: str, title: str, phases: Sequence[tuple[Prediction, Phase]]) -> str:
    """The timelines of one kind of pass, then the same in numbers."""
    if not phases:
        return ""
    html = [f"<h2>{escape(title)}</h2>"]
    drawn = [phase for _, phase in phases if phase.spans]  # measured passes have none
    common = scale(drawn) if drawn else None
    if common is not None:
        enlarged = f"; below, {named(common.layers)} enlarged." if common.layers else "."
        html += [f"<p>All drawings have one scale. Above, the whole pass{enlarged}</p>", _KEY]
    for index, (p, phase) in enumerate(phases):
        if common is None or not phase.spans:
            continue
        title_of = f"{p.recipe}, {title[:1].lower()}{title[1:]}"
        html.append(
            f'<h3>{escape(p.recipe)} <span class="muted">{duration(phase.seconds)}</span></h3>'
            f"<figure>{timeline(f'{name}{index}', title_of, phase, common)}</figure>{_spans(phase, common)}"
        )
    rows = []
    for p, phase in phases:
        spent = [phase.seconds, *tables.parts(phase).values(), phase.communication_seconds]
        share = percent(phase.exposed_seconds, phase.seconds)
        rows.append((p.recipe, [*map(duration, spent), share, f"{phase.collectives:,}", f"{phase.kernels:,}"]))
    columns = ("time", "computing", "waiting", "launching", "communicating", "waiting, share", "collectives", "kernels")
    html.append(_table("recipe", columns, rows, f"{title}: where the time of a rank goes"))
    return "\n".join(html)


_KEY = (
    '<div class="key"><span style="--c:var(--compute)">computing</span><span style="--c:var(--hidden)">communication, '
    'hidden</span><span style="--c:var(--exposed)">communication, exposed</span><span class="hatch">compute stream '
    "waits for communication</span></div>"
)


def _spans(phase: Phase, common: Scale) -> str:
    """The enlarged spans as a table, for who cannot see the drawing."""
    if not common.layers:
        return ""
    rows = "".join(
        f"<tr><td>{escape('waits' if s.lane == 'compute' and s.exposed else label_of(s))}<td>{duration(s.start)}"
        f"<td>{duration(s.seconds)}"
        for s in shown(phase, common)
    )
    return (
        f"<details><summary>{named(common.layers)} as a table</summary><table><thead><tr><th>"
        f"<th>from<th>for<tbody>{rows}</table></details>"
    )


def _points(found: Mapping[str, Sequence[PredictedPoint]]) -> str:
    if not any(found.values()):
        return ""
    rows = [
        (recipe, [tables.degree(q), f"{q.batch:,}", duration(q.seconds_per_token), digits(q.tokens_per_second_per_gpu),
                  "best" if q.front else "" if q.fits else "does not fit"])
        for recipe, points in found.items()
        for q in sorted(points, key=lambda q: (not q.front, q.ranks, q.batch))
    ]  # fmt: skip
    columns = ("tp", "batch", "per token", "tokens/s per GPU", "")
    about = (
        "Each point is a TP degree and a batch. A line joins the points of a recipe that no other of it beats in both; "
        "the rest are pale."
    )
    return (
        f"<h2>Latency against throughput</h2><p>{about}</p><figure>{pareto('pareto', found)}</figure>"
        f"<details><summary>the points as a table</summary>{_table('recipe', columns, rows, 'Points')}</details>"
    )


def _validated(found: Validation | None) -> str:
    if found is None:
        return ""
    said = "".join(f"<p>{escape(words)}</p>" for words in found.said())
    table = "" if found.reason else _table("recipe", VALIDATED, found.cells(), "Predicted against measured")
    return f"<h2>Validation</h2>{table}{said}"


def _notes(said: Sequence[str]) -> str:
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in said) + "</ul>" if said else ""


def _origin(found: RecipeComparison, command: str, figures: Sequence[tuple[str, str, str]]) -> str:
    made = f"<p><code>{escape(command)}</code></p>" if command else ""
    where = f"{found.fabric}: {found.fabric_summary.rstrip('.')}. Device: {found.device}."
    head = '<div class="wide"><table class="words"><caption class="left muted">'
    head += f"Figures of {escape(found.fabric)}</caption><tbody>"
    table = f"{head}{_rows((what, row) for what, *row in figures)}</table></div>" if figures else ""
    return f"<h2>Where this is from</h2>{made}<p>{escape(where)}</p>{table}"


def _table(first: str, columns: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], caption: str) -> str:
    """Rows by their names; scrolls by itself where the page is narrow."""
    head = "".join(f'<th scope="col">{escape(column)}' for column in (first, *columns))
    return (
        f'<div class="wide"><table><caption class="left muted">{escape(caption)}</caption><thead><tr>'
        f"{head}<tbody>{_rows(rows)}</table></div>"
    )


def _rows(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(name)}' + "".join(f"<td>{escape(cell)}" for cell in row) for name, row in rows
    )
