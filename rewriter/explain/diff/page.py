"""Differences as one HTML page that needs no network, no script and no other file, in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rewriter.common.numbers import digits
from rewriter.explain.diff.differences import (
    CodeDifference,
    Differences,
    PassDifference,
    TensorDifferences,
    norm_text,
    wired_cells,
)  # fmt: skip

_STYLE = """
:root{--ground:#fff;--panel:#f6f7f9;--ink:#1b2230;--muted:#5a6474;--grid:#dfe3ea;--plus:#e3f4e6;--minus:#fbe6e2;--mid:#fdf3da}
@media (prefers-color-scheme:dark){:root{--ground:#14171c;--panel:#1c2027;--ink:#e6e9ee;--muted:#a0a9b8;--grid:#2c323c;
--plus:#18331f;--minus:#3d1f1a;--mid:#362b14}}
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;line-height:1.25;margin:0 0 4px}
h2{font-size:19px;margin:44px 0 6px}p{margin:6px 0;max-width:76ch}.muted{color:var(--muted)}
figure{margin:14px 0;overflow-x:auto}figure svg{min-width:420px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}.wide{overflow-x:auto}
th,td{text-align:left;padding:4px 22px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top}
thead th{color:var(--muted);font-weight:500}tbody th{font-weight:600}.n{text-align:right}
tr.old td{color:var(--muted)}code,pre{font:12.5px/1.5 ui-monospace,monospace}
pre{background:var(--panel);padding:10px;border-radius:4px;overflow-x:auto;margin:6px 0}
pre .p{background:var(--plus)}pre .m{background:var(--minus)}pre span{display:block}
details{margin:6px 0}summary{cursor:pointer}
.code{width:100%;table-layout:fixed;font:12px/1.45 ui-monospace,monospace}
.code td{border:0;padding:0 6px;white-space:pre-wrap;overflow-wrap:anywhere}.code .l{width:46px;color:var(--muted);
text-align:right}.changed td{background:var(--mid)}.removed td:nth-child(-n+2){background:var(--minus)}
.added td:nth-child(n+3){background:var(--plus)}.gap td{color:var(--muted);background:var(--panel)}
@media print{main{max-width:none}}
"""


def page(found: Differences) -> str:
    """The page's text; the same differences give the same bytes."""
    title = f"{found.before} | {found.after}"
    body = [
        f"<h1>{escape(found.before)} <span class='muted'>|</span> {escape(found.after)}</h1>",
        "<p>Nothing differs.</p>" if found.same else "",
        _facts(found),
        *(f"<p class='muted'>{escape(note)}</p>" for note in found.notes),
        _drawings(found),
        _layers(found),
        _passes(found.passes),
        "".join(map(_code, found.code)),
        "" if found.tensors is None else _tensors(found.tensors),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{_STYLE}</style>'
    inside = "\n".join(filter(None, body))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{inside}\n</main></body></html>\n'


def _facts(found: Differences) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(a)}</td><td>{escape(b)}</td></tr>"
        for name, (a, b) in found.known_facts.items()
    )
    return _table(("", found.before, found.after), rows)


def _drawings(found: Differences) -> str:
    shown = "".join(f"<figure>{drawing}</figure>" for drawing in found.drawings if drawing)
    about = "Blocks stand above the residual stream. A line from the stream into a block is what it reads."
    return f"<h2>Layers</h2><p class='muted'>{about}</p>{shown}" if shown else ""


def _layers(found: Differences) -> str:
    rows = ""
    for layer in found.layers:
        before, after = (
            f"<td>{escape(reads)}</td><td>{collectives}</td><td class='n'>{payload}</td>"
            for reads, collectives, payload in map(wired_cells, (layer.before, layer.after))
        )
        if layer.same:
            rows += f"<tr><th>{layer.name}</th><td>same</td>{before}</tr>"
        else:
            rows += f"<tr class='old'><th>{layer.name}</th><td>{escape(found.before)}</td>{before}</tr>"
            rows += f"<tr><td></td><td>{escape(found.after)}</td>{after}</tr>"
    return _table(("layers", "", "reads", "collectives", "bytes per token"), rows) if rows else ""


def _passes(passes: Sequence[PassDifference]) -> str:
    if not passes:
        return ""
    parts = ["<h2>Passes</h2>"]
    for entry in passes:
        where = "" if entry.where == "both" else f" <span class='muted'>only in {escape(entry.where)}</span>"
        operators = escape(", ".join(entry.changes))
        parts.append(
            f"<p><b>{escape(entry.name)}</b> <span class='muted'>{escape(entry.kind)}</span>{where}: "
            f"{escape(entry.summary)}</p>"
        )
        parts += [f"<p class='muted'>options: <code>{escape(entry.options)}</code></p>"] if entry.options else []
        parts += [f"<p class='muted'>{operators}</p>"] if operators else []
        if entry.reads:
            lines = "\n".join(map(escape, entry.reads))
            parts.append(f"<details><summary>{len(entry.reads)} blocks read other values</summary><pre>{lines}</pre>"
                         "</details>")  # fmt: skip
        if entry.ir:
            parts.append(
                f"<details><summary>the IR before and after</summary><pre>{_colored(entry.ir)}</pre></details>"
            )
    return "\n".join(parts)


def _colored(lines: Sequence[str]) -> str:
    marks = {"+": "p", "-": "m"}
    return "".join(f"<span class='{marks.get(line[:1], '')}'>{escape(line) or ' '}</span>" for line in lines)


def _code(code: CodeDifference) -> str:
    title = f"<h2>Generated code: {escape(code.title)}</h2>"
    if not code.rows:
        return f"{title}<p>The same.</p>"
    rows = []
    for kind, left, right in code.rows:
        if kind == "gap":
            rows.append("<tr class='gap'><td class='l'></td><td>⋯</td><td class='l'></td><td>⋯</td></tr>")
            continue
        cells = "".join(
            "<td class='l'></td><td></td>"
            if side is None
            else f"<td class='l'>{side[0]}</td><td>{escape(side[1])}</td>"
            for side in (left, right)
        )
        rows.append(f"<tr class='{kind}'>{cells}</tr>")
    head = (
        f"<thead><tr><th class='l'></th><th>{escape(code.before)}</th><th class='l'></th><th>{escape(code.after)}</th>"
    )
    table = f"<table class='code'>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"{title}<p class='muted'>+{code.added} −{code.removed} lines</p>{table}"


def _tensors(found: TensorDifferences) -> str:
    counts = [f"{found.same:,} are the same ({digits(found.same_bytes / 1e6)} MB)"]
    counts += [f"{count:,} {word}" for word, count in found.counts.items()]
    parts = [f"<h2>Tensors</h2><p>{', '.join(counts)}.</p>"]
    if found.changed:
        rows = "".join(
            f"<tr><td><code>{escape(t.name)}</code></td><td>{escape(t.what)}</td>"
            f"<td>{escape(' → '.join(dict.fromkeys((t.before, t.after))))}</td>"
            + "".join(f"<td class='n'>{norm_text(n)}</td>" for n in (t.norm_before, t.norm_after, t.norm_difference))
            + "</tr>"
            for t in found.changed
        )
        parts.append(_table(("changed", "what", "", "‖before‖", "‖after‖", "‖after − before‖"), rows))
    if found.renamed:
        rows = "".join(
            f"<tr><td><code>{escape(a)}</code></td><td><code>{escape(b)}</code></td></tr>" for a, b in found.renamed
        )
        parts.append(_table(("renamed from", "to"), rows))
    for word, names in (("removed", found.removed), ("added", found.added)):
        parts += [f"<p>{word}: {', '.join(f'<code>{escape(n)}</code>' for n in names)}</p>"] if names else []
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
