"""A comparison as one HTML file that needs no network, no script and no other file, in light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.common.numbers import digits, duration, percent, times
from rewriter.predict.comparison_tables import (
    COLUMNS,
    LEGEND,
    MODELLED,
    cells,
    degree,
    model_name,
    notes,
    parts,
    setting,
)
from rewriter.predict.draw_bars import bars
from rewriter.predict.draw_pareto import pareto
from rewriter.predict.draw_timeline import Scale, label_of, named, scale, shown, timeline
from rewriter.predict.results import Phase, PredictedPoint, Prediction, RecipeComparison
from rewriter.predict.svg import STYLE
from rewriter.predict.validation import COLUMNS as VALIDATED
from rewriter.predict.validation import Validation

_CSS = """
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;line-height:1.25;margin:0 0 4px}
h2{font-size:19px;margin:44px 0 6px}h3{font-size:15px;margin:26px 0 2px}p{margin:6px 0;max-width:76ch}
.muted,figcaption{color:var(--muted)}.lead{font-size:17px;margin:18px 0 8px}
.mark{display:inline-block;background:var(--note-ground);color:var(--note);border-radius:4px;padding:1px 8px;
font-weight:600;font-size:13px;letter-spacing:.02em}
figure{margin:10px 0;overflow-x:auto}figure>svg{min-width:720px}figcaption{font-size:13px;margin:4px 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}.wide{overflow-x:auto}
th,td{text-align:right;padding:4px 0 4px 20px;white-space:nowrap;border-bottom:1px solid var(--grid)}
thead th{color:var(--muted);font-weight:500}tbody th{font-weight:600}
th:first-child,td:first-child,.left{text-align:left;padding-left:0}.words td{white-space:normal;text-align:left}
code{font:13px ui-monospace,monospace;background:var(--panel);padding:2px 6px;border-radius:4px;overflow-wrap:anywhere}
details{margin:4px 0;font-size:13px}summary{color:var(--muted);cursor:pointer}
.key{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:13px;color:var(--muted);margin:8px 0 0}
.key span::before{content:"";display:inline-block;width:22px;height:10px;margin-right:7px;background:var(--c)}
.key .hatch::before{background:repeating-linear-gradient(135deg,var(--exposed) 0 2px,transparent 2px 6px)}
.tc,.tw,.th,.te{stroke-width:14;fill:none}.tc{stroke:var(--compute)}.th{stroke:var(--hidden)}.te{stroke:var(--exposed)}
.tw{stroke:var(--exposed);stroke-opacity:.28}.zc,.zh,.ze{stroke:var(--ground);stroke-width:.6}
.zc{fill:var(--compute)}.zh{fill:var(--hidden)}.ze{fill:var(--exposed)}.zw{fill:url(#hatch)}
svg .zt{fill:var(--ground);font-size:11px;pointer-events:none}svg .zt.k{fill:var(--ink)}
.hl{stroke:var(--exposed);stroke-width:2}
.b0{fill:var(--base)}.b1{fill:var(--accent)}.bt{fill:var(--hidden)}.bn{fill:url(#hatch)}
.r1{stroke:var(--ink);stroke-dasharray:4 3;fill:none}
.pl{fill:none;stroke:var(--k);stroke-width:2}.pl.d{stroke-dasharray:6 4}
.pp{fill:var(--k);stroke:var(--k)}.pp.o{opacity:.42}.pp.h,.pk.h{fill:var(--ground)}.pk{fill:var(--muted);stroke:var(--muted)}
.s0{--k:var(--s0)}.s1{--k:var(--s1)}.s2{--k:var(--s2)}.s3{--k:var(--s3)}.s4{--k:var(--s4)}.s5{--k:var(--s5)}
.s6{--k:var(--s6)}.s7{--k:var(--s7)}
@media print{main{max-width:none}details{display:block}}
"""
_HATCH = (
    '<svg aria-hidden="true" style="position:absolute;width:0;height:0"><defs><pattern id="hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path class="hl" d="M0 0V6"/></pattern></defs></svg>'
)


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
    title = f"{model_name(found)}: what recipes gain on {found.fabric}"
    mark, _, why = MODELLED.partition(":")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(setting(found))} · {escape(found.fabric_summary)}</p>',
        f'<p><span class="mark">{escape(mark)}</span>{escape(why)}</p>' if found.modelled else "",
        f"<p>What if: <code>{escape(', '.join(found.what_if))}</code></p>" if found.what_if else "",
        f'<p class="lead">{escape(headline(found.predictions))}</p>',
        _speed(found),
        _passes("decode", "One decode step", [(p, p.decode) for p in found.predictions]),
        _passes("prefill", "Prefill", [(p, p.prefill) for p in found.predictions]),
        _points(found.pareto),
        _validated(validation),
        _notes(notes(found)),
        _origin(found, command, figures),
    ]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>{STYLE}{_CSS}</style></head><body>{_HATCH}<main>\n'
    )
    return head + "\n".join(filter(None, body)) + "\n</main></body></html>\n"


def write_page(file: str | os.PathLike[str], text: str) -> None:
    """Write `text`, all of it or nothing. Raises RewriterError where the directory of `file` cannot be written to."""
    path = Path(file)
    require_place(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RewriterError(f"--html {path}: cannot be written ({error.strerror}). Choose another place.") from error
    finally:
        partial.unlink(missing_ok=True)


def require_place(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path.is_dir():
        raise RewriterError(f"--html {path}: it is a directory. Give the name of a file in it.")
    if not path.parent.is_dir():
        raise RewriterError(f"--html {path}: there is no directory {path.parent}. Make it first.")


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
    rows = [(p.recipe, [*cells(p).values()]) for p in found.predictions]
    first = found.predictions[0].recipe if found.predictions else ""
    caption = f"Tokens per second as multiples of {first}'s, the first recipe named (the dashed line)."
    return (
        f"<h2>Speed</h2><figure>{bars('bars', found.predictions)}<figcaption>{escape(caption)}</figcaption></figure>"
        f"{_table('recipe', COLUMNS, rows, 'Recipes')}"
        f'<p class="muted">{escape(LEGEND)} ! marks what exceeds the memory of a device.</p>'
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
        spent = [phase.seconds, *parts(phase).values(), phase.communication_seconds]
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
        (recipe, [degree(q), f"{q.batch:,}", duration(q.seconds_per_token), digits(q.tokens_per_second_per_gpu),
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
