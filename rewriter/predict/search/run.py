"""The search: gains of mixes on a fabric, predicted by simulation; greedy mixes; the fastest of those measured."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from rewriter.check.drift import memory_shortage, parameter_count
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.passes.phases import both_wirings
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates, all_recipes
from rewriter.predict.entry import traced
from rewriter.predict.exact import ExactChoices, best_exact
from rewriter.predict.results import generation_seconds
from rewriter.predict.search.choices import REWRITES, STANDARD, Mix, Option, Part, recipe_of, toward
from rewriter.predict.search.measured import Measurements, Store, Text, text_for
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.recipe import MeasuredRecipe, MeasuredRise
from rewriter.weights import Checkpoint

_MOST = 10  # mixes of one greedy order that are measured on the way to the budget
_FASTER = 1e-3  # what would make the best mix faster by less than this share is not measured


@dataclass(frozen=True)
class Asked:
    """Question of a search: a rise of `budget` (a share of the loss) at most, on `workload` and `cluster`.

    `text`: to calibrate on, or None. `windows`: of text, to calibrate, to hold out. `engine`: what serves, which
    decides what sums there are. Raises RewriterError for a budget that is not above 0, and for one rank."""

    workload: Workload
    cluster: Cluster
    budget: float = 0.01
    text: str | None = None
    windows: tuple[int, int] = (4, 8)
    seed: int = 0
    engine: str = "vllm"

    def __post_init__(self) -> None:
        if not 0 < self.budget < math.inf:
            raise RewriterError(
                f"--loss {self.budget:.4g}: expected a rise in loss above 0, such as 1%: at 0 only exact recipes are "
                "left, which `rewrite predict` compares"
            )
        if self.workload.tp < 2:
            raise RewriterError(
                f"--tp {self.workload.tp}: one rank sends nothing, so no rewrite gains anything. Give --tp 2 or more"
            )


@dataclass(frozen=True)
class Speed:
    """Seconds of a whole generation, to ten digits (mixes that take the same times in another order are equally fast),
    and of its parts: the prefill, and one decode step. `tp` ranks share heads and channels, `sp` ranks tokens. `fits`:
    what a rank holds, in its device's memory."""

    seconds: float
    prefill_seconds: float
    seconds_per_token: float
    tp: int = 1
    sp: int = 1
    fits: bool = True


@dataclass(frozen=True)
class SearchPoint:
    """A mix, measured and predicted. `calibration`: its rise in loss on the calibration text; `held_out`: on the text
    that was held out, where it was measured there."""

    mix: Mix
    speed: Speed
    speedup: float
    calibration: MeasuredRise
    held_out: MeasuredRise | None = None

    @property
    def worst(self) -> float:
        """The largest rise, as a share of the loss: on the calibration text and, by both measures, on held-out text."""
        held_out = (self.held_out.rise, self.held_out.seen) if self.held_out else ()
        return max([self.calibration.rise, *held_out])


@dataclass(frozen=True)
class SearchResult:
    """`points` by rising seconds; `chosen` is one of them, and `measured` what its recipe says of it and of the search.

    `standard`: the model under plain tensor parallelism. `singles`: every rewrite of every layer, alone. `not_applied`:
    why not, by name of a rewrite."""

    measured: MeasuredRecipe
    fabric_summary: str
    modelled: bool
    standard: Speed
    chosen: SearchPoint
    points: tuple[SearchPoint, ...]
    singles: tuple[Option, ...]
    not_applied: Mapping[str, str] = field(default_factory=dict)

    @property
    def front(self) -> tuple[SearchPoint, ...]:
        """The points of which no other is both faster and closer to the original, fastest first."""
        rises = [p.calibration.rise for p in self.points]
        return tuple(p for n, p in enumerate(self.points) if all(rises[n] < faster for faster in rises[:n]))

    @property
    def recipe(self) -> str:
        """The chosen mix as YAML for `rewrite MODEL --recipe FILE`, with what was measured and predicted of it."""
        found = self.measured
        name = re.sub(r"[^a-z0-9]+", "-", f"searched-{found.fabric}-tp{found.tp * found.sp}".lower())[:64]
        summary = f"Found by a search on {found.fabric} within a rise in loss of {found.budget:.3g}."
        return recipe_of(self.chosen.mix, name, summary).model_copy(update={"measured": found}).to_yaml()

    def to_json(self) -> dict[str, Any]:
        """Plain data: rises as shares of the loss, costs and KL in nats per token, times in seconds."""
        return {**TypeAdapter(SearchResult).dump_python(self, mode="json"), "recipe": self.recipe}


