"""The search: what every rewrite costs and gains alone, the best mixes by that, and what these are measured to cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.ir import Program
from rewriter.predict.candidates import all_recipes
from rewriter.predict.entry import traced
from rewriter.predict.search.choices import BY_NAME, FORMATS, Mix, of_prompt
from rewriter.predict.search.computed import Computed, WindowChange
from rewriter.predict.search.front import Costs, Estimate, Option, agreement, front
from rewriter.predict.search.gains import Gains, gain_of
from rewriter.predict.search.measurements import Measurements, Store, StreamedWeights
from rewriter.predict.search.result import SearchPoint, SearchResult, Single, recipe_with_measurements
from rewriter.predict.search.texts import Text, text_for
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.weights import Checkpoint
from rewriter.weights.finite import check_finite, watched

WINDOWS = (4, 8)  # of text to calibrate, to hold out
_ROUNDS = 5
# Of the budget: where mixes are measured in the first round, and where in those that follow.
_WIDE = (*(0.1 * 1.4**n for n in range(24)), math.inf)
_NEAR = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35)
_BETTER = 1e-3  # a round that makes the fastest mix within the budget faster by less than this share is the last


@dataclass(frozen=True)
class Asked:
    """Question of a search: a rise of `budget` (a share of the loss) at most, on `workload` and `cluster`.

    `text`: a calibration text, or None. `windows`: of text, to calibrate, to hold out.
    """

    workload: Workload
    cluster: Cluster
    budget: float = 0.01
    text: str | None = None
    windows: tuple[int, int] = WINDOWS
    seed: int = 0

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


def search(
    model: str | os.PathLike[str],
    asked: Asked,
    *,
    state: Path | None = None,
    context: RunContext = RunContext(),
) -> SearchResult:
    """See `rewriter.api.search`."""
    began = time.process_time()
    context.progress("tracing, and predicting the standard model")
    measured, gains = opened(model, asked, state, context)
    result = _Search(os.fspath(model), asked, gains, measured, context.progress).run()
    return replace(result, seconds=time.process_time() - began)


def opened(
    model: str | os.PathLike[str],
    asked: Asked,
    state: Path | None = None,
    context: RunContext = RunContext(),
) -> tuple[Measurements, Gains]:
    """Measurements of mixes of a model on its text, and their predictions. Raises RewriterError as a search does: what
    can be refused without work is refused first."""
    program = traced(model, context.trust_remote_code)
    gains = Gains(program, asked.workload, asked.cluster)
    weights = StreamedWeights(program)
    gains.standard  # noqa: B018  what the fabric refuses
    computed = Computed(program, asked.workload.tp, weights)
    checkpoint = Checkpoint.open(str(program.source.path))
    check_finite(checkpoint, watched(checkpoint, (spec.expression for spec in program.parameters.values())))
    job = {
        "checkpoint": checkpoint.fingerprint(),
        "config": repr(sorted(program.source.config.items(), key=str)),
        "tp": asked.workload.tp,
        "text": asked.text,
        "windows": asked.windows,
        "seed": asked.seed,
    }
    text = _text(program, asked, store := Store(state, job), context.progress)
    return Measurements(computed, text, store), gains


def _text(program: Program, asked: Asked, store: Store, progress: ProgressCall) -> Text:
    if "text" not in store.values:
        text = text_for(program, asked.text, asked.windows, asked.seed, partial(progress, "the model writes a text"))
        tokens = {"calibration": text.calibration.tolist(), "held_out": text.held_out.tolist()}
        store.put({"text": {**tokens, "described": text.described, "own": text.own}})
    kept = store.values["text"]
    return Text(torch.tensor(kept["calibration"]), torch.tensor(kept["held_out"]), kept["described"], kept["own"])


@dataclass
class _Search:
    model: str
    asked: Asked
    gains: Gains
    measured: Measurements
    progress: ProgressCall
    singles: list[Single] = field(default_factory=list)
    points: dict[Mix, SearchPoint] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """Nats per token, on the calibration text."""
        return self.asked.budget * self.measured.loss()

    def run(self) -> SearchResult:
        layers, applicable = self.measured.computed.layers, self.measured.applicable()
        if not applicable:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.measured.refused.items())[:2])
            raise RewriterError(f"no rewrite applies to any layer of this model. {reasons}")
        changes = self.measured.alone(applicable, partial(self.progress, "measuring each rewrite alone"))
        costs = Costs({mix: max(c.divergence / c.tokens, 1e-7) for mix, c in changes.items()})
        cuts = {base: self.gains.cut(base) for base in self._bases()}
        options = {base: self._options(applicable, base, cut) for base, cut in cuts.items()}
        self._singles(changes, costs, options[Mix.base])
        before = math.inf
        for rounds in range(1, _ROUNDS + 1):
            fronts = [
                front(
                    layers,
                    [replace(o, cost=cost) for o in some if (cost := costs.option(o)) < math.inf],
                    base,
                    cuts[base],
                )
                for base, some in options.items()
            ]
            new = self._chosen(fronts, _WIDE if rounds == 1 else _NEAR)
            self._measure(new, f"measuring mixes, round {rounds}")
            within = min(
                (p.speed.seconds for p in self.points.values() if p.rise.rise <= self.budget), default=math.inf
            )
            if not new or (rounds > 1 and within > before * (1 - _BETTER)):
                break
            before = within
            costs = costs.fitted({mix: point.rise.kl for mix, point in self.points.items()})
        return self._result(costs, rounds)

    # --- what there is to choose from ---

    def _bases(self) -> list[str]:
        """Plain tensor parallelism, and the shipped recipes that share tokens among the ranks, where they can run:
        unless one rank is to share them, and where every rank can hold what it has to. Of those that are equally fast,
        one."""
        bases, times = [Mix.base], {self.gains.standard.seconds}
        for name in all_recipes() if self.asked.workload.sp != 1 else ():
            if not any(rewrite.shards_tokens for rewrite in Recipe.load(name).build()):
                continue
            speed = self.gains.speed(Mix(base=name))
            if speed is None or speed.seconds in times or (self.gains.standard.fits and not speed.fits):
                continue
            bases.append(name)
            times.add(speed.seconds)
        return bases

    def _options(self, applicable: Sequence[Mix], base: str, cut: float) -> list[Option]:
        """Rewrites and formats of layers with what they gain. A layer's rewrite and format are both for all tokens, or
        both for the prompt alone. Ranks that share tokens hold whole streams: with them nothing is bound to ranks, and
        no block is reduced."""
        shared = base != Mix.base
        starts: dict[str, list[int]] = {} if shared else {"": list(range(self.measured.computed.layers))}
        for mix in applicable:
            for placement in mix.placements:
                if not (shared and mix.bound):
                    starts.setdefault(placement.rewrite, []).append(placement.start)
        formats = ("", *(() if shared else FORMATS))
        cases = [(name, format) for name in starts for format in formats if name or format]
        cases = [(n, f) for n, f in cases if not (n and f) or of_prompt(n) == of_prompt(f)]
        options: list[Option] = []
        for done, (name, format) in enumerate(cases):
            self.progress(f"predicting what each rewrite gains with {base}", done, len(cases))
            length = BY_NAME[name].layers if name else 1
            for some in self._alike(starts[name], length, of_prompt(name or format)):
                gain = gain_of(self.gains, name, some, format, base, cut)
                if gain is not None:
                    options += [Option(n, length, name, format, gain=gain[0], edge=gain[1]) for n in some]
        return options

    def _alike(self, starts: Sequence[int], length: int, prompt: bool) -> list[list[int]]:
        """Places where a rewrite gains as much. For the prompt alone, the last layer is another: most of it is left
        out for tokens of the prompt anyway."""
        last = [n for n in starts if prompt and n + length == self.measured.computed.layers]
        return [some for some in ([n for n in starts if n not in last], last) if some]

    def _singles(self, changes: Mapping[Mix, WindowChange], costs: Costs, options: Sequence[Option]) -> None:
        gains = {(o.start, o.rewrite or o.format): o.gain for o in options if not (o.rewrite and o.format)}
        for mix, change in sorted(changes.items(), key=lambda item: item[0].key):
            name, layer = next(iter(mix.counts())), mix.touched[0]
            gain, rise = gains.get((layer, name)), change.rise / change.predicted
            self.singles.append(Single(name, layer, len(mix.touched), costs.alone[mix], rise, change.tokens, gain))

    # --- mixes ---

    def _chosen(self, fronts: Sequence[Sequence[Estimate]], shares: Iterable[float]) -> list[Estimate]:
        """The fastest mixes of each front within shares of the budget that were not measured yet, the exact one too."""
        new: dict[Mix, Estimate] = {}
        for estimates in fronts:
            for share in (0.0, *shares):
                within = [e for e in estimates if e.cost <= share * self.budget]
                if within and within[-1].mix not in self.points:
                    new[within[-1].mix] = within[-1]
        return list(new.values())

    def _measure(self, estimates: Sequence[Estimate], words: str) -> None:
        """Measure and predict mixes; those that cannot be applied are left out."""
        speeds = {e.mix: speed for e in estimates if (speed := self.gains.speed(e.mix)) is not None}
        rises = self.measured.rises(list(speeds), partial(self.progress, words))
        for e in estimates:
            if (speed := speeds.get(e.mix)) is not None:
                times = self.gains.standard.seconds / speed.seconds
                self.points[e.mix] = SearchPoint(e.mix, speed, rises[e.mix], times, e.cost)

    # --- the result ---

    def _choose(self) -> SearchPoint:
        """The fastest point within the budget, on what was held out as well."""
        within = [p for p in self.points.values() if p.rise.rise <= self.budget]
        budget = self.asked.budget
        for point in sorted(within, key=lambda p: (p.speed.seconds, p.rise.rise)):
            if point.speed.seconds >= self.gains.standard.seconds:
                break
            held_out = self.measured.rises([point.mix], held_out=True)[point.mix]
            chosen = replace(point, held_out=held_out)
            self.points[point.mix] = chosen
            if held_out.relative <= budget and held_out.seen / held_out.loss <= budget:
                return chosen
        mildest = min(
            (s for s in self.singles if s.gain is not None and s.gain > 0), key=lambda s: s.cost, default=None
        )
        loss = self.measured.loss()
        said = "no rewrite is predicted to be faster here than plain tensor parallelism"
        if mildest is not None:
            said = (
                f"no faster recipe stays within it; the mildest rewrite that gains anything, {mildest.rewrite} in "
                f"layer {mildest.layer}, costs {mildest.cost / loss:.2g} of the loss. Give a larger budget"
            )
        raise RewriterError(f"--loss {budget:.4g} (of {loss:.3f} nats per token): {said}")

    def _result(self, costs: Costs, rounds: int) -> SearchResult:
        self._measure([Estimate()], "measuring mixes")
        chosen = self._choose()
        points = with_front(self.points.values())
        chosen = next(p for p in points if p.mix == chosen.mix)
        shown = [p for p in points if p.front and p.mix.touched]
        order = agreement([costs.of(p.mix) for p in shown], [p.rise.kl for p in shown], [p.rise.error for p in shown])
        load, gains = self.asked.workload, self.gains
        result = SearchResult(
            model=self.model,
            fabric=gains.fabric.name,
            fabric_summary=gains.fabric.summary,
            modelled=gains.fabric.modelled,
            workload={"batch": load.batch, "prompt": load.prompt, "generate": load.generate},
            budget=self.asked.budget,
            text=self.measured.text.described,
            loss=self.measured.loss(),
            standard=gains.standard,
            chosen=chosen,
            points=tuple(points),
            singles=tuple(self.singles),
            agreement=order,
            rounds=rounds,
            recipe="",
            ranks=gains.ranks(chosen.mix),
            not_applied=dict(self.measured.refused),
        )
        return replace(result, recipe=recipe_with_measurements(result))


def with_front(points: Iterable[SearchPoint]) -> list[SearchPoint]:
    """The points by rising seconds, with `front` set: no other is at least as fast and as close, and better in one."""
    ordered = sorted(points, key=lambda p: (p.speed.seconds, p.rise.rise))
    least = [math.inf, *accumulate((p.rise.rise for p in ordered), min)]
    return [replace(p, front=p.rise.rise < before) for p, before in zip(ordered, least, strict=False)]
