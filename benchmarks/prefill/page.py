"""docs/results/prefill.md and its drawing, from record.json (`--record` of quality and times) and page.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.record import Record, Run
from rewriter.common.svg import number, rectangle, text

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "page.md"
DOCS = HERE.parents[1] / "docs"
PAGE, CHART = DOCS / "results" / "prefill.md", DOCS / "figures" / "prefill.svg"
LINK, PREDICTED = "as on PCIe", "predicted"
MANUALS, CALIBRATION = "manuals", "calibration"
STANDARD = "tensor-parallel"
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 380, 64, 48

RECORD = Record(HERE / "record.json", ("model", "text", "recipe", "tp", "prompt", "dtype", "way", "tokens", "lengths"))


def write() -> None:
    """The page and its drawing."""
    record = RECORD.read()
    template = TEMPLATE.read_text(encoding="utf-8")
    qualities, healed, timed = (record.get(kind, []) for kind in ("quality", "healing", "times"))
    parts = {"quality": quality(qualities), "healing": healing(healed), "times": times(timed)}
    parts["serving"] = times(record.get("serving", []))
    PAGE.write_text(template.format(**parts), encoding="utf-8")
    CHART.write_text(chart(qualities, healed, timed), encoding="utf-8")


def quality(entries: Sequence[Run]) -> str:
    """Tables of loss, KL and top-1, one for each model and length of prompts."""
    tables = []
    for group in sorted({(e["model"], e["text"], e["tp"], e["prompt"]) for e in entries}):
        rows = [e for e in entries if (e["model"], e["text"], e["tp"], e["prompt"]) == group]
        model, name, tp, prompt = group
        loss = rows[0]["original_loss"]
        tables.append(
            f"{model}, {name}.txt, {tp} ranks, prompts of {prompt}, {rows[0]['windows']} windows, loss {loss:.3f}:"
        )
        head = ["recipe", "exact ends", "all tokens", "the prompt", "with exact ends"]
        cells = [
            [
                f"`{e['recipe']}`",
                f"{e['exact_head']} and {e['exact_tail']}",
                *(_cell(q, loss) for q in e["ways"].values()),
            ]
            for e in rows
        ]
        tables.append(_table(head, cells))
    return "\n\n".join(tables)


def healing(entries: Sequence[Run]) -> str:
    """A table of each model: loss, KL and top-1 on manuals before and after training."""
    tables = []
    for model in dict.fromkeys(entry["model"] for entry in entries):
        rows = [entry for entry in entries if entry["model"] == model]
        found = rows[0]["texts"][MANUALS]
        tables.append(f"{model}, prompts of {rows[0]['prompt']}, {found['windows']} windows:")
        head = ["recipe", "ranks", "trained", "tokens", "before", "after", "nothing rewired"]
        tables.append(_table(head, [_healed(entry) for entry in rows]))
    return "\n\n".join(tables)


def _healed(entry: Run) -> list[str]:
    found = entry["texts"][MANUALS]
    cells = [_cell(found[name], found["original"]["loss"]) for name in ("before", "after", "exact prompt")]
    return [f"`{entry['recipe']}`", str(entry["tp"]), entry["way"], f"{entry['tokens']:,}", *cells]


def _cell(found: Run, original: float) -> str:
    return f"{found['loss'] / original - 1:+.1%}, {found['kl']:.3f}, {found['top1']:.2f}"


def times(entries: Sequence[Run]) -> str:
    """Tables of times to the first token, one for each model and link."""
    tables = []
    for entry in entries:
        for link, found in entry["links"].items():
            if "rate" not in found:
                continue
            where = f"{entry['model']}, {entry['tp']} ranks, {entry['dtype']}"
            tables.append(f"{where}, {link} ({found['rate'] / 1e6:.1f} MB/s each way):")
            timed = {name: seconds for name, seconds in found.items() if name != "rate"}
            standard = timed[STANDARD]
            predicted = entry["links"].get(PREDICTED) if link == LINK else None
            head = ["recipe", *(f"{int(n):,}" for n in standard)]
            rows = [
                [f"`{name}`", *(f"{s:.2f} s, {s / standard[n]:.2f}" for n, s in seconds.items())]
                for name, seconds in timed.items()
            ]
            if predicted is not None:
                head += [f"{int(n):,} predicted" for n in standard]
                for row, (name, seconds) in zip(rows, timed.items(), strict=True):
                    row += [f"{s:.2f} s, {s / seconds[n] - 1:+.0%}" for n, s in predicted[name].items()]
            tables.append(_table(head, rows))
    return "\n\n".join(tables)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def chart(qualities: Sequence[Run], healed: Sequence[Run], timed: Sequence[Run]) -> str:
    """Every recipe a point: its time to the first token as a share of standard's, and its KL from the original: with
    all tokens rewired, with the prompt rewired, and healed by the most tokens."""
    shares: dict[str, float] = {}
    for entry in timed[:1]:
        found = entry["links"].get(LINK, {STANDARD: {}})
        for name, seconds in found.items():
            if name != "rate" and seconds:
                longest = max(seconds, key=int)
                shares[name] = seconds[longest] / found[STANDARD][longest]
    points: list[tuple[str, float, float, str]] = []
    for entry in qualities:
        name = entry["recipe"]
        if name in shares and entry["model"] == qualities[-1]["model"]:
            for way, kind in (("all tokens", "x"), ("with exact ends", "a")):
                points.append((name, shares[name], entry["ways"][way]["kl"], kind))
            same = [one for one in healed if (one["model"], one["recipe"]) == (entry["model"], name)]
            if same:
                most = max(same, key=lambda one: int(one["tokens"]))
                points.append((name, shares[name], most["texts"][CALIBRATION]["after"]["kl"], "h"))
    return drawn(points)


def drawn(points: Sequence[tuple[str, float, float, str]]) -> str:
    """An SVG of points (recipe, share of standard's time, KL, kind); KL to the power of 1/3 shows small ones."""
    top = max([kl for _, _, kl, _ in points], default=1.0) ** (1 / 3)

    def place(share: float, kl: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 20) * share, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 60) * kl ** (1 / 3) / top

    style = (
        "text{font:12px system-ui,sans-serif;fill:#444}.t{font-size:14px}.g{fill:#fff}.l{stroke:#ccc}"
        ".a{fill:#1b6ca8}.x{fill:#c4472b}.h{fill:#3a8a4d}@media(prefers-color-scheme:dark){text{fill:#aeb7c4}"
        ".g{fill:#171b21}.l{stroke:#363d48}.a{fill:#6db3ea}.x{fill:#f08a70}.h{fill:#7cc98e}}"
    )
    parts = [rectangle(0, 0, WIDTH, HEIGHT, "g"), text(LEFT, 20, "Time to the first token against drift", "t")]
    parts.append(
        text(LEFT, 38, "blue: the prompt alone, with exact ends; green: that, healed; red: every token rewired")
    )
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = place(share, 0)
        parts.append(f'<path d="M{number(x)} 50V{number(y)}" class="l"/>')
        parts.append(text(x - 10, y + 18, f"{share:g}"))
    for kl in (0.001, 0.01, 0.1, 1.0, 4.0):
        if kl ** (1 / 3) <= top:
            _, y = place(0, kl)
            parts.append(f'<path d="M{LEFT} {number(y)}H{WIDTH - 20}" class="l"/>')
            parts.append(text(LEFT - 40, y + 4, f"{kl:g}"))
    parts.append(text(LEFT, HEIGHT - 10, "seconds to the first token, as a share of tensor parallelism's"))
    parts.append(text(8, 52, "KL"))
    for name, share, kl, kind in points:
        x, y = place(share, kl)
        parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="4" class="{kind}"><title>{name}</title></circle>')
        parts.append(text(x + 7, y + 4, name.removeprefix("prefill-") if kind == "a" else ""))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
        f"<title>Time to the first token against drift</title><style>{style}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    write()