class Gains:
    """Predicts mixes of one traced model, each from the simulation that `rewrite predict` makes, with the sums that
    `engine` has. `exact`: the fastest that it does with the model as it is. Raises RewriterError for an unknown engine,
    and where the fabric cannot run the model with nothing rewritten (`standard`)."""

    def __init__(self, program: Program, workload: Workload, cluster: Cluster, engine: str = "vllm") -> None:
        self.workload, self.candidates = workload, Candidates(program, workload.sp)
        exact = ExactChoices(Predictor(workload, cluster), self.candidates, engine)
        sums = exact.usable(exact.available)
        self.predictor = Predictor(workload, replace(cluster, library=sums), exact.predictor.runner)
        self.fabric, self.exact = self.predictor.fabric, best_exact(exact.all())
        self.speeds: dict[Mix, Speed | None] = {}
        self.standard = self.of_recipe(recipe_of(Mix()))

    def speed(self, mix: Mix) -> Speed | None:
        """Speed of a mix; None where its passes, or the fabric, refuse it."""
        if mix not in self.speeds:
            try:
                self.speeds[mix] = self.of_recipe(recipe_of(mix))
            except RewriterError:
                self.speeds[mix] = None
        return self.speeds[mix]

    def of_recipe(self, recipe: Recipe) -> Speed:
        """Speed of a recipe. Raises RewriterError where its passes, or the fabric, refuse it."""
        load, program = self.workload, self.candidates.one(recipe, self.workload.tp).program
        self.candidates.known.clear()  # what passes made of hundreds of mixes would fill the memory
        both_wirings(program)  # raises where one set of weights cannot serve both phases
        done = self.predictor.simulate(program, record=False)
        seconds = generation_seconds(done.prefill, done.decode, load.generate)
        fits = self.predictor.fits(program, load.batch)
        tp, sp = (program.mesh.get(axis, 1) for axis in ("tp", "sp"))
        return Speed(float(f"{seconds:.10g}"), done.prefill.seconds, done.decode.seconds, tp, sp, fits)

    def bases(self) -> list[str]:
        """Plain tensor parallelism, and unless one rank is to share tokens the shipped recipes whose ranks do, where
        every rank can hold what it has to: the fastest first, and one of those that are equally fast."""
        times = {self.standard.seconds: STANDARD}
        for name in all_recipes() if self.workload.sp != 1 else ():
            if any(rewrite.shards_tokens for rewrite in Recipe.load(name).build()):
                speed = self.speed(Mix(base=name))
                if speed is not None and (speed.fits or not self.standard.fits):
                    times.setdefault(speed.seconds, name)
        return [times[seconds] for seconds in sorted(times)]

    def gain(self, parts: Sequence[Part], base: str = STANDARD) -> float:
        """Seconds by which one of `parts`, of one rewrite, shortens a generation, among others like it; 0 where passes
        or the fabric refuse it, and for what is bound to ranks or quantizes sums where ranks share tokens.

        By simulations of the first, and of all that have room. So what is lost once is not counted: by the first of a
        run, and by two calls for the prefill where the prompt alone is rewired.
        """
        if not parts or (base != STANDARD and (parts[0].rewrite.bound or parts[0].rewrite.format)):
            return 0.0
        many = sorted(parts)[:: parts[0].rewrite.layers]
        few = many[: len(many) > 1]
        slower, faster = (self.speed(Mix(tuple(some), base)) for some in (few, many))
        return (slower.seconds - faster.seconds) / (len(many) - len(few)) if slower and faster else 0.0


def search(
    model: str | os.PathLike[str], asked: Asked, *, state: Path | None = None, context: RunContext = RunContext()
) -> SearchResult:
    """See `rewriter.api.search`."""
    context.progress("tracing, and predicting the standard model")
    measured, gains = opened(model, asked, state, context)
    return _Search(os.fspath(model), asked, gains, measured, context.progress).run()


def opened(
    model: str | os.PathLike[str], asked: Asked, state: Path | None = None, context: RunContext = RunContext()
) -> tuple[Measurements, Gains]:
    """Measurements of mixes of a model on its text, and their predictions. Raises RewriterError as a search does: what
    can be refused without work is refused first."""
    program = traced(model, context.trust_remote_code)
    gains = Gains(program, asked.workload, asked.cluster, asked.engine)
    source, shortage = program.source, memory_shortage(parameter_count(program))
    if source.path is None:
        raise RewriterError(
            f"{source.model_type}: it has a config and no weights, and a rise in loss is measured on the weights. Give "
            "a directory with config.json and safetensors"
        )
    if shortage is not None:
        raise RewriterError(f"{source.path}: a search computes with all weights. In fp32 they take {shortage}")
    weights = load_weights(program, torch.float32)
    job = {"layout": 3, "checkpoint": Checkpoint.open(source.path).fingerprint(), "tp": asked.workload.tp}
    config, about_text = repr(sorted(source.config.items())), (asked.text, asked.windows, asked.seed)
    store = Store(state, {**job, "config": config, "text": about_text})
    if "text" not in store.values:
        store.put({"text": asdict(text_for(program, *about_text, context.progress))})
    return Measurements(program, asked.workload.tp, weights, Text(**store.values["text"]), store), gains


