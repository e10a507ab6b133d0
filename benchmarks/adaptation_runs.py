"""Which models the experiment trains, in which order, and where their results are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
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

Method = Literal["none", "sft", "distill"]


@dataclass(frozen=True)
class Settings:
    """How every model of an experiment is trained and measured; the reference like all others."""

    learning_rate: float = 2e-3
    warmup: float = 0.05  # share of the steps; then linearly to zero
    weight_decay: float = 0.1
    batch: int = 1024  # tokens per step
    length: int = 256  # tokens of a window, in training and evaluation
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
    anneal: float = 0.0  # share of the steps in which the rewrite grows from 0 to 1
    scratch: bool = False  # from random weights

    def __post_init__(self) -> None:
        if (self.method == "none") != (self.tokens == 0) or (self.scratch and self.method != "sft"):
            raise ValueError(f"{self}: a run without training has no tokens; from scratch there is no teacher")

    @property
    def name(self) -> str:
        """In words, for progress and errors."""
        how = {"none": "zero-shot", "sft": "SFT", "distill": "distilled"}[self.method]
        parts = [self.recipe, how, "annealed" * bool(self.anneal), "from scratch" * self.scratch]
        return " ".join(filter(None, [*parts, f"{self.tokens:,} tokens" * bool(self.tokens)]))

    @property
    def reference(self) -> Run:
        """The original trained on the same tokens: what healing is measured against."""
        return Run(STANDARD, "sft" if self.tokens else "none", self.tokens, scratch=self.scratch)


def budget(share: float, settings: Settings) -> int:
    """Whole steps of at most `share` of the tokens of pretraining, in tokens."""
    return int(share * PRETRAINING) // settings.batch * settings.batch


def core(settings: Settings) -> list[Run]:
    """Five percent of the pretraining tokens for four recipes and the reference, then as many again; most telling
    first."""
    runs = [Run(recipe) for recipe in (STANDARD, *CORE)]
    for share in (0.05, 0.1):
        tokens = budget(share, settings)
        runs.append(Run(STANDARD, "sft", tokens))
        runs += [Run(recipe, method, tokens) for recipe in CORE for method in ("distill", "sft")]
    return runs


def full(settings: Settings) -> list[Run]:
    """The core; every other recipe that approximates; models from scratch."""
    tokens = budget(0.05, settings)
    runs = core(settings) + [Run(recipe) for recipe in OTHERS]
    runs += [Run(recipe, method, tokens) for recipe in OTHERS for method in ("distill", "sft")]
    return runs + [Run(recipe, "sft", budget(1.0, settings), scratch=True) for recipe in SCRATCH]


def quick(settings: Settings) -> tuple[list[Run], Settings]:
    """Two steps of one recipe on a few windows: to see whether everything runs."""
    settings = replace(settings, windows=4, length=64, batch=128)
    tokens = 2 * settings.batch
    trained = [Run("ladder-upper-half", method, tokens) for method in ("distill", "sft")]
    return [Run(STANDARD), Run("ladder-upper-half"), Run(STANDARD, "sft", tokens), *trained], settings


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
