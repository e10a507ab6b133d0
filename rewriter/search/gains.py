"""What mixes gain on a fabric: predicted by simulation, layer by layer where it is to be searched, whole where it
counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.fabric import Fabric, load_fabric
from rewriter.ir import Program
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates
from rewriter.predict.generation_memory import bytes_per_rank
from rewriter.predict.results import generation_seconds
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.search.choices import BY_NAME, FORMATS, Mix, Placement, mix_of, recipe_of
from rewriter.search.computed import keep_shared


@dataclass(frozen=True)
class Speed:
    """Seconds of a whole generation, to ten digits (mixes that take the same times in another order are equally fast),
    and of its parts: the prefill, and one decode step. `fits`: what a rank holds, in its device's memory."""

    seconds: float
    prefill: float
    decode: float
    fits: bool = True


@dataclass
class Gains:
    """Predicts mixes of one traced model, each from the simulation that `rewrite predict` makes."""

    program: Program
    workload: Workload
    cluster: Cluster
    speeds: dict[str, Speed | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fabric = self.cluster.fabric
        self.fabric = fabric if isinstance(fabric, Fabric) else load_fabric(fabric)
        load = self.workload
        self.predictor = Predictor(self.fabric, load, self.cluster.what_if, load.nodes, self.cluster.library)
        self.candidates = Candidates(self.program, load.sp)

    def speed(self, mix: Mix) -> Speed | None:
        """Of a mix; None where its passes, or the fabric, refuse it."""
        if mix.key not in self.speeds:
            try:
                self.speeds[mix.key] = self.of_recipe(recipe_of(mix))
            except RewriterError:
                self.speeds[mix.key] = None
            keep_shared(self.candidates.known)
        return self.speeds[mix.key]

    def of_recipe(self, recipe: Recipe) -> Speed:
        """Of a recipe. Raises RewriterError where its passes, or the fabric, refuse it."""
        load, program = self.workload, self.candidates.one(recipe, self.workload.tp).program
        done = self.predictor.simulate(program, record=False)
        seconds = generation_seconds(done.prefill, done.decode, load.generate)
        fits = bytes_per_rank(program, load.batch, load.prompt, load.generate) <= self.fabric.device.memory
        return Speed(float(f"{seconds:.10g}"), done.prefill.seconds, done.decode.seconds, fits)

    def ranks(self, mix: Mix) -> dict[str, int]:
        """The mesh that a mix runs on: "tp" ranks share heads and channels, "sp" ranks tokens."""
        mesh = self.candidates.one(recipe_of(mix), self.workload.tp).program.mesh
        return {axis: mesh.get(axis, 1) for axis in ("tp", "sp")}

    @property
    def standard(self) -> Speed:
        """The model with nothing rewritten, which every gain is compared with."""
        found = self.speed(Mix())
        if found is None:
            raise RewriterError(f"{self.fabric.name}: it cannot run this model on {self.workload.tp} ranks")
        return found


@dataclass(frozen=True)
class Increments:
    """Seconds that a generation changes by, where placements and formats of neighbouring layers add up to a mix.

    `alone`: by (placement without its order, format of its messages), everything else being standard; a placement
    without a rewrite is one layer of which only messages change. `meeting`: by (rewrite, rewrite of the next layer), by
    how much both together differ from the sum of the two.
    """

    alone: Mapping[tuple[Placement, str], float]
    meeting: Mapping[tuple[str, str], float]


def increments(
    gains: Gains,
    placements: Sequence[Placement],
    progress: Callable[[int, int], None] = lambda *_: None,
    base: str = Mix.base,
) -> Increments:
    """Of the placements that apply, with each format and without, and of each pair of rewrites that meet.

    Seconds differ from those of `base` alone. With one that shares tokens no block is reduced, so no format applies.

    Layers of which the standard model's simulation is the same gain the same, but for the first and the last one: of
    each kind, the one nearest to the middle is simulated.
    """
    kinds = _layer_kinds(gains, base)
    formats = FORMATS if base == Mix.base else ()
    alone_speed = gains.speed(Mix(base=base))
    if alone_speed is None:
        return Increments({}, {})
    standard = alone_speed.seconds
    layers = len(kinds)
    plain = list(dict.fromkeys(Placement(p.start, p.rewrite) for p in placements))
    wanted = [(p, format) for p in plain for format in ("", *formats)]
    wanted += [(Placement(layer, ""), format) for layer in range(layers) for format in formats]
    alike: dict[tuple[Any, ...], list[tuple[Placement, str]]] = {}
    for placement, format in sorted(wanted, key=lambda case: abs(case[0].start - layers // 2)):
        span = _span(placement)
        edges = (span[0] == 0, span[-1] == layers - 1)
        alike.setdefault((placement.rewrite, format, edges, *(kinds[n] for n in span)), []).append((placement, format))
    names = list(dict.fromkeys(p.rewrite for p in plain))
    pairs = [(a, b) for a in names for b in names]
    total = len(alike) + len(pairs)
    alone: dict[tuple[Placement, str], float] = {}
    for done, cases in enumerate(alike.values()):
        progress(done, total)
        placement, format = cases[0]
        messages = {layer: format for layer in _span(placement) if format}
        speed = gains.speed(mix_of([placement] if placement.rewrite else [], messages, base))
        if speed is not None:
            alone |= dict.fromkeys(cases, speed.seconds - standard)
    meeting: dict[tuple[str, str], float] = {}
    for done, (first, second) in enumerate(pairs, len(alike)):
        progress(done, total)
        if found := _meeting(gains, (first, second), plain, alone, Mix(base=base)):
            meeting[first, second] = found
    return Increments(alone, meeting)


def _span(placement: Placement) -> range:
    return placement.layers if placement.rewrite else range(placement.start, placement.start + 1)


def _layer_kinds(gains: Gains, base: str) -> list[int]:
    """By layer, a number that layers share in which a pass with nothing rewritten takes the same times."""
    program = gains.candidates.one(recipe_of(Mix(base=base)), gains.workload.tp).program
    done = gains.predictor.simulate(program)
    spent: dict[int, list[Any]] = {layer: [] for layer in range(gains.program.source.num_layers)}
    for phase in (done.prefill, done.decode):
        for span in phase.spans:
            if span.layer is not None:
                spent[span.layer].append((span.lane, span.nbytes, float(f"{span.seconds:.4g}")))
    kinds: dict[str, int] = {}
    return [kinds.setdefault(repr(sorted(times)), len(kinds)) for times in spent.values()]


def _meeting(
    gains: Gains,
    names: tuple[str, str],
    plain: Sequence[Placement],
    alone: Mapping[tuple[Placement, str], float],
    nothing: Mix,
) -> float:
    """By how much the second right after the first, in the middle, differs from the sum of the two alone."""
    first, second = names
    length, middle = BY_NAME[first].layers, gains.program.source.num_layers // 2
    standard = gains.speed(nothing)
    for start in sorted((p.start for p in plain if p.rewrite == first), key=lambda start: abs(start + length - middle)):
        pair = [Placement(start, first), Placement(start + length, second)]
        if any((p, "") not in alone for p in pair):
            continue
        speed = gains.speed(mix_of(pair, base=nothing.base))
        if speed is not None and standard is not None:
            return speed.seconds - standard.seconds - sum(alone[p, ""] for p in pair)
    return 0.0
