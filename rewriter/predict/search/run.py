"""The search: costs and gains of every rewrite alone, greedy mixes by these, and what mixes are measured to cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.predict.entry import traced
from rewriter.predict.search.choices import REWRITES, STANDARD, Mix, Part
from rewriter.predict.search.computed import Computed
from rewriter.predict.search.gains import Gains
from rewriter.predict.search.greedy import Option, Order
from rewriter.predict.search.measurements import Measurements, Store, StreamedWeights
from rewriter.predict.search.result import SearchPoint, SearchResult, with_front
from rewriter.predict.search.texts import Text, text_for
from rewriter.predict.workload import Cluster, Workload
from rewriter.weights.finite import check_finite, watched

WINDOWS = (4, 8)  # of text to calibrate, to hold out
_SHARES = (0.25, 0.5, 1.0, 2.0, 5.0, 20.0, math.inf)  # of the budget, where mixes are measured first
_ROUNDS = 8  # in which beginnings of greedy orders are moved towards the budget
_FASTER = 1e-3  # what would make the best mix faster by less than this share is not measured


@dataclass(frozen=True)
class Asked:
    """Question of a search: a rise of `budget` (a share of the loss) at most, on `workload` and `cluster`.

    `text`: a calibration text, or None. `windows`: of text, to calibrate, to hold out. Raises RewriterError for a
    budget that is not above 0, and for one rank.
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
    model: str | os.PathLike[str], asked: Asked, *, state: Path | None = None, context: RunContext = RunContext()
) -> SearchResult:
    """See `rewriter.api.search`."""
    began = time.process_time()
    context.progress("tracing, and predicting the standard model")
    measured, gains = opened(model, asked, state, context)
    result = _Search(os.fspath(model), asked, gains, measured, context.progress).run()
    return replace(result, seconds=time.process_time() - began)


def opened(
    model: str | os.PathLike[str], asked: Asked, state: Path | None = None, context: RunContext = RunContext()
) -> tuple[Measurements, Gains]:
    """Measurements of mixes of a model on its text, and their predictions. Raises RewriterError as a search does: what
    can be refused without work is refused first."""
    program = traced(model, context.trust_remote_code)
    gains = Gains(program, asked.workload, asked.cluster)
    weights = StreamedWeights(program)
    gains.standard  # noqa: B018  what the fabric refuses
    computed = Computed(program, asked.workload.tp, weights)
    checkpoint = weights.checkpoint
    check_finite(checkpoint, watched(checkpoint, weights.expressions.values()))
    config = repr(sorted(program.source.config.items(), key=str))
    job = {"layout": 2, "checkpoint": checkpoint.fingerprint(), "config": config, "tp": asked.workload.tp}
    store = Store(state, {**job, "text": asked.text, "windows": asked.windows, "seed": asked.seed})
    if "text" not in store.values:
        writing = partial(context.progress, "writing a text")
        text = text_for(program, asked.text, asked.windows, asked.seed, writing)
        tokens = {"calibration": text.calibration.tolist(), "held_out": text.held_out.tolist()}
        store.put({"text": {**tokens, "described": text.described, "own": text.own}})
    kept = store.values["text"]
    calibration, held_out = (torch.tensor(kept[name]) for name in ("calibration", "held_out"))
    return Measurements(computed, Text(calibration, held_out, kept["described"], kept["own"]), store), gains


