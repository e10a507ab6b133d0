"""When does a recipe pay? docs/results/when.md: recipes over the best exact choice of an engine.

    python -m benchmarks.predict.when              # all of it: the page, which gains.py draws
    python -m benchmarks.predict.when --only 70B   # models whose name has this text; writes nothing

An exact choice is the unchanged model on all or some of the GPUs, in replicas or stages, with every option that vLLM
has on that fabric (`rewriter.predict.exact`). A recipe uses the same sums and the number of ranks that is best for it,
in replicas that share the batch. A decode step is timed at 1,024 + 512 tokens, a prefill with one sequence per prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.healing import page as healing
from benchmarks.predict.backtest_points import fabric_of, traced
from benchmarks.support.record import Run
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
PAGE = ROOT / "docs" / "results" / "when.md"
GLOSSARY = "../reference/glossary.md"
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
LEAST = 0.05  # predictions cannot tell a smaller gain from no gain: those of ladder are off by about 5 points


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
    Cluster("PCIe 4.0: 4 RTX 4090, no peer access", "rtx-4090-no-p2p", 4),
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
    """A recipe or an exact choice, in words, and its seconds."""

    words: str
    seconds: float


@dataclass(frozen=True)
class Cell:
    """One question on one model and cluster: the best exact choice (None if nothing fits) and the best layout of each
    recipe that fits."""

    exact: Choice | None
    recipes: Mapping[str, Choice]

    def gain(self, recipe: str) -> float | None:
        """Its speedup over the best exact choice, less one."""
        if self.exact is None or recipe not in self.recipes:
            return None
        return self.exact.seconds / self.recipes[recipe].seconds - 1

    def answer(self, among: Iterable[str]) -> str:
        """The recipe of these that gains most over the exact choice, with its gain and its layout."""
        if self.exact is None:
            return "does not fit"
        best = max((r for r in among if r in self.recipes), key=lambda r: self.gain(r) or 0.0, default=None)
        gain = None if best is None else self.gain(best)
        if best is None or gain is None or gain < LEAST:
            return "keep the model"
        return f"`{best}` {_signed(gain)} ({self.recipes[best].words})"


class Chooser:
    """The best choices of one model. Programs are made once, for all clusters and batches."""

    def __init__(self, model: str) -> None:
        self.candidates = Candidates(traced(model, "bfloat16"))
        self.programs: dict[tuple[str, int], Program | None] = {}

    def program(self, recipe: str, degree: int) -> Program | None:
        """The rewritten program, or None if the recipe cannot be applied on this number of ranks."""
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
    asked = [f"decode, batch {batch}" for batch in BATCHES[:2]] + [f"prefill of {FIRST_TOKEN_PROMPTS[1] // 1024}k"]
    header = ["model", "GPUs", "weights"]
    header += [name for what in asked for name in (f"{what}: best exact choice", f"`{FIT}`")]
    return "\n\n".join(
        [
            "## Three, five, six or seven GPUs",
            f"`{FIT}` pads sizes so that all of the GPUs share every layer; it is exact ([Any number of "
            "GPUs](../howto/any-number-of-gpus.md)). Its gain is over vLLM's best exact choice without padding, in the "
            "column before it: fewer of the GPUs, replicas or stages. *Weights*: by how much padding makes them grow.",
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


def _is_healed(run: Run) -> bool:
    """True of a run with the defaults that ended close enough to the original's loss."""
    return bool(run["way"] == "defaults" and healing.above(run, "after") <= HEALED)


