"""Which models the experiment trains, in which order, and where their results are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

PRETRAINING = 9_805_824  # tokens; the card of examples/tiny-llama
STANDARD = "tensor-parallel"  # rewritten exactly: the original itself
CORE = ("ladder-upper-half", "ladder", "desync-4x-sum", "ladder-own-partial")
OTHERS = (
    "ladder-then-desync",
    "desync-2x-sum",
    "desync-2x",
    "desync-4x",
    "drop-sync",
    "parallel",
)  # of the others, the single-device model is the original's or another's: they quantize or shard tokens
SCRATCH = (STANDARD, "parallel", "ladder", "desync-2x", "desync-4x")  # the paper's tables 3 and 5
RANKS = 2
RATES = {"sft": 1e-3, "distill": 2e-3}  # peak learning rates: a teacher's targets are less noisy than the text's
FROM_SCRATCH_RATE = 2e-3
REFERENCE_RATES = (1e-4, 3e-4, 1e-3)  # high rates heal but harm what needs no healing, so the reference has its pick

Method = Literal["none", "sft", "distill"]


@dataclass(frozen=True)
class Settings:
    """How every model of an experiment is trained and measured; the reference like all others."""

    warmup: float = 0.05  # share of the steps; then linearly to zero
    weight_decay: float = 0.1
    batch: int = 1024  # tokens per step
    length: int = 256  # tokens of a window, in training and evaluation
    refit: int = 65_536  # tokens that linear layers are fitted on, where they are
    hidden: float = 3.0  # weight of the hidden states' error beside the divergence of the logits, in distillation
    windows: int = 800  # of held-out text, at even distances
    seed: int = 1

    @property
    def evaluated(self) -> int:
        """Tokens that a model is measured on."""
        return self.windows * self.length


@dataclass(frozen=True)
class Run:
    """One model: what it is made of, and how many tokens it is trained on."""

    recipe: str
    method: Method = "none"
    tokens: int = 0
    refit: int = 0  # of the tokens, those that linear layers are fitted on before training
    anneal: float = 0.0  # share of the steps in which the rewrite grows from 0 to 1
    scratch: bool = False  # from random weights
    learning_rate: float = 0.0  # at its peak

    def __post_init__(self) -> None:
        if len({self.method == "none", self.tokens == 0, self.learning_rate == 0}) > 1:
            raise ValueError(f"{self}: expected a method, tokens and a learning rate, or none of the three")
        if self.scratch and self.method != "sft":
            raise ValueError(f"{self}: from scratch there is no teacher")

    @property
    def name(self) -> str:
        """In words, for progress and errors."""
        how = {"none": "zero-shot", "sft": "SFT", "distill": "distilled"}[self.method]
        parts = [
            self.recipe,
            "refitted," * bool(self.refit),
            how,
            "annealed" * bool(self.anneal),
            "from scratch" * self.scratch,
        ]
        training = f"{self.tokens:,} tokens at {self.learning_rate:g}" * bool(self.tokens)
        return " ".join(filter(None, [*parts, training]))


def budget(share: float, settings: Settings) -> int:
    """Whole steps of at most `share` of the tokens of pretraining, in tokens."""
    return int(share * PRETRAINING) // settings.batch * settings.batch


def light(recipes: Sequence[str], tokens: int, refit: int = 0) -> list[Run]:
    """Each recipe distilled and fine-tuned on `tokens`, and distilled after `refit` of them."""
    methods: list[tuple[Method, int]] = [*([("distill", refit)] if refit else []), ("distill", 0), ("sft", 0)]
    return [Run(recipe, how, tokens, fit, learning_rate=RATES[how]) for how, fit in methods for recipe in recipes]


def references(tokens: int) -> list[Run]:
    """The original trained on as much."""
    return [Run(STANDARD, "sft", tokens, learning_rate=peak) for peak in REFERENCE_RATES]


def core(settings: Settings) -> list[Run]:
    """Five percent of the pretraining tokens for four recipes and the reference, in every way; then twice as many in
    the best of them. The most telling first."""
    runs = [Run(recipe) for recipe in (STANDARD, *CORE)]
    few, many = (budget(share, settings) for share in (0.05, 0.1))
    runs += references(few) + light(CORE, few, settings.refit)
    runs += [Run(recipe, "distill", few, anneal=0.5, learning_rate=RATES["distill"]) for recipe in CORE]
    refitted = [run for run in light(CORE, many, settings.refit) if run.refit]
    return runs + references(many) + refitted


def full(settings: Settings) -> list[Run]:
    """The core; every other recipe that approximates; models from scratch."""
    runs = core(settings) + [Run(recipe) for recipe in OTHERS] + light(OTHERS, budget(0.05, settings), settings.refit)
    whole = budget(1.0, settings)
    return runs + [Run(recipe, "sft", whole, scratch=True, learning_rate=FROM_SCRATCH_RATE) for recipe in SCRATCH]


def quick(settings: Settings) -> tuple[list[Run], Settings]:
    """Some steps of one recipe on a few windows: to see whether everything runs."""
    settings = replace(settings, windows=4, length=64, batch=128, refit=256)
    tokens = 4 * settings.batch
    trained = [*references(tokens)[:1], *light(["ladder-upper-half"], tokens, settings.refit)]
    return [Run(STANDARD), Run("ladder-upper-half"), *trained], settings


@dataclass(frozen=True)
class Result:
    """What a run found. `losses` has the loss of each held-out window, nats per token; `curve` the training loss (of
    distillation: its own) by tokens, averaged over a fiftieth of the run."""

    losses: list[float]
    curve: list[tuple[int, float]]
    seconds: float  # of training

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def reference_of(run: Run, results: Mapping[Run, Result]) -> Run | None:
    """What healing is measured against: the original trained on the same tokens, at the rate that suits it best; for
    a model from scratch, the standard wiring. None where there is none yet."""
    like = (run.tokens, run.scratch)
    found = [other for other in results if other.recipe == STANDARD and (other.tokens, other.scratch) == like]
    return min(found, key=lambda other: results[other].loss, default=None)


def difference(result: Result, reference: Result) -> tuple[float, float]:
    """How much more loss than the reference on the same windows, in % of the reference's, and half of the 95 %
    interval of the mean of the windows' differences."""
    paired = np.subtract(result.losses, reference.losses)
    half = 1.96 * paired.std(ddof=1) / math.sqrt(len(paired))
    return 100 * float(paired.mean()) / reference.loss, 100 * float(half) / reference.loss


class Store:
    """Results by run, a JSON file each, so that an experiment that was cut off goes on where it was.

    A file is named after everything that decides its figures: the run, the settings, and `origin` (model and text).
    """

    def __init__(self, directory: Path, settings: Settings, origin: str) -> None:
        self.directory, self.settings, self.origin = directory, settings, origin

    def path(self, run: Run) -> Path:
        decisive = {"run": asdict(run), "settings": asdict(self.settings), "origin": self.origin}
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
        return self.directory / f"{run.recipe}-{run.method}-{digest}.json"

    def get(self, run: Run) -> Result | None:
        """The result of a run; None where it is still to be done."""
        try:
            found: dict[str, Any] = json.loads(self.path(run).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Result(found["losses"], [(int(tokens), loss) for tokens, loss in found["curve"]], found["seconds"])

    def put(self, run: Run, result: Result) -> None:
        """Written beside its place and moved there: an interrupted write leaves no half result."""
        path = self.path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.partial")
        scratch.write_text(json.dumps({"run": asdict(run), **asdict(result)}), encoding="utf-8")
        os.replace(scratch, path)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if self.get(run) is None]
