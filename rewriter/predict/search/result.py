"""The result of a search: what every rewrite costs and gains alone, mixes that were measured, and the chosen one."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rewriter.predict.search.choices import STANDARD, Mix, recipe_of
from rewriter.predict.search.computed import WindowChange
from rewriter.predict.search.gains import Speed
from rewriter.predict.search.greedy import Option
from rewriter.recipes.recipe import MeasuredRecipe, MeasuredRise

_DIGITS = 5


@dataclass(frozen=True)
class Rise:
    """Means over windows, nats per token, with the original's `loss`.

    `rise`: by how much the rewritten model's loss is higher, with its standard `error` over windows. On a text that the
    model wrote itself that is `kl`, the mean KL(original ‖ rewritten): the rise that is expected, over all that the
    model could have written. `seen`: the rise on the words that stand there, with its standard error `seen_error`.
    """

    loss: float
    rise: float
    error: float
    kl: float
    seen: float = 0.0
    seen_error: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The rise, its error, and the rise on the words that stand there, as shares of the loss."""
        return {"rise": self.rise / self.loss, "error": self.error / self.loss, "seen": self.seen / self.loss}

    @property
    def relative(self) -> float:
        """The rise as a share of the original's loss."""
        return self.rise / self.loss


def rise_of(changes: Sequence[WindowChange], loss: float, own: bool = False) -> Rise:
    """The means of windows where the original has `loss` nats per token; `own`: it wrote them itself."""
    kl = max(sum(c.divergence for c in changes) / sum(c.tokens for c in changes), 0.0)
    seen = sum(c.rise for c in changes) / sum(c.predicted for c in changes)
    kl_error = _error([c.divergence / c.tokens for c in changes])
    seen_error = _error([c.rise / c.predicted for c in changes])
    return Rise(loss, *((kl, kl_error) if own else (seen, seen_error)), kl, seen, seen_error)


def _error(each: Sequence[float]) -> float:
    """The standard error of a mean; of one value it is not known, and taken to be as large."""
    return statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else abs(each[0])


@dataclass(frozen=True)
class SearchPoint:
    """A mix, measured and predicted. `held_out`: its rise on the text that was held out, where it was measured there.
    `front`: no other point is as fast and as close to the original, and better in one."""

    mix: Mix
    speed: Speed
    rise: Rise
    speedup: float
    held_out: Rise | None = None
    front: bool = False

    @property
    def worst(self) -> float:
        """The largest rise, as a share of the loss: on the calibration text and, by both measures, on what was held
        out."""
        held_out = [] if self.held_out is None else [self.held_out.relative, self.held_out.seen / self.held_out.loss]
        return max([self.rise.relative, *held_out])

    def to_json(self) -> dict[str, Any]:
        """Plain data; rises in nats per token and as shares of the loss, times in seconds."""
        speed, rises = self.speed, {"calibration": self.rise, "held_out": self.held_out}
        return {
            "mix": self.mix.key,
            "layers": {name: len(layers) for name, layers in self.mix.layers.items()},
            "seconds": speed.seconds,
            "prefill_seconds": speed.prefill,
            "seconds_per_token": speed.decode,
            "speedup": self.speedup,
            "front": self.front,
            **{name: rise and {**asdict(rise), "shares": rise.shares} for name, rise in rises.items()},
        }


def with_front(points: Iterable[SearchPoint]) -> list[SearchPoint]:
    """The points by rising seconds, with `front` set."""
    found, least = list[SearchPoint](), math.inf
    for point in sorted(points, key=lambda p: (p.speed.seconds, p.rise.rise)):
        found.append(replace(point, front=point.rise.rise < least))
        least = min(least, point.rise.rise)
    return found


@dataclass(frozen=True)
class SearchResult:
    """`points` by rising seconds; `chosen` is one of them. `standard` is the model under plain tensor parallelism.
    `singles`: every rewrite of every layer, alone.

    `budget`: the rise in loss that was asked for, as a share of the original's loss on the calibration text (`loss`,
    nats per token). `text`: what was measured on. `ranks`: of the mesh, "tp" and "sp". `not_applied`: why not, by name
    of a rewrite. `seconds`: of CPU that the search took.
    """

    model: str
    fabric: str
    fabric_summary: str
    modelled: bool
    workload: Mapping[str, int]
    budget: float
    text: str
    loss: float
    standard: Speed
    chosen: SearchPoint
    points: tuple[SearchPoint, ...]
    singles: tuple[Option, ...]
    ranks: Mapping[str, int]
    not_applied: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def front(self) -> tuple[SearchPoint, ...]:
        """The points of which no other is both faster and closer to the original, fastest first."""
        return tuple(p for p in self.points if p.front)

    @property
    def recipe(self) -> str:
        """The chosen mix as YAML for `rewrite MODEL --recipe FILE`, with what was measured and predicted of it."""
        chosen, load, mix = self.chosen, self.workload, self.chosen.mix
        ranks = self.ranks["tp"] * self.ranks["sp"]
        name = re.sub(r"[^a-z0-9]+", "-", f"searched-{self.fabric}-tp{ranks}".lower())[:64]
        around = "" if mix.base == STANDARD else f"{mix.base} with "
        parts = ", ".join(f"{name} in {len(layers)}" for name, layers in mix.layers.items())
        what = f"{around}{parts} of the layers" if parts else f"{around}nothing rewritten"
        summary = f"Found by a search on {self.fabric} within a rise in loss of {self.budget:.3g}: {what}."
        measured = MeasuredRecipe(
            model=Path(self.model).name,
            fabric=self.fabric,
            **self.ranks,
            workload=f"batch {load['batch']}, {load['prompt']} + {load['generate']} tokens",
            speedup=round(chosen.speedup, _DIGITS),
            seconds_per_token=float(f"{chosen.speed.decode:.{_DIGITS}g}"),
            text=self.text,
            loss=round(self.loss, _DIGITS),
            budget=self.budget,
            calibration=_measured(chosen.rise),
            held_out=None if chosen.held_out is None else _measured(chosen.held_out),
        )
        return recipe_of(mix, name, summary).model_copy(update={"measured": measured}).to_yaml()

    def to_json(self) -> dict[str, Any]:
        """Plain data; rises in nats per token and as shares of the loss, times in seconds."""
        singles = [
            {**asdict(o.part), "layers": len(o.part.layers), "cost": o.cost, "gain": o.gain} for o in self.singles
        ]
        points = {"chosen": self.chosen.to_json(), "points": [p.to_json() for p in self.points]}
        return {**asdict(self), **points, "singles": singles, "recipe": self.recipe}


def _measured(rise: Rise) -> MeasuredRise:
    figures = {"loss": rise.loss, "kl": rise.kl, **rise.shares}
    return MeasuredRise(**{name: round(value, _DIGITS) for name, value in figures.items()})
