"""When does a recipe pay? docs/results/when.md: recipes against a fabric's best exact baseline, by model and batch.

    python -m benchmarks.predict.when              # all of it, and docs/results/when.md
    python -m benchmarks.predict.when --only 70B   # models whose name has this text; writes nothing
    python -m benchmarks.predict.when --prompts    # the section on prompts alone, into the page as it stands

A baseline is exact: standard tensor parallelism with the fabric's all-reduces, over all GPUs or over a part of them,
the rest holding replicas that share the batch. A recipe has the same choice. What counts is the time of a decode step.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.healing import page as healing_page
from benchmarks.predict import when_prompts
from benchmarks.predict.backtest_points import traced
from benchmarks.predict.when_prompts import table
from rewriter.common.errors import RewriterError
from rewriter.fabric import load_fabric
from rewriter.predict.analytic import Candidate, Predictor, bytes_per_rank
from rewriter.predict.break_even import BreakEven
from rewriter.predict.candidates import Candidates
from rewriter.predict.workload import Cluster as RankCluster
from rewriter.predict.workload import Workload
from rewriter.recipes.apply import load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "results" / "when.md"
MODELS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.1 70B": "llama-3.1-70b",
    "Llama 3.1 405B": "llama-3.1-405b",
    "Mixtral 8x7B": "mixtral-8x7b",
}
BATCHES = (1, 16, 64)
RECIPES = (
    "tensor-parallel", "ladder-upper-half", "ladder-own-partial", "desync-2x-sum", "drop-sync", "ladder", "ladder-int8",
    "parallel", "desync-4x", "tensor-parallel-int8", "upper-bound",
)  # fmt: skip
HEALED = 0.10  # a recipe heals where a recorded run ends within it of the original's loss
PROMPT, GENERATE = 1024, 512
LEAST = 0.05  # a gain below it is not told from none: predicted gains of ladder are off by about as much


@dataclass(frozen=True)
class Cluster:
    """A fabric and how many of its GPUs there are, in tensor-parallel groups of `degrees`."""

    name: str
    fabric: str
    gpus: int
    degrees: tuple[int, ...]

    @property
    def title(self) -> str:
        return self.name + (" (modelled)" if load_fabric(self.fabric).modelled else "")


CLUSTERS = (
    Cluster("NVLink: 8 H200", "h200-nvlink", 8, (1, 2, 4, 8)),
    Cluster("PCIe: 8 RTX PRO 6000", "pcie-gen5", 8, (1, 2, 4, 8)),
    Cluster("two nodes: 2 × 8 H100, InfiniBand", "h100-2x8-ib", 16, (1, 2, 4, 8, 16)),
    Cluster("RoCE: 8 servers of one L40S", "roce-100g", 8, (1, 2, 4, 8)),
    Cluster("Ethernet: 8 servers of one L40S, TCP", "ethernet-100g", 8, (1, 2, 4, 8)),
)


@dataclass(frozen=True)
class Choice:
    """A recipe on tensor-parallel groups of `degree` GPUs, of which each takes its share of the batch."""

    recipe: str
    degree: int
    replicas: int
    seconds: float
    kind: str

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"TP {self.degree}{replicas}"


@dataclass(frozen=True)
class Cell:
    """One model on one cluster at one batch: the fastest choice of each recipe; empty where nothing fits."""

    batch: int
    best: Mapping[str, Choice]
    ladder_pays_from: str = "—"

    @property
    def baseline(self) -> Choice | None:
        exact = [choice for choice in self.best.values() if choice.kind == "exact"]
        return min(exact, key=lambda choice: choice.seconds, default=None)

    def gain(self, recipe: str) -> float | None:
        """Tokens per second over the best exact baseline's, less one."""
        if self.baseline is None or recipe not in self.best:
            return None
        return self.baseline.seconds / self.best[recipe].seconds - 1

    def answer(self, among: Collection[str] = RECIPES) -> str:
        """What to run, of the recipes `among`."""
        baseline = self.baseline
        if baseline is None:
            return "does not fit"
        kept = [r for r, choice in self.best.items() if choice.kind == "approximating" and r in among]
        best = max(kept, key=lambda r: self.gain(r) or 0.0, default=None)
        if best is None or (self.gain(best) or 0.0) < LEAST:
            return "keep the standard model"
        return f"`{best}` {self.gain(best):+.0%}"


