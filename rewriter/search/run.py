"""The search: what every rewrite costs and gains alone, the best mixes by that, and what these are measured to cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rewriter.analysis.sequence_layout import attention_shapes
from rewriter.common.errors import RewriterError
from rewriter.convert.conversion import silent
from rewriter.ir import Program
from rewriter.kernels import SMALLEST_BLOCK, parse_format
from rewriter.predict.candidates import all_recipes
from rewriter.predict.entry import traced
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.search.choices import BY_NAME, FORMATS, Mix, Placement
from rewriter.search.computed import Computed
from rewriter.search.estimates import Costs, agreement
from rewriter.search.gains import Gains, Increments, increments
from rewriter.search.healing import Healing, heal
from rewriter.search.measurements import SCREENED, Measurements
from rewriter.search.optimizer import Estimate, front
from rewriter.search.result import Point, SearchResult, Single
from rewriter.search.store import Store
from rewriter.search.streamed_weights import StreamedWeights
from rewriter.search.tails import Tails
from rewriter.search.texts import Text, text_for
from rewriter.search.written import recipe_with_measurements
from rewriter.weights import Checkpoint
from rewriter.weights.finite import check_finite, watched

WINDOWS = (2, 4, 8)
"""Windows of text to order units on, to calibrate, to hold out."""
_ROUNDS = 5
_PRECISE = 2  # windows on which what is within reach is measured alone
_PROMISING = 2.0  # a rewrite that costs more budgets than this alone is measured roughly
# Of the budget: where mixes are measured in the first round, and where in those that follow.
_WIDE = (*(0.1 * 1.4**n for n in range(24)), math.inf)
_NEAR = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35)
_BETTER = 1e-3  # a round that makes the fastest mix within the budget faster by less than this share is the last
_STEPS = 6


@dataclass(frozen=True)
class Asked:
    """What is searched: a rise of `budget` (a share of the loss) at most, on `workload` and `cluster`.

    `text`: a calibration text, or None. `windows`: of text, to order units on, to calibrate, to hold out. `healing`:
    what is trained afterwards, if anything.
    """

    workload: Workload
    cluster: Cluster
    budget: float = 0.01
    text: str | None = None
    windows: tuple[int, int, int] = WINDOWS
    seed: int = 0
    healing: Healing | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget < math.inf:
            raise RewriterError(
                f"--loss {self.budget:.4g}: expected a rise in loss above 0, such as 1%: at 0 only exact recipes are "
                "left, which `rewrite predict` compares"
            )
        if self.workload.tp < 2:
            raise RewriterError(
                f"--tp {self.workload.tp}: one rank sends nothing, so that no rewrite gains anything. Give --tp 2 or "
                "more"
            )


Progress = Callable[..., None]


def search(
    model: str | os.PathLike[str],
    asked: Asked,
    *,
    state: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> SearchResult:
    """See `rewriter.api.search`."""
    began = time.process_time()
    torch.manual_seed(asked.seed)
    progress(_step(1, "tracing, and predicting the standard model"))
    measured, gains = opened(model, asked, state, trust_remote_code, progress)
    found = _Search(os.fspath(model), asked, gains, measured, progress).run()
    if asked.healing is not None:
        healed = heal(found, asked.healing, measured.tails, measured.text, asked.seed, progress)
        found = replace(found, healed=healed)
    return replace(found, seconds=time.process_time() - began)


def opened(
    model: str | os.PathLike[str],
    asked: Asked,
    state: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> tuple[Measurements, Gains]:
    """What measures mixes of a model on its text, and what predicts them. Raises RewriterError as a search does: what
    can be refused without work is refused first."""
    program = traced(model, trust_remote_code)
    gains = Gains(program, asked.workload, asked.cluster)
    weights = StreamedWeights(program)
    gains.standard  # noqa: B018  what the fabric refuses
    if asked.healing is not None:
        asked.healing.check(program)
    computed = Computed(program, asked.workload.tp)
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
    store = Store(state, job)
    text = _text(program, asked, store, progress)
    return Measurements(Tails(computed, weights), text, store), gains


def _step(number: int, words: str) -> str:
    return f"step {number} of {_STEPS}: {words}"


def _text(program: Program, asked: Asked, store: Store, progress: Progress) -> Text:
    names = ("arranging", "calibration", "held_out")
    if "text" not in store:
        progress(_step(2, "a text to measure on"))
        made = text_for(
            program, asked.text, asked.windows, asked.seed, _reporting(progress, 2, "the model writes a text")
        )
        tokens = {name: getattr(made, name).tolist() for name in names}
        store.put({"text": {**tokens, "described": made.described, "own": made.own}})
    kept = store["text"]
    arranging, calibration, held_out = (torch.tensor(kept[name]) for name in names)
    return Text(arranging, calibration, held_out, kept["described"], kept["own"])


def _reporting(
    progress: Progress, number: int, words: str, begun: float = 0, of: float = 1
) -> Callable[[float, float], None]:
    """Reports how much of a step is done, of which this is one part of `of`, after `begun` others."""

    def report(done: float, total: float) -> None:
        progress(_step(number, words), begun + done / total if of > 1 else done, of if of > 1 else total)

    return report


@dataclass
class _Search:
    model: str
    asked: Asked
    gains: Gains
    measured: Measurements
    progress: Progress
    singles: list[Single] = field(default_factory=list)
    points: dict[Mix, Point] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """Nats per token, on the calibration text."""
        return self.asked.budget * self.measured.loss()

    def run(self) -> SearchResult:
        layers = self.measured.computed.layers
        applicable = self.measured.applicable()
        if not applicable:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.measured.refused.items())[:2])
            raise RewriterError(f"no rewrite applies to any layer of this model. {reasons}")
        costs = self._costs(applicable)
        bases = {base: self._increments(base, list(costs.placements)) for base in self._bases()}
        self._keys_and_values(list(bases)[1:])
        before = math.inf
        for rounds in range(1, _ROUNDS + 1):
            fronts = [front(layers, *self._priced(costs, base), bases[base], base) for base in bases]
            new = self._chosen(fronts, _WIDE if rounds == 1 else _NEAR)
            self._measure(new, rounds)
            within = [p.speed.seconds for p in self.points.values() if p.rise.rise <= self.budget]
            if not new or (rounds > 1 and min(within, default=math.inf) > before * (1 - _BETTER)):
                break
            before = min(within, default=math.inf)
            costs = costs.fitted({m: p.rise.kl for m, p in self.points.items() if m.touched and not m.keys})
        self._singles(costs, bases[Mix.base])
        return self._result(costs, rounds)

    # --- alone ---

    def _costs(self, applicable: Sequence[Mix]) -> Costs:
        """What each rewrite costs alone: of all roughly, of those that are within reach on all of the calibration
        text."""
        measured, windows = self.measured, self.measured.text.calibration
        roughly = _reporting(self.progress, 3, "what each rewrite costs alone, roughly")
        rough = measured.alone(applicable, 0, SCREENED, roughly)
        limit = _PROMISING * self.budget
        near = [mix for mix in applicable if rough[mix].divergence / rough[mix].tokens <= limit]
        bound = [mix for mix in near if mix.bound] if measured.arranger.possible else []
        near += measured.orders(bound, _reporting(self.progress, 4, "which heads and channels fit together"))
        changes = {mix: [change] for mix, change in rough.items() if mix not in near}
        count = min(_PRECISE, len(windows))
        for window in range(count):
            report = _reporting(self.progress, 4, "what those within reach cost alone", window, count)
            for mix, change in measured.alone(near, window, windows.shape[1], report).items():
                changes.setdefault(mix, []).append(change)
        self._changes = changes
        placements: dict[Placement, float] = {}
        formats: dict[tuple[int, str], float] = {}
        for mix, seen in changes.items():
            cost = max(sum(c.divergence for c in seen) / sum(c.tokens for c in seen), 1e-7)
            if mix.placements:
                placements[mix.placements[0]] = cost
            else:
                formats[mix.formats[0]] = cost
        return Costs(placements, formats)

    # --- seconds ---

    def _bases(self) -> list[str]:
        """Plain tensor parallelism, and the shipped recipes that share tokens among the ranks, where they can run:
        unless one rank is to share them, and where every rank can hold what it has to. Of those that are equally fast,
        one."""
        found, times = [Mix.base], {self.gains.standard.seconds}
        for name in all_recipes() if self.asked.workload.sp != 1 else ():
            if not any(rewrite.shards_tokens for rewrite in Recipe.load(name).build()):
                continue
            speed = self.gains.speed(Mix(base=name))
            if speed is None or speed.seconds in times or (self.gains.standard.fits and not speed.fits):
                continue
            found.append(name)
            times.add(speed.seconds)
        return found

    def _increments(self, base: str, placements: Sequence[Placement]) -> Increments:
        if base != Mix.base:  # its ranks hold whole streams: nothing is bound to them, and no block is reduced
            placements = [p for p in placements if not BY_NAME[p.rewrite].bound]
        report = _reporting(self.progress, 5, f"what each rewrite gains with {base}")
        return increments(self.gains, placements, report, base)

    def _priced(self, costs: Costs, base: str) -> tuple[dict[Placement, float], dict[tuple[int, str], float]]:
        placements, formats = costs.weighted()
        if base == Mix.base:
            return placements, formats
        return {p: cost for p, cost in placements.items() if not BY_NAME[p.rewrite].bound}, {}

    # --- mixes ---

    def _keys_and_values(self, bases: Sequence[str]) -> None:
        """Measure what it costs that ranks which share tokens send keys and values quantized, with the fastest
        recipe."""
        speeds = {base: speed.seconds for base in bases if (speed := self.gains.speed(Mix(base=base))) is not None}
        if not speeds:
            return
        program = self.measured.computed.original
        sizes = [size for shape in attention_shapes(program) for size in (shape.head_dim, shape.value_dim)]
        divisor = math.gcd(*sizes)
        block = max(SMALLEST_BLOCK, min(parse_format(FORMATS[0]).block, divisor & -divisor))
        for done, format in enumerate(FORMATS):
            self.progress(_step(6, "measuring quantized keys and values"), done, len(FORMATS))
            self.add(Mix(base=min(speeds, key=speeds.__getitem__), keys=f"{format}@{block}"))

    def _chosen(self, fronts: Sequence[Sequence[Estimate]], shares: Iterable[float]) -> list[Estimate]:
        """Of each front the fastest mixes within shares of the budget that were not measured yet, the exact one too."""
        found: dict[Mix, Estimate] = {}
        budget = self.budget / self._rise_by_cost()
        for estimates in fronts:
            for share in (0.0, *shares):
                within = [e for e in estimates if e.cost <= share * budget]
                if within and within[-1].mix not in self.points:
                    found[within[-1].mix] = within[-1]
        return list(found.values())

    def _rise_by_cost(self) -> float:
        """How much the loss rises by a nat of KL, in mixes near the budget: 1 on a text that the model wrote itself."""
        near = [p.rise for p in self.points.values() if self.budget / 4 <= p.rise.rise <= 4 * self.budget]
        cost = sum(rise.kl for rise in near)
        return min(max(sum(rise.rise for rise in near) / cost, 0.25), 2.0) if cost else 1.0

    def _measure(self, estimates: Sequence[Estimate], rounds: int) -> None:
        for done, estimate in enumerate(estimates):
            self.progress(_step(6, f"measuring mixes, round {rounds}"), done, len(estimates))
            self.add(estimate.mix, estimate.cost)

    def add(self, mix: Mix, estimated: float | None = None) -> None:
        """Measure and predict a mix; one that cannot be applied is left out."""
        speed = self.gains.speed(mix)
        if speed is not None:
            rise = self.measured.mixed(mix)
            self.points[mix] = Point(mix, speed, rise, self.gains.standard.seconds / speed.seconds, estimated)

    # --- the result ---

    def _choose(self) -> Point:
        """The fastest point within the budget, on what was held out as well."""
        within = [p for p in self.points.values() if p.rise.rise <= self.budget]
        budget = self.asked.budget
        for point in sorted(within, key=lambda p: (p.speed.seconds, p.rise.rise)):
            if point.speed.seconds >= self.gains.standard.seconds:
                break
            held_out = self.measured.mixed(point.mix, held_out=True)
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
        self.add(Mix(), 0.0)
        chosen = self._choose()
        points = with_front(self.points.values())
        chosen = next(p for p in points if p.mix == chosen.mix)
        shown = [p for p in points if p.front and p.mix.touched and not p.mix.keys]
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
        recipe = recipe_with_measurements(result, self.measured.order_of(chosen.mix))
        return replace(result, recipe=recipe)

    def _singles(self, costs: Costs, gained: Increments) -> None:
        for mix, changes in sorted(self._changes.items(), key=lambda item: item[0].key):
            predicted = sum(c.predicted for c in changes)
            if mix.placements:
                (placement,) = mix.placements
                cost, name, layer, length = (
                    costs.placements[placement],
                    placement.rewrite,
                    placement.start,
                    len(placement.layers),
                )
                gain = gained.alone.get((Placement(layer, name), ""))
            else:
                ((layer, name),), length = mix.formats, 1
                cost, gain = costs.formats[layer, name], gained.alone.get((Placement(layer, ""), name))
            rise = sum(c.rise for c in changes) / predicted
            tokens = sum(c.tokens for c in changes)
            ordered = any(p.ordered for p in mix.placements)
            self.singles.append(
                Single(name, layer, length, ordered, cost, rise, tokens, None if gain is None else -gain)
            )


def with_front(points: Iterable[Point]) -> list[Point]:
    """The points by rising seconds, with `front` set: no other is at least as fast and as close, and better in one."""
    found: list[Point] = []
    least = math.inf
    for point in sorted(points, key=lambda p: (p.speed.seconds, p.rise.rise)):
        found.append(replace(point, front=point.rise.rise < least))
        least = min(least, point.rise.rise)
    return found