@dataclass
class _Search:
    model: str
    asked: Asked
    gains: Gains
    measured: Measurements
    progress: ProgressCall
    points: dict[Mix, SearchPoint] = field(default_factory=dict)
    excess: float = 1.0  # rise on held-out text over that on the calibration text, of the mix last measured on both

    def run(self) -> SearchResult:
        costs = self.measured.alone(partial(self.progress, "measuring each rewrite alone"))
        if not costs:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.measured.refused.items())[:2])
            raise RewriterError(f"no rewrite applies to any layer of this model. {reasons}")
        options = {base: self._options(costs, base) for base in self.gains.bases()}
        whole: list[Order] = []
        single: list[Order] = []
        for base, some in options.items():
            whole += [Order([o for o in some if not o.part.rewrite.prompt], base), Order(some, base)]
            single += [Order([o for o in some if o.part.name == name], base) for name in REWRITES]
        budget = self.asked.budget * self.measured.loss()
        self._measure([Mix(base=base) for base in options])
        self._measure([order.at(share * budget) for order in whole for share in _SHARES])
        while (chosen := self._best()).held_out is None:
            self._improve(whole)
            self._improve(single)
            if (chosen := self._best()).speed.seconds >= self.gains.standard.seconds:
                raise self._nothing_faster(options[STANDARD])
            held_out = self.measured.rises([chosen.mix], held_out=True)[chosen.mix]
            self.points[chosen.mix] = found = replace(chosen, held_out=held_out)
            self.excess = max(found.worst / (found.rise.relative or 1.0), 1.0)
        return self._result(chosen, options[STANDARD])

    def _options(self, costs: Mapping[Part, float], base: str) -> list[Option]:
        """The parts that mixes around `base` may have. Ranks that share tokens hold whole streams: with them nothing is
        bound to ranks, and no block is reduced."""
        options: list[Option] = []
        for done, (name, rewrite) in enumerate(REWRITES.items()):
            self.progress(f"predicting what each rewrite gains with {base}", done, len(REWRITES))
            parts = [part for part in costs if part.name == name]
            if parts and (base == STANDARD or not (rewrite.bound or rewrite.format)):
                gain = self.gains.gain(name, [part.start for part in parts], base)
                options += [Option(part, costs[part], gain) for part in parts]
        return options

    def _measure(self, mixes: Iterable[Mix], words: str = "measuring mixes") -> None:
        """Measure and predict mixes that were not yet; those that cannot be applied are left out."""
        new = [mix for mix in dict.fromkeys(mixes) if mix not in self.points]
        speeds = {mix: speed for mix in new if (speed := self.gains.speed(mix)) is not None}
        for mix, rise in self.measured.rises(list(speeds), partial(self.progress, words)).items():
            speed = speeds[mix]
            self.points[mix] = SearchPoint(mix, speed, rise, self.gains.standard.seconds / speed.seconds)

    def _best(self) -> SearchPoint:
        """The fastest point within the budget."""
        within = [p for p in self.points.values() if self._rise(p) <= self.asked.budget]
        return min(within, key=lambda p: (p.speed.seconds, p.worst))

    def _rise(self, point: SearchPoint) -> float:
        """The largest rise of a point, as a share of the loss; on held-out text as expected, until it is measured."""
        return point.worst if point.held_out else point.worst * self.excess

    def _improve(self, orders: Sequence[Order]) -> None:
        """Measure beginnings of `orders`, nearer and nearer to the budget, while they may be faster than the best."""
        loss = self.measured.loss()

        def rise(mix: Mix) -> float | None:
            return self._rise(self.points[mix]) * loss if mix in self.points else None

        for done in range(_ROUNDS):
            enough = self._best().speed.seconds * (1 - _FASTER)
            found = [order.next(self.asked.budget * loss, rise, halve=done % 2 == 1) for order in orders]
            new = [near for near, far in filter(None, found) if (s := self.gains.speed(far)) and s.seconds < enough]
            self._measure(new, f"measuring mixes, round {done + 1}")
            if not new:
                break

    def _nothing_faster(self, options: Sequence[Option]) -> RewriterError:
        budget, loss = self.asked.budget, self.measured.loss()
        said = "no rewrite is predicted to be faster here than plain tensor parallelism"
        if gaining := [option for option in options if (option.gain or 0.0) > 0]:
            mildest = min(gaining, key=lambda option: option.cost)
            said = (
                f"no faster recipe stays within it; the mildest rewrite that gains anything, {mildest.part.name} in "
                f"layer {mildest.part.start}, costs {mildest.cost / loss:.2g} of the loss. Give a larger budget"
            )
        return RewriterError(f"--loss {budget:.4g} (of {loss:.3f} nats per token): {said}")

    def _result(self, chosen: SearchPoint, singles: Sequence[Option]) -> SearchResult:
        points = with_front(self.points.values())
        load, gains, fabric = self.asked.workload, self.gains, self.gains.fabric
        return SearchResult(
            model=self.model,
            fabric=fabric.name,
            fabric_summary=fabric.summary,
            modelled=fabric.modelled,
            workload={"batch": load.batch, "prompt": load.prompt, "generate": load.generate},
            budget=self.asked.budget,
            text=self.measured.text.described,
            loss=self.measured.loss(),
            standard=gains.standard,
            chosen=next(p for p in points if p.mix == chosen.mix),
            points=tuple(points),
            singles=tuple(singles),
            ranks=gains.ranks(chosen.mix),
            not_applied=dict(self.measured.refused),
        )