def page(found: Sequence[Found], uneven: Sequence[Uneven]) -> str:
    """docs/results/when.md."""
    trained = [recipe for recipe in DECODING[:-1] if recipe not in FROM_SCRATCH]
    asked = [f"decode, batch {batch}" for batch in BATCHES] + [f"prefill of {p // 1024}k" for p in FIRST_TOKEN_PROMPTS]
    prompted = [recipe for recipe in PROMPTS if recipe not in FROM_SCRATCH]
    answers = [
        [f.model, f.cluster, *(c.answer(trained) for c in f.decoding.values()),
         *(c.answer(prompted) for c in f.prefills.values())] for f in found
    ]  # fmt: skip
    runs = [run for run in healed_runs() if run.above <= HEALED]
    largest = max(run.parameters for run in runs) / 1e6
    ranks, healed = max(run.ranks or 1 for run in runs), dict.fromkeys(run.recipe for run in runs)
    worst = max((r for r in healing.read()["runs"] if _is_healed(r)), key=lambda r: healing.above(r, "after"))
    prose = worst["perplexity"]
    parts = [
        "# When does a recipe pay?",
        "`python -m benchmarks.predict.when` writes this page from predictions. [How a gain is "
        "predicted](../concepts/prediction.md) explains them, [Backtest](backtest.md) compares them with measurements.",
        f"- A gain is a [decode speedup]({GLOSSARY}#decode-speedup) (at {PROMPT:,} + {GENERATE} tokens) or a [prefill "
        f"speedup]({GLOSSARY}#prefill-speedup) (of one sequence) over vLLM's best exact choice: the unchanged model "
        "with tensor parallelism on all or some of the GPUs, replicas, pipeline stages, and every option that vLLM has "
        "on that fabric, one-shot PCIe sums included. The last two tables name this choice. Recipes use the same sums "
        "and choose their number of ranks and replicas in the same way, but without stages.\n"
        "- Each column chooses for itself, on both sides: the gains of a row need not belong to one deployment, and do "
        "not add up. For one deployment, `rewrite predict` gives whole generations (*end to end*).\n"
        f"- If no recipe gains {LEAST:.0%}, the answer is to keep the model.\n"
        "- *Modelled*: the times of the network come from formulas. Nobody measured them.\n"
        "- Everything is in bf16 unless the model's name says otherwise.",
        "## Largest predicted gains",
        "The table names the recipe with the largest gain among those meant for a trained model. **Nobody has healed a "
        "model of these sizes, or on these numbers of ranks.** This project healed models of at most "
        f"{largest:.0f}M parameters (4-bit GGUF, dequantized), bound to at most {ranks} ranks. The loss came within "
        f"{HEALED:.0%} of the original's with {', '.join(f'`{r}`' for r in healed)}; in the worst of these runs it is "
        f"{healing.above(worst, 'after'):.1%} above, and perplexity of prose rises from {prose['original']:.1f} to "
        f"{prose['after']:.1f} ([Healing](adaptation.md)). [Drift](drift.md) has the cost of each recipe before "
        "training.",
        table(["model", "GPUs", *asked], answers),
        uneven_section(uneven),
        "## Decode speedup",
        "`ladder`, `parallel` and `desync-4x` are meant for models that are trained with them from scratch. "
        "`upper-bound` leaves communication out and computes a different function: its gain is that of hiding all "
        "communication at its number of ranks. It is no limit: `parallel` may gain more, since it also launches fewer "
        "kernels. A dash: the recipe cannot be applied, or does not fit in memory.",
        table(
            ["model", "GPUs", "batch", "best exact choice", *(f"`{r}`" for r in DECODING)],
            [[f.model, f.cluster, str(b), *_gains(c, DECODING)] for f in found for b, c in f.decoding.items()],
        ),
        "## Prefill speedup",
        "Recipes called `prefill-…` rewire only the prompt. Generated tokens are computed as in the original, from the "
        "keys and values of the rewired prompt; [Prompts](prefill.md) has the measured cost in loss on small models.",
        table(
            ["model", "GPUs", "prompt", "best exact choice", *(f"`{r}`" for r in PROMPTS)],
            [[f.model, f.cluster, f"{p:,}", *_gains(c, PROMPTS)] for f in found for p, c in f.prefills.items()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


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


if __name__ == "__main__":
    main()