@dataclass
class _Search:
    model: str
    asked: Asked
    gains: Gains
    measured: Measurements
    progress: ProgressCall
    points: dict[Mix, SearchPoint | None] = field(default_factory=dict)  # None for what cannot be applied
    excess: float = 1.0  # rise on held-out text over that on the calibration text, of the mix last measured on both

    def run(self) -> SearchResult:
        costs = self.measured.alone(self.progress)
        if not costs:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.measured.refused.items())[:2])
            raise RewriterError(f"no rewrite applies to any layer of this model. {reasons}")
        options: dict[str, list[Option]] = {}
        for base in self.gains.bases():
            self.progress(f"predicting what each rewrite gains with {base}")
            gains = {name: self.gains.gain([part for part in costs if part.name == name], base) for name in REWRITES}
            options[base] = [Option(part, cost, gains[part.name]) for part, cost in costs.items()]
            self._measure(Mix(base=base))
        while (chosen := self._best()).held_out is None:
            for base, some in options.items():
                self._improve(some, base)
                self._improve([option for option in some if not option.part.rewrite.prompt], base)
                for name, first in ((name, n) for name, rewrite in REWRITES.items() for n in range(rewrite.layers)):
                    alike = [option for option in some if option.part.name == name]
                    self._improve([o for o in alike if o.part.start % o.part.rewrite.layers == first], base)
            if (chosen := self._best()).speed.seconds >= self.gains.standard.seconds:
                raise self._nothing_faster(options[STANDARD])
            found = replace(chosen, held_out=self.measured.rise(chosen.mix, held_out=True))
            self.points[chosen.mix], self.excess = found, max(found.worst / (chosen.worst or 1.0), 1.0)
        return self._result(chosen, options[STANDARD])

    def _measure(self, mix: Mix) -> None:
        self.progress(f"measuring mixes, {len(self.points) + 1}")
        self.points[mix] = None
        if (speed := self.gains.speed(mix)) is not None:
            speedup = self.gains.standard.seconds / speed.seconds
            self.points[mix] = SearchPoint(mix, speed, speedup, self.measured.rise(mix))

    def _within(self, mix: Mix) -> bool | None:
        """True if a mix was measured to be within the budget, on held-out text as expected until it is measured there;
        None if it was not measured, False if it cannot be applied."""
        if (point := self.points.get(mix)) is None:
            return False if mix in self.points else None
        return point.worst * (1.0 if point.held_out else self.excess) <= self.asked.budget

    def _best(self) -> SearchPoint:
        """The fastest point within the budget."""
        within = [point for mix, point in self.points.items() if point is not None and self._within(mix)]
        return min(within, key=lambda p: (p.speed.seconds, p.worst))

    def _improve(self, options: list[Option], base: str) -> None:
        """Measure greedy mixes, nearer and nearer to the budget, while they may be faster than the best."""
        for mix, fastest in islice(toward(options, base, self._within), _MOST):
            speed = self.gains.speed(fastest)
            if speed is not None and speed.seconds >= self._best().speed.seconds * (1 - _FASTER):
                break
            self._measure(mix)

    def _nothing_faster(self, options: Sequence[Option]) -> RewriterError:
        loss, gaining = self.measured.rise().loss, [option for option in options if option.gain > 0]
        said = "no rewrite is predicted to be faster here than plain tensor parallelism"
        if mildest := min(gaining, key=lambda option: option.cost, default=None):
            said = (
                f"no faster recipe stays within it; the mildest rewrite that gains anything, {mildest.part.name} in "
                f"layer {mildest.part.start}, costs {mildest.cost / loss:.2g} of the loss. Give a larger budget"
            )
        return RewriterError(f"--loss {self.asked.budget:.4g} (of {loss:.3f} nats per token): {said}")

    def _result(self, chosen: SearchPoint, singles: Sequence[Option]) -> SearchResult:
        load, budget, fabric, speed = self.asked.workload, self.asked.budget, self.gains.fabric, chosen.speed
        exact, rate = self.gains.exact, load.batch * load.generate / speed.seconds
        measured = MeasuredRecipe(
            model=Path(self.model).name or self.model, fabric=fabric.name, tp=speed.tp, sp=speed.sp, budget=budget,
            workload=f"batch {load.batch}, {load.prompt} + {load.generate} tokens", text=self.measured.text.described,
            speedup=round(chosen.speedup, 5), over=exact.name,
            end_to_end=float(f"{rate / exact.tokens_per_second:.5g}"),
            seconds_per_token=float(f"{speed.seconds_per_token:.5g}"),
            loss=chosen.calibration.loss, calibration=chosen.calibration, held_out=chosen.held_out,
        )  # fmt: skip
        found = sorted(filter(None, self.points.values()), key=lambda p: (p.speed.seconds, p.calibration.rise))
        return SearchResult(
            measured, fabric.summary, fabric.modelled, self.gains.standard, chosen, tuple(found), tuple(singles),
            dict(self.measured.refused),
        )  # fmt: skip
