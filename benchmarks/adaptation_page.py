"""docs/ADAPTATION.md from the results of the experiment: its tables, its figures, and what its text may claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adaptation_figure import line_chart
from adaptation_runs import (
    CORE,
    FROM_SCRATCH_RATE,
    OTHERS,
    PRETRAINING,
    RATES,
    REFERENCE_RATES,
    SCRATCH,
    STANDARD,
    Result,
    Run,
    Settings,
    difference,
    reference_of,
)

TEMPLATE = Path(__file__).with_name("adaptation.md")
GOALS = {"ladder-upper-half": 0.5, "ladder": 2.0, "desync-4x-sum": 2.0}  # % above the reference, at 5 % of the tokens
LEAST_TOKENS = 0.05  # share of pretraining in which the goals are to be reached

Results = Mapping[Run, Result]


def page(results: Results, settings: Settings, option: str) -> str:
    """The page as Markdown. `option` is the command's that gave the results."""
    values = {
        "command": f"python benchmarks/adaptation.py {option}".rstrip(),
        "healing": healing(results),
        "goals": goals(results),
        "verdict": verdict_on_methods(results),
        "methods": methods(results),
        "scratch": scratch(results),
        "settings": settings_table(settings),
        "evaluated": f"{settings.evaluated:,}",
        "windows": f"{settings.windows:,}",
        "length": str(settings.length),
        "pretraining": f"{PRETRAINING:,}",
        "trained": f"{sum(run.tokens for run in results):,}",
        "minutes": f"{sum(result.seconds for result in results.values()) / 60:.0f}",
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"<<{name}>>", value)
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def against_reference(run: Run, results: Results) -> tuple[float, float] | None:
    """% above the reference and half of the interval; None where one of the two is missing."""
    reference = reference_of(run, results)
    if run not in results or reference is None:
        return None
    return difference(results[run], results[reference])


def cell(found: tuple[float, float] | None) -> str:
    return "–" if found is None else f"{found[0]:+.2f} ± {found[1]:.2f}"


def trained(results: Results) -> list[tuple[str, Run]]:
    """How a model was trained, in words, with the run at zero tokens: the columns of the table of healing."""
    found = {}
    for run in results:
        if run.tokens and not run.scratch and run.recipe != STANDARD:
            how = "SFT" if run.method == "sft" else "distilled"
            words = "refitted, " * bool(run.refit) + how + ", annealed" * bool(run.anneal)
            found[f"{words}, {run.tokens / PRETRAINING:.0%}"] = run
    return sorted(
        found.items(),
        key=lambda item: (item[1].tokens, bool(item[1].anneal), item[1].method != "sft", bool(item[1].refit)),
    )


def healing(results: Results) -> str:
    """By recipe: % above the reference before and after each way of training."""
    columns = trained(results)
    rows = []
    for recipe in (*CORE, *OTHERS):
        if Run(recipe) not in results:
            continue
        cells = [cell(against_reference(replace(like, recipe=recipe), results)) for _, like in columns]
        rows.append(
            [f"`{recipe}`", f"{results[Run(recipe)].loss:.4f}", cell(against_reference(Run(recipe), results)), *cells]
        )
    found = [reference_of(like, results) for _, like in columns]
    losses = ["–" if reference is None else f"{results[reference].loss:.4f}" for reference in found]
    rows.append(["loss of the reference", f"{results[Run(STANDARD)].loss:.4f}", "", *losses])
    return table(("recipe", "loss, zero-shot", "zero-shot", *(name for name, _ in columns)), rows)


def best(recipe: str, results: Results) -> tuple[str, tuple[float, float]] | None:
    """The way of training that brings a recipe closest to its reference within the goals' tokens."""
    found = [
        (run.name.removeprefix(f"{recipe} "), measured)
        for run in results
        if run.recipe == recipe and not run.scratch and 0 < run.tokens <= LEAST_TOKENS * PRETRAINING
        and (measured := against_reference(run, results)) is not None
    ]  # fmt: skip
    return min(found, key=lambda item: item[1][0], default=None)


def goals(results: Results) -> str:
    rows = []
    for recipe, goal in GOALS.items():
        if (found := best(recipe, results)) is not None:
            way, measured = found
            verdict = "reached" if measured[0] <= goal else "**missed**"
            rows.append([f"`{recipe}`", f"{goal:g}", cell(measured), way, verdict])
    return table(("recipe", "goal, %", "found, %", "how", ""), rows)


def pairs(results: Results) -> list[tuple[Run, Run]]:
    """(distilled, fine-tuned) on the same tokens."""
    return [
        (distilled, tuned)
        for distilled in results
        for tuned in results
        if (distilled.method, tuned.method) == ("distill", "sft") and distilled.recipe == tuned.recipe
        and (distilled.tokens, distilled.anneal, distilled.refit) == (tuned.tokens, tuned.anneal, tuned.refit)
    ]  # fmt: skip


