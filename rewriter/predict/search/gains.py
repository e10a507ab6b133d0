"""Gains of mixes on a fabric, predicted by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.predict.analytic import Predictor, bytes_per_rank
from rewriter.predict.candidates import Candidates, all_recipes
from rewriter.predict.results import generation_seconds
from rewriter.predict.search.choices import REWRITES, STANDARD, Mix, Part, recipe_of
from rewriter.predict.search.computed import keep_shared
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe


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
    speeds: dict[Mix, Speed | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.workload, self.cluster)
        self.fabric = self.predictor.fabric
        self.candidates = Candidates(self.program, self.workload.sp)

    def speed(self, mix: Mix) -> Speed | None:
        """Speed of a mix; None where its passes, or the fabric, refuse it."""
        if mix not in self.speeds:
            try:
                self.speeds[mix] = self.of_recipe(recipe_of(mix))
            except RewriterError:
                self.speeds[mix] = None
            keep_shared(self.candidates.known)
        return self.speeds[mix]

    def of_recipe(self, recipe: Recipe) -> Speed:
        """Speed of a recipe. Raises RewriterError where its passes, or the fabric, refuse it."""
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
        speed = self.speed(Mix())
        if speed is None:
            raise RewriterError(f"{self.fabric.name}: it cannot run this model on {self.workload.tp} ranks")
        return speed

    def bases(self) -> list[str]:
        """Plain tensor parallelism, and unless one rank is to share tokens the shipped recipes whose ranks do, where
        every rank can hold what it has to. Of those that are equally fast, one."""
        times = {self.standard.seconds: STANDARD}
        for name in all_recipes() if self.workload.sp != 1 else ():
            if any(rewrite.shards_tokens for rewrite in Recipe.load(name).build()):
                speed = self.speed(Mix(base=name))
                if speed is not None and (speed.fits or not self.standard.fits):
                    times.setdefault(speed.seconds, name)
        return list(times.values())

    def gain(self, name: str, starts: Sequence[int], base: str = STANDARD) -> float | None:
        """Seconds by which a rewrite at one of `starts` shortens a generation, among others like it; None where passes
        or the fabric refuse it.

        By the simulations of one in the middle, and of all that have room but the first, which may gain less. So what
        is lost once is not counted: by the first of a run, and by two calls for the prefill where the prompt alone is
        rewired.
        """
        room: list[int] = []
        for start in sorted(starts):
            if not room or start >= room[-1] + REWRITES[name].layers:
                room.append(start)
        room = room[1:] or room
        mixes = [Mix(tuple(Part(n, name) for n in some), base) for some in ([room[len(room) // 2]], room)]
        one, many = map(self.speed, mixes if len(room) > 1 else [Mix(base=base), *mixes[1:]])
        return None if one is None or many is None else (one.seconds - many.seconds) / max(len(room) - 1, 1)
