"""Gains of mixes on a fabric, predicted by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.phases import PromptPhase
from rewriter.predict.analytic import Predictor, bytes_per_rank
from rewriter.predict.candidates import Candidates
from rewriter.predict.results import generation_seconds
from rewriter.predict.search.choices import BY_NAME, Mix, PlacedRewrite, mix_of, of_prompt, recipe_of
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
    speeds: dict[str, Speed | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.workload, self.cluster)
        self.fabric = self.predictor.fabric
        self.candidates = Candidates(self.program, self.workload.sp)

    def speed(self, mix: Mix) -> Speed | None:
        """Speed of a mix; None where its passes, or the fabric, refuse it."""
        if mix.key not in self.speeds:
            try:
                self.speeds[mix.key] = self.of_recipe(recipe_of(mix))
            except RewriterError:
                self.speeds[mix.key] = None
            keep_shared(self.candidates.known)
        return self.speeds[mix.key]

    def cut(self, base: str = Mix.base) -> float:
        """Seconds by which a generation gets longer where its prefill is cut into calls for rewired and for exact
        tokens, before anything is rewired. Below 0 where the last layer's work that this spares takes longer."""
        program = self.candidates.one(recipe_of(Mix(base=base)), self.workload.tp).program
        seconds = []
        for cut in (None, PromptPhase()):
            done = self.predictor.simulate(program, record=False, cut=cut)
            seconds.append(generation_seconds(done.prefill, done.decode, self.workload.generate))
        return seconds[1] - seconds[0]

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


def gain_of(
    gains: Gains, rewrite: str, starts: Sequence[int], format: str = "", base: str = Mix.base, cut: float = 0.0
) -> tuple[float, float] | None:
    """(seconds that each placement of a rewrite at one of `starts` saves of a generation, seconds that a run of them
    loses at its first layer); None where `base` or the fabric refuses it. `rewrite` "": only messages change. `cut`:
    `Gains.cut`, which a rewrite of the prompt alone pays once, however many there are: it is not counted here.

    By the simulations of one placement in the middle, and of all that have room, but the first, which may gain less.
    """
    length = BY_NAME[rewrite].layers if rewrite else 1
    room: list[int] = []
    for start in sorted(starts):
        if not room or start >= room[-1] + length:
            room.append(start)
    standard, times = gains.speed(Mix(base=base)), []
    room = room[1:] or room
    for some in ([room[len(room) // 2]], room):
        formats = {n: format for start in some for n in range(start, start + length) if format}
        speed = gains.speed(mix_of([PlacedRewrite(start, rewrite) for start in some if rewrite], formats, base))
        if speed is None or standard is None:
            return None
        paid = cut if of_prompt(rewrite or format) else 0.0
        times.append(standard.seconds + paid - speed.seconds)
    alone, whole = times
    each = (whole - alone) / (len(room) - 1) if len(room) > 1 else alone
    return each, each - alone