def methods(results: Results) -> str:
    """What distillation adds to SFT: the paired difference of the two."""
    rows = [
        [f"`{distilled.recipe}`" + ", annealed" * bool(distilled.anneal), f"{distilled.tokens:,}",
         f"{results[tuned].loss:.4f}", f"{results[distilled].loss:.4f}",
         cell(difference(results[distilled], results[tuned]))]
        for distilled, tuned in pairs(results)
    ]  # fmt: skip
    return table(("recipe", "tokens", "SFT", "distilled", "distilled against SFT, %"), rows)


def verdict_on_methods(results: Results) -> str:
    """In how many of the pairs distillation is better, beyond the interval."""
    found = [difference(results[distilled], results[tuned]) for distilled, tuned in pairs(results)]
    better = sum(mean + half < 0 for mean, half in found)
    worse = sum(mean - half > 0 for mean, half in found)
    return f"Distillation is better in {better} of {len(found)} pairs, worse in {worse}, beyond the interval."


def scratch(results: Results) -> str:
    """Models from scratch at equal tokens, against the standard wiring."""
    rows = []
    for recipe in SCRATCH:
        runs = [run for run in results if run.scratch and run.recipe == recipe]
        rows += [
            [f"`{recipe}`", f"{run.tokens:,}", f"{results[run].loss:.4f}", cell(against_reference(run, results))]
            for run in runs
        ]
    if not rows:
        return "Not trained yet: `python benchmarks/adaptation.py --full`."
    return table(("wiring", "tokens", "loss", "against the standard wiring, %"), rows)


def settings_table(settings: Settings) -> str:
    return table(
        ("setting", "value"),
        [
            ["learning rate, fine-tuning", f"{RATES['sft']:g}"],
            ["learning rate, distillation", f"{RATES['distill']:g}"],
            ["learning rate, reference", "the best of " + ", ".join(f"{peak:g}" for peak in REFERENCE_RATES)],
            ["learning rate, from scratch", f"{FROM_SCRATCH_RATE:g}"],
            ["schedule", f"linear from zero over {settings.warmup:.0%} of the steps, then linearly to zero"],
            ["tokens per step", f"{settings.batch:,}, in windows of {settings.length}"],
            [
                "optimizer",
                f"AdamW, betas 0.9 and 0.95, weight decay {settings.weight_decay:g}, gradient norm clipped at 1",
            ],
            [
                "distillation",
                f"KL to the original's logits + {settings.hidden:g} × relative squared error of hidden states",
            ],
            ["refitting", f"{settings.refit:,} of the tokens, ridge regression of every linear layer (`--refit`)"],
            ["annealing", "λ from 0 to 1 over the first half of the steps (`--anneal`)"],
            ["seed", str(settings.seed)],
        ],
    )


def figures(results: Results) -> dict[str, str]:
    """SVG files by name: the loss while training, of SFT (its loss is that of the reference) and from scratch."""
    found = {}
    for name, title, some in (
        ("adaptation-sft", "Supervised fine-tuning", [r for r in results if r.method == "sft" and not r.scratch]),
        ("adaptation-scratch", "From scratch", [run for run in results if run.scratch]),
    ):
        longest = max((run.tokens for run in some), default=0)
        lines = {
            "original (the reference)" if run.recipe == STANDARD else run.recipe: results[run].curve
            for run in some
            if run.tokens == longest
            and results[run].curve
            and not run.anneal
            and not run.refit
            and (run.recipe != STANDARD or run == reference_of(run, results))
        }
        if lines:
            millions = {k: [(tokens / 1e6, loss) for tokens, loss in line] for k, line in lines.items()}
            found[f"{name}.svg"] = line_chart(title, "million tokens", "training loss, nats per token", millions)
    return found


def unsupported(results: Results) -> list[str]:
    """What the text of the page says and the figures do not bear out."""
    zero = {recipe: results[Run(recipe)].loss for recipe in CORE}
    after = [run for run in results if run.tokens and not run.scratch and run.recipe in CORE]
    claims = {
        "the text was measured with enough tokens": all(len(result.losses) >= 2 for result in results.values()),
        "zero-shot is worse than the original": all(loss > results[Run(STANDARD)].loss for loss in zero.values()),
        "every training heals": all(results[run].loss < zero[run.recipe] for run in after),
        "twice the tokens heal more": all(
            results[b].loss < results[a].loss
            for a in after
            for b in after
            if replace(a, tokens=b.tokens) == b and a.tokens < b.tokens
        ),
    }
    return [claim for claim, holds in claims.items() if not holds]
