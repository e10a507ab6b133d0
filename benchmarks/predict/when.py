"""When does a recipe pay? docs/results/when.md and the README's table: recipes over the best exact choice of an engine.

    python -m benchmarks.predict.when              # all of it: both pages
    python -m benchmarks.predict.when --only 70B   # models whose name has this text; writes nothing

An exact choice is the model as it is on all or a part of the GPUs, in replicas or stages, with every option that vLLM
has on such a fabric (`rewriter.predict.exact`). A recipe has the same sums, and takes as many ranks as are best for it,
in replicas that share the batch. A decode step counts at 1,024 + 512 tokens, a prefill of one sequence at each prompt.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.predict.backtest_points import fabric_of, traced
from rewriter.common.errors import RewriterError
from rewriter.common.numbers import duration
from rewriter.ir import Program
from rewriter.passes.fit_ranks import growth_of
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates
from rewriter.predict.exact import ExactChoices, comparable, first_token_of
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS, Workload
from rewriter.predict.workload import Cluster as RankCluster
from rewriter.recipes.apply import load_recipe
from rewriter.recipes.healed import HEALED, healed_runs

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "results" / "when.md", ROOT / "README.md"
ENGINE = "vllm"
MODELS = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "Qwen3.6 27B, float8": "qwen3.6-27b-fp8",
    "Llama 3.1 70B": "llama-3.1-70b",
    "Mixtral 8x7B": "mixtral-8x7b",
}
BATCHES = (1, 16, 64)
DECODING = (
    "ladder-upper-half", "ladder-own-partial", "desync-2x-sum", "drop-sync", "ladder", "parallel", "desync-4x",
    "upper-bound",
)  # fmt: skip
PROMPTS = (
    "ladder-upper-half", "ladder-own-partial", "desync-2x-sum", "ladder", "prefill-int8", "prefill-ladder-upper-half",
    "prefill-desync-2x-sum", "prefill-desync-2x-sum-int8",
)  # fmt: skip
FROM_SCRATCH = ("ladder", "parallel", "desync-4x")  # meant for models that are trained with them
PROMPT, GENERATE = 1024, 512
LEAST = 0.05  # a gain below it is not told from none: predicted gains of ladder are off by about as much


@dataclass(frozen=True)
class Cluster:
    """A fabric and how many of its GPUs there are."""

    name: str
    fabric: str
    gpus: int

    @property
    def title(self) -> str:
        return self.name + (" (modelled)" if fabric_of(self.fabric).modelled else "")


CLUSTERS = (
    Cluster("NVLink: 8 H200", "h200-nvlink", 8),
    Cluster("PCIe 5.0: 8 RTX PRO 6000", "pcie-gen5", 8),
    Cluster("PCIe 4.0: 8 L40S", "pcie-gen4", 8),
    Cluster("PCIe: 4 RTX 3090, no peer access", "rtx-3090-no-p2p", 4),
    Cluster("RoCE: 4 DGX Spark", "gb10-roce", 4),
    Cluster("TCP, 100 Gb/s: 2 nodes of 4 L40S", "two-nodes-100g", 8),
    Cluster("InfiniBand: 2 nodes of 8 H100", "h100-2x8-ib", 16),
)


# Numbers of GPUs that a model's heads do not divide by.
UNEVEN = (
    ("Llama 3.1 8B", Cluster("PCIe: 3 RTX 3090, no peer access", "rtx-3090-no-p2p", 3)),
    ("Qwen3.6 27B, float8", Cluster("PCIe: 3 RTX 3090, no peer access", "rtx-3090-no-p2p", 3)),
    ("Qwen3.6 27B, float8", Cluster("PCIe 4.0: 5 L40S", "pcie-gen4", 5)),
    ("Llama 3.1 70B", Cluster("PCIe 5.0: 6 RTX PRO 6000", "pcie-gen5", 6)),
    ("Llama 3.1 70B", Cluster("NVLink: 6 H200", "h200-nvlink", 6)),
    ("Llama 3.1 70B", Cluster("NVLink: 7 H200", "h200-nvlink", 7)),
)
FIT = "fit-tp"


@dataclass(frozen=True)
class Choice:
    """A recipe, or the model as it is, in words, and the seconds that count."""

    words: str
    seconds: float


@dataclass(frozen=True)
class Cell:
    """One question on one model and cluster: the best exact choice, None where nothing fits, and the best of each
    recipe that fits."""

    exact: Choice | None
    recipes: Mapping[str, Choice]

    def gain(self, recipe: str) -> float | None:
        """Its speedup over the best exact choice, less one."""
        if self.exact is None or recipe not in self.recipes:
            return None
        return self.exact.seconds / self.recipes[recipe].seconds - 1

    def answer(self, among: Iterable[str]) -> str:
        """The exact choice, and the recipe of these that gains most over it."""
        if self.exact is None:
            return "does not fit"
        best = max((r for r in among if r in self.recipes), key=lambda r: self.gain(r) or 0.0, default=None)
        gain = None if best is None else self.gain(best)
        return f"`{best}` {_signed(gain)}" if gain is not None and gain >= LEAST else "keep the model"


class Chooser:
    """The best choices of one model. Programs are made once, for all clusters and batches."""

    def __init__(self, model: str) -> None:
        self.candidates = Candidates(traced(model, "bfloat16"))
        self.programs: dict[tuple[str, int], Program | None] = {}

    def program(self, recipe: str, degree: int) -> Program | None:
        """None where it cannot be applied on so many ranks."""
        key = (recipe, degree)
        if key not in self.programs:
            try:
                self.programs[key] = self.candidates.one(load_recipe(recipe), degree).program
            except RewriterError:
                self.programs[key] = None
        return self.programs[key]

    def decoding(self, cluster: Cluster, batch: int, recipes: Sequence[str] = DECODING) -> Cell:
        """A decode step of `batch` sequences."""
        exact = self._exact(cluster, batch)
        found = {r: self._best(cluster, batch, r, exact) for r in recipes}
        usable = [(one.name, one.decode_seconds) for one in comparable(exact.all()) if one.fits]
        return _cell(usable, found)

    def prefills(self, cluster: Cluster, recipes: Sequence[str] = PROMPTS) -> dict[int, Cell]:
        """The prefill of one sequence, by tokens of its prompt."""
        exact = self._exact(cluster, 1)
        choices = [one for one in comparable(exact.all()) if one.fits]
        cells = {}
        for prompt in FIRST_TOKEN_PROMPTS:
            first = [(one.name, f.seconds) for one in choices if (f := first_token_of(one, prompt)) and f.fits]
            cells[prompt] = _cell(first, {r: self._best(cluster, 1, r, exact, prompt) for r in recipes})
        return cells

    def _exact(self, cluster: Cluster, batch: int) -> ExactChoices:
        load = Workload(batch=batch, prompt=PROMPT, generate=GENERATE, tp=cluster.gpus)
        return ExactChoices(Predictor(load, RankCluster(fabric_of(cluster.fabric))), self.candidates, ENGINE)

    def _best(
        self, cluster: Cluster, batch: int, recipe: str, exact: ExactChoices, prompt: int | None = None
    ) -> Choice | None:
        """The fastest of a recipe's layouts that fit: of a decode step, or with `prompt` of its prefill."""
        found = []
        for degree in (d for d in range(2, cluster.gpus + 1) if cluster.gpus % d == 0):
            program, groups = self.program(recipe, degree), cluster.gpus // degree
            if program is None:
                continue
            load = replace(exact.predictor.workload, tp=degree, batch=-(-batch // groups), nodes=None)
            over = replace(exact.predictor.cluster, library=exact.usable(exact.available))
            predictor = Predictor(load, over, exact.predictor.runner)
            if not predictor.fits(program, load.batch, prompt):
                continue
            words = f"TP {degree}" + (f", {min(groups, batch)} replicas" if min(groups, batch) > 1 else "")
            try:
                if prompt is None:
                    seconds = predictor.simulate(program, record=False).decode.seconds
                else:
                    seconds = predictor.first_token(program, prompt).seconds
            except RewriterError:  # the fabric has no answer for what it communicates
                continue
            found.append(Choice(words, seconds))
        return min(found, key=lambda one: one.seconds, default=None)


def _cell(exact: Sequence[tuple[str, float]], recipes: Mapping[str, Choice | None]) -> Cell:
    best = min(exact, key=lambda one: one[1], default=None)
    kept = {name: choice for name, choice in recipes.items() if choice is not None}
    return Cell(None if best is None else Choice(*best), kept)


@dataclass(frozen=True)
class Found:
    """All cells of one model on one cluster."""

    model: str
    cluster: str
    decoding: Mapping[int, Cell]
    prefills: Mapping[int, Cell]


def of_model(title: str) -> list[Found]:
    """The cells of one model, cluster by cluster."""
    chooser = Chooser(MODELS[title])
    found = []
    for cluster in CLUSTERS:
        decoding = {batch: chooser.decoding(cluster, batch) for batch in BATCHES}
        found.append(Found(title, cluster.title, decoding, chooser.prefills(cluster)))
        print(title, cluster.title, *(one.answer(DECODING[:-1]) for one in decoding.values()), sep=" | ", flush=True)
    return found


@dataclass(frozen=True)
class Uneven:
    """Padded sizes of one model on one cluster: by how much the weights grow, and the cells."""

    model: str
    cluster: str
    growth: float
    cells: tuple[Cell, ...]

    def row(self) -> list[str]:
        cells = (part for cell in self.cells for part in _gains(cell, (FIT,)))
        return [self.model, self.cluster, f"{self.growth:+.1%}", *cells]


def of_uneven(title: str, cluster: Cluster) -> Uneven:
    """Gains of padded sizes on all of a number of GPUs that heads do not divide by."""
    chooser = Chooser(MODELS[title])
    decoding = [chooser.decoding(cluster, batch, (FIT,)) for batch in BATCHES[:2]]
    prefill = chooser.prefills(cluster, (FIT,))[FIRST_TOKEN_PROMPTS[1]]
    program = chooser.program(FIT, cluster.gpus)
    assert program is not None
    growth = growth_of(chooser.candidates.original, program.origin or program)
    return Uneven(title, cluster.title, growth, (*decoding, prefill))


def uneven_section(rows: Sequence[Uneven]) -> str:
    """The section on numbers of GPUs that heads do not divide by."""
    asked = [f"decode, batch {batch}" for batch in BATCHES[:2]] + [f"prompt of {FIRST_TOKEN_PROMPTS[1] // 1024}k"]
    header = ["model", "GPUs", "weights", *(name for what in asked for name in (f"{what}: best as it is", f"`{FIT}`"))]
    return "\n\n".join(
        [
            "## Three, five, six or seven GPUs",
            f"`{FIT}` pads sizes until all of the GPUs share every layer; it is exact ([Any number of "
            "GPUs](../howto/any-number-of-gpus.md)). Beside it is the best that vLLM does with the model as it is: "
            "fewer of the GPUs, replicas, stages.",
            table(header, [one.row() for one in rows]),
        ]
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def _gains(cell: Cell, recipes: Sequence[str]) -> list[str]:
    if cell.exact is None:
        return ["does not fit", *["—"] * len(recipes)]
    return [f"{cell.exact.words}: {duration(cell.exact.seconds)}", *(_signed(cell.gain(recipe)) for recipe in recipes)]


def _signed(gain: float | None) -> str:
    return "—" if gain is None else f"{round(100 * gain):+d} %"


def page(found: Sequence[Found], uneven: Sequence[Uneven]) -> str:
    """docs/results/when.md."""
    trained = [recipe for recipe in DECODING[:-1] if recipe not in FROM_SCRATCH]
    asked = [f"decode, batch {batch}" for batch in BATCHES] + [f"prompt of {p // 1024}k" for p in FIRST_TOKEN_PROMPTS]
    prompted = [recipe for recipe in PROMPTS if recipe not in FROM_SCRATCH]
    answers = [
        [f.model, f.cluster, *(c.answer(trained) for c in f.decoding.values()),
         *(c.answer(prompted) for c in f.prefills.values())] for f in found
    ]  # fmt: skip
    runs = [run for run in healed_runs() if run.above <= HEALED]
    largest = max(run.parameters for run in runs) / 1e6
    ranks, healed = max(run.ranks or 1 for run in runs), dict.fromkeys(run.recipe for run in runs)
    parts = [
        "# When does a recipe pay?",
        "`python -m benchmarks.predict.when` writes this page and the README's table from predictions: [How a gain is "
        "predicted](../concepts/prediction.md). [Backtest](backtest.md) says how far those are from measurements.",
        f"- Gains are *decode speedups* (at {PROMPT:,} + {GENERATE} tokens) and *prefill speedups* (of one sequence) "
        "over the best that vLLM can do with the model as it is: tensor parallelism over all GPUs or a part of "
        "them, replicas, stages, and every option that it has on such a fabric, one-shot PCIe sums among them. The "
        "tables of decode steps and first tokens name that choice. Recipes have the same sums, and choose their ranks "
        "and replicas likewise, without stages.\n"
        f"- Where no recipe gains {LEAST:.0%}, the answer is to keep the model.\n"
        "- *Modelled*: formulas give the times of the network. Nobody measured it.\n"
        "- All in bf16, but for what is named otherwise.",
        "## What to run",
        "The recipe that gains most, of those that are meant for a trained model. **Nobody measured that one heals at "
        "these sizes or numbers of ranks**: the project's own runs ended within "
        f"{HEALED:.0%} of the original's loss with {', '.join(f'`{r}`' for r in healed)} on models of at most "
        f"{largest:.0f}M, bound to {ranks} ranks at most ([Healing](adaptation.md)). [Drift](drift.md) says what each "
        "costs in loss before.",
        table(["model", "GPUs", *asked], answers),
        uneven_section(uneven),
        "## Decode steps",
        "`ladder`, `parallel` and `desync-4x` are meant for models that are trained with them from scratch. "
        "`upper-bound` leaves communication out and computes something else: as much as hiding all of it gains at its "
        "number of ranks. `parallel` may gain more, since it launches fewer kernels. "
        "A dash: it cannot be applied, or does not fit in memory.",
        table(
            ["model", "GPUs", "batch", "best as it is", *(f"`{r}`" for r in DECODING)],
            [[f.model, f.cluster, str(b), *_gains(c, DECODING)] for f in found for b, c in f.decoding.items()],
        ),
        "## Time to first token",
        "Recipes called `prefill-…` rewire the prompt alone, and generated tokens are computed as before from the keys "
        "and values that they find. What these cost in loss is [measured](prefill.md) on small models.",
        table(
            ["model", "GPUs", "prompt", "best as it is", *(f"`{r}`" for r in PROMPTS)],
            [[f.model, f.cluster, f"{p:,}", *_gains(c, PROMPTS)] for f in found for p, c in f.prefills.items()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


README_RECIPES = ("ladder-upper-half", "ladder-own-partial", "desync-2x-sum", "ladder")
README_CLUSTERS = ("PCIe 5.0: 8 RTX PRO 6000", "NVLink: 8 H200")


def readme(found: Sequence[Found], text: str) -> str:
    """The README with the gains of Llama 3.1 70B in the rows of its table of recipes."""
    of_70b = {f.cluster: f for f in found if f.model == "Llama 3.1 70B"}
    for recipe in README_RECIPES:
        cells = []
        for cluster in README_CLUSTERS:
            one = of_70b[cluster]
            cells.append(_range([c.gain(recipe) for c in one.decoding.values()]))
            cells.append(_range([c.gain(recipe) for c in one.prefills.values()]))
        row = rf"(?m)^(\| `{recipe}`[^|]*\|)(?:[^|]*\|){{4}}"
        text = re.sub(row, rf"\g<1> {' | '.join(cells)} |", text)
    return text


def _range(gains: Sequence[float | None]) -> str:
    known = [round(100 * gain) for gain in gains if gain is not None]
    return "—" if not known else f"{min(known):+d} to {max(known):+d} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="models at once, each in a process")
    options = parser.parse_args()
    titles = [title for title in MODELS if options.only in title]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = [one for some in pool.map(of_model, titles) for one in some]
        uneven = list(pool.map(of_uneven, *zip(*(one for one in UNEVEN if one[0] in titles), strict=True)))
    if options.only:
        print(page(found, uneven))
        return
    PAGE.write_text(page(found, uneven), encoding="utf-8")
    README.write_text(readme(found, README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
