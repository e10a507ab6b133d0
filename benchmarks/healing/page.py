"""docs/results/adaptation.md and its drawing, from record.json (`run.py --record`) and page.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.prefill import page as prefill
from benchmarks.support.line_chart import line_chart
from benchmarks.support.record import Record, Run
from rewriter.recipes import Recipe

HERE = Path(__file__).resolve().parent
RECORD, TEMPLATE = HERE / "record.json", HERE / "page.md"
DOCS = HERE.parents[1] / "docs"
PAGE, CHART = DOCS / "results" / "adaptation.md", DOCS / "figures" / "healing.svg"
HEALED = HERE.parents[1] / "rewriter" / "recipes" / "healed.yaml"
NAMES = {"smollm2": ("SmolLM2-135M-Instruct", 134515008), "gemma3": ("Gemma-3-270M", 268098176)}
KEYS = ("model", "recipe", "way", "tokens", "tp")  # of a run
SMOOTHED = 12  # points of a curve: each is the mean of a part of the run
SLOWEST = "all weights, fp32"
FIRST = "smollm2"  # the model of runs whose line in the drawing names none


def add(kind: str, found: Run) -> None:
    """Put what was found into the record, in place of an older one of the same run."""
    Record(RECORD, KEYS).add(kind, found)


def keep(record: dict[str, list[Run]]) -> None:
    """Write the record."""
    Record(RECORD, KEYS).keep(record)


def read() -> dict[str, list[Run]]:
    """The record, by kind: "runs" of `rewrite adapt`, and "steps" that were timed."""
    return Record(RECORD, KEYS).read()


def write() -> None:
    """Write the page, its drawing, and the list of recipes that heal, which predictions print."""
    HEALED.write_text(healed(read(), prefill.RECORD.read()["healing"]), encoding="utf-8")
    text, drawn = page(read())
    PAGE.write_text(text, encoding="utf-8")
    CHART.write_text(drawn, encoding="utf-8")


def healed(record: dict[str, list[Run]], prompts: Sequence[Run]) -> str:
    """rewriter/recipes/healed.yaml: how far above the original's loss runs with the defaults ended; `prompts`: of
    recipes that rewire prompts alone, on the text of theirs that is further above."""
    ended = [(run, above(run, "after")) for run in record["runs"] if run["way"] == "defaults"]
    for run in prompts:
        losses = [(text["after"]["loss"], text["original"]["loss"]) for text in run["texts"].values()]
        bound = any(one.scope == "per_rank" for one in Recipe.load(run["recipe"]).build())
        ended.append(({**run, "tp": run["tp"] if bound else None}, max(after / first - 1 for after, first in losses)))
    rows = []
    for run, share in ended:
        model, parameters = NAMES[run["model"]]
        ranks = "null" if run["tp"] is None else run["tp"]
        rows.append(
            f"- {{recipe: {run['recipe']}, model: {model}, parameters: {parameters}, ranks: {ranks}, "
            f"tokens: {run['tokens']}, above: {share:.4f}}}"
        )
    return "# Written by benchmarks/healing/page.py, of the records of runs.\n" + "\n".join(rows) + "\n"


def page(record: dict[str, list[Run]]) -> tuple[str, str]:
    """(Markdown, SVG)."""
    runs = record["runs"]
    own = [run for run in runs if run["way"] == "defaults"]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        runs=_runs(own), methods=_methods(runs), answers=_answers(own), speed=_speed(record["steps"])
    )
    return text, chart(own)


def above(run: Run, name: str) -> float:
    """A loss as a share above the original's."""
    original: float = run["losses"]["original"]
    return float(run["losses"][name]) / original - 1


def closed(run: Run) -> float:
    """The share of the gap in loss that is closed."""
    return 1 - above(run, "after") / above(run, "before")


def _runs(runs: Sequence[Run]) -> str:
    lines = [
        "| recipe | ranks | tokens | rewritten | healed | gap closed | perplexity of prose | tokens/s | memory, GB |",
        "| --- | --: | --: | --: | --: | --: | --- | --: | --: |",
    ]
    for run in sorted(runs, key=lambda run: (run["model"], run["recipe"], run["tokens"])):
        cells = [f"`{run['recipe']}`, {run['model']}", str(run["tp"] or "any"), f"{run['tokens']:,}"]
        cells += [f"+{above(run, 'before'):.1%}", f"+{above(run, 'after'):.1%}", f"{closed(run):.0%}"]
        cells.append(" → ".join(f"{run['perplexity'][name]:,.1f}" for name in ("original", "before", "after")))
        lines.append(
            "| " + " | ".join([*cells, str(run["tokens_per_second"]), f"{run['peak_bytes'] / 1e9:.1f}"]) + " |"
        )
    return "\n".join(lines)


def _methods(runs: Sequence[Run]) -> str:
    """The methods that were tried for `ladder-upper-half`, next to the defaults at the same number of tokens."""
    upper = [run for run in runs if run["recipe"] == "ladder-upper-half" and run["model"] == FIRST]
    ways = Counter(run["tokens"] for run in upper)
    lines = [
        "| tokens | method | loss above the original's | gap closed | tokens/s |",
        "| --: | --- | --: | --: | --: |",
    ]
    for run in sorted(upper, key=lambda run: (run["tokens"], above(run, "after"))):
        if ways[run["tokens"]] > 1 or run["way"] != "defaults":
            cells = [f"{run['tokens']:,}", run["way"], f"+{above(run, 'after'):.2%}", f"{closed(run):.1%}"]
            lines.append("| " + " | ".join([*cells, str(run["tokens_per_second"])]) + " |")
    return "\n".join(lines)


def _answers(runs: Sequence[Run]) -> str:
    asked = max((run for run in runs if "answers" in run), key=lambda run: run["tokens"])
    lines = [
        f"`{asked['recipe']}`, {asked['tokens']:,} tokens:", "",
        "| question | original | rewritten | healed |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    lines += ["| " + " | ".join(cell.replace("|", "\\|") or "–" for cell in row) + " |" for row in asked["answers"]]
    return "\n".join(lines)


def _speed(steps: Sequence[Run]) -> str:
    lines = ["| | seconds of one core | speedup |", "| --- | --: | --: |"]
    seconds = {way: fmean(found) for way, found in steps[-1]["seconds"].items()}
    for way, mean in sorted(seconds.items(), key=lambda item: -item[1]):
        lines.append(f"| {way} | {mean:.1f} | {seconds[SLOWEST] / mean:.1f} |")
    return "\n".join(lines)


def chart(runs: Sequence[Run]) -> str:
    """The distance from the original while training, in % of its loss: on text of its own, a nat of KL is one of
    loss."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in sorted(runs, key=lambda run: (run["model"], run["recipe"], run["tokens"])):
        curve = run["curve"]
        size = max(1, len(curve) // SMOOTHED)
        parts = [curve[first : first + size] for first in range(0, len(curve), size)]
        model = f", {run['model']}" if run["model"] != FIRST else ""
        name = f"{run['recipe']}{model}, {run['tokens'] // 1000:,}k"
        lines[name] = [
            (fmean(tokens for tokens, _ in part), 100 * fmean(kl for _, kl in part) / run["losses"]["original"])
            for part in parts
        ]
    title = "Healing: distance from the original, % of its loss"
    return line_chart(title, "tokens of training (logarithmic)", "KL, % of the original's loss", lines)