class Chooser:
    """The fastest choice of each recipe. Programs are made once per model and degree, for all clusters and batches."""

    def __init__(self, model: str) -> None:
        self.candidates = Candidates(traced(model, "bfloat16"))
        self.made: dict[int, list[Candidate]] = {}

    def at(self, degree: int) -> list[Candidate]:
        """Recipes on a group; on one GPU the standard model, which the others are equal to there."""
        if degree not in self.made:
            loaded = [load_recipe(name) for name in (RECIPES if degree > 1 else RECIPES[:1])]
            try:
                self.made[degree] = self.candidates.of(loaded, degree)[0]
            except RewriterError:  # heads that the degree does not divide
                self.made[degree] = []
        return self.made[degree]

    def cell(self, cluster: Cluster, batch: int) -> Cell:
        """Of those that fit in memory."""
        found: dict[str, Choice] = {}
        for degree in cluster.degrees:
            groups = cluster.gpus // degree
            share = -(-batch // groups)
            for predictor in predictors(cluster.fabric, degree, share):
                for candidate in self.at(degree):
                    if bytes_per_rank(candidate.program, share, PROMPT, GENERATE) > predictor.fabric.device.memory:
                        continue
                    try:
                        seconds = predictor.simulate(candidate.program, record=False).decode.seconds
                    except RewriterError:  # the fabric has no answer for what it communicates
                        continue
                    choice = Choice(candidate.recipe, degree, min(groups, batch), seconds, candidate.kind)
                    if candidate.recipe not in found or seconds < found[candidate.recipe].seconds:
                        found[candidate.recipe] = choice
        return Cell(batch, found, self.pays_from(cluster, batch, found.get("ladder")))

    def pays_from(self, cluster: Cluster, batch: int, ladder: Choice | None) -> str:
        """The time of an all-reduce from which ladder beats the standard model of the same degree, in words."""
        if ladder is None:
            return "—"
        predictor = predictors(cluster.fabric, ladder.degree, -(-batch * ladder.degree // cluster.gpus))[0]
        programs = {one.recipe: one.program for one in self.at(ladder.degree)}
        standard, other = (predictor.simulate(programs[r], record=False) for r in ("tensor-parallel", "ladder"))
        durations, delays = predictor._durations(programs["ladder"]).without_skew(), predictor._delay
        even, note = BreakEven(standard.steps[1], durations, delays).of(other.steps[1])
        return f"{even * 1e6:.1f} µs" if even is not None else (note or "—").partition(":")[0]


def predictors(fabric: str, degree: int, batch: int) -> list[Predictor]:
    """With the fastest all-reduce of each size, and with all-reduces that norm, where the fabric has them."""
    found = load_fabric(fabric)
    workload = Workload(batch=batch, prompt=PROMPT, generate=GENERATE, tp=degree)
    fused = degree > 1 and "fused" in found.backends
    libraries = (None, "fused") if fused else (None,)
    return [Predictor(workload, RankCluster(found, library=library)) for library in libraries]


def heal() -> list[str]:
    """The recipes that a real model healed from, by benchmarks/healing/record.json."""
    runs = healing_page.read()["runs"]
    own = [run for run in runs if run["way"] == "defaults" and run["model"] == healing_page.FIRST]
    found = {run["recipe"] for run in own if healing_page.above(run, "after") <= HEALED}
    return [recipe for recipe in RECIPES if recipe in found]


def answers(cells: Mapping[tuple[str, str], Sequence[Cell]], among: Collection[str]) -> str:
    header = ["model", "fabric", *(f"batch {batch}" for batch in BATCHES)]
    rows = [[model, cluster, *(one.answer(among) for one in line)] for (model, cluster), line in cells.items()]
    return table(header, rows)


def page(cells: Mapping[tuple[str, str], Sequence[Cell]], prompts: str) -> str:
    """docs/results/when.md. `prompts`: its section on them."""
    healed = heal()
    parts = [
        "# When does a recipe pay?",
        "`python -m benchmarks.predict.when` writes this page from predictions: [How a gain is "
        "predicted](../concepts/prediction.md). [Backtest](backtest.md) says how far those are from measurements.",
        f"- Gains are in tokens per second of decode steps at {PROMPT:,} + {GENERATE} tokens in bf16, over *the best "
        "exact baseline of the fabric*.\n"
        "- That baseline is standard tensor parallelism with the all-reduces that a server would choose there. It runs "
        "over all GPUs or a part of them; the others hold replicas that share the batch. Recipes choose their degree "
        "likewise.\n"
        f"- Where no recipe that changes the model gains {LEAST:.0%}, the answer is to keep it.\n"
        "- A recipe that changes the model needs healing. [Drift](drift.md) says what it costs in loss before, and "
        "[Healing](adaptation.md) what is left of that after.\n"
        "- *Modelled*: formulas give the times of the network. Nobody measured it.\n"
        "- Messages below 1 MiB are not quantized, hence the +0% of recipes with int8.",
        "## For a trained model",
        f"The best of the recipes that SmolLM2-135M healed from, to within {HEALED:.0%} of its loss: "
        f"{', '.join(f'`{recipe}`' for recipe in healed)}.",
        answers(cells, healed),
        "## Of all recipes",
        "`ladder`, `parallel` and `desync-4x` are meant for models that are trained with them from scratch.",
        answers(cells, RECIPES),
        prompts,
    ]
    shown = [recipe for recipe in RECIPES if recipe != "tensor-parallel"]
    for model in dict.fromkeys(model for model, _ in cells):
        parts.append(f"## {model}")
        rows = []
        for (name, cluster), line in cells.items():
            if name == model:
                rows += [[cluster, *_row(one, shown)] for one in line]
        parts.append(
            table(["fabric", "batch", "best exact baseline", *(f"`{r}`" for r in shown), "ladder pays from"], rows)
        )
    parts.append(
        "*Ladder pays from*: the time of one all-reduce above which `ladder` beats standard tensor parallelism of the "
        "same degree, all of them taking as long. `upper-bound` leaves communication out and computes something else: "
        "it bounds what any recipe can gain at its degree. A dash: it cannot be applied, or does not fit in memory."
    )
    return "\n\n".join(parts) + "\n"


def _row(one: Cell, shown: Sequence[str]) -> list[str]:
    baseline = one.baseline
    if baseline is None:
        return [str(one.batch), "does not fit", *["—"] * (len(shown) + 1)]
    name = "" if baseline.recipe == "tensor-parallel" else f" `{baseline.recipe}`"
    gains = [one.gain(recipe) for recipe in shown]
    return [
        str(one.batch), f"{baseline}{name}: {baseline.seconds * 1e3:.2f} ms",
        *("—" if gain is None else f"{gain:+.0%}" for gain in gains),
        one.ladder_pays_from,
    ]  # fmt: skip


def of_model(title: str) -> dict[tuple[str, str], list[Cell]]:
    """The cells of one model by (model, cluster)."""
    chooser = Chooser(MODELS[title])
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cluster in CLUSTERS:
        cells[title, cluster.title] = line = [chooser.cell(cluster, batch) for batch in BATCHES]
        print(title, cluster.title, *(one.answer() for one in line), sep=" | ", flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--prompts", action="store_true", help="write the section on prompts alone")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, each in a process")
    options = parser.parse_args()
    titles = [title for title in MODELS if options.only in title]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = [row for some in pool.map(when_prompts.rows, titles, [MODELS[t] for t in titles]) for row in some]
        prompts = when_prompts.section(rows)
        found = [] if options.prompts else list(pool.map(of_model, titles))
    cells = {key: line for one in found for key, line in one.items()}
    if options.prompts:
        text = when_prompts.replaced(PAGE.read_text(encoding="utf-8"), prompts)
    else:
        text = page(cells, prompts)
    if options.only:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
