"""The result of a search: what every rewrite costs and gains alone, the front of mixes, and the one that was chosen."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rewriter.predict.search.choices import Mix, recipe_of
from rewriter.predict.search.computed import WindowChange
from rewriter.predict.search.gains import Speed
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
    def relative(self) -> float:
        """The rise as a share of the original's loss."""
        return self.rise / self.loss

    @property
    def relative_error(self) -> float:
        return self.error / self.loss


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
class Single:
    """One rewrite of one layer, or of neighbouring ones from `layer` on, everything else being as it was.

    `cost`: KL(original ‖ rewritten), nats per token, over `tokens` of the calibration text; `rise`: of the loss there,
    nats per token. `gain`: seconds by which a generation is predicted to get faster, among others like it.
    """

    rewrite: str
    layer: int
    layers: int
    cost: float
    rise: float
    tokens: int
    gain: float | None


@dataclass(frozen=True)
class SearchPoint:
    """A mix, measured and predicted. `estimated`: the cost that was estimated for it before it was measured, nats per
    token of KL. `held_out`: its rise on the text that was held out, where it was measured there."""

    mix: Mix
    speed: Speed
    rise: Rise
    speedup: float
    estimated: float | None = None
    held_out: Rise | None = None
    front: bool = False


@dataclass(frozen=True)
class SearchResult:
    """`points` by rising seconds; `chosen` is one of them. `standard` is the model under plain tensor parallelism.

    `budget`: the rise in loss that was asked for, as a share of the original's loss on the calibration text (`loss`,
    nats per token). `agreement`: Kendall's τ of the estimated and the measured order of the front. `recipe`: the chosen
    one as YAML, with its measurements. `text`: what was measured on. `ranks`: of the mesh, "tp" and "sp".
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
    singles: tuple[Single, ...]
    agreement: float
    rounds: int
    recipe: str
    ranks: Mapping[str, int]
    not_applied: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def front(self) -> tuple[SearchPoint, ...]:
        """The points of which no other is both faster and closer to the original, fastest first."""
        return tuple(p for p in self.points if p.front)

    def to_json(self) -> dict[str, Any]:
        """Plain data; rises in nats per token and as shares of the loss, times in seconds."""
        data = asdict(self)
        data["points"] = [_point(p) for p in self.points]
        data["chosen"] = _point(self.chosen)
        return data


def _point(point: SearchPoint) -> dict[str, Any]:
    return {
        "mix": point.mix.key,
        "layers": point.mix.counts(),
        "seconds": point.speed.seconds,
        "prefill_seconds": point.speed.prefill,
        "seconds_per_token": point.speed.decode,
        "speedup": point.speedup,
        "front": point.front,
        "estimated_kl": point.estimated,
        "calibration": _rise(point.rise),
        "held_out": None if point.held_out is None else _rise(point.held_out),
    }


def _rise(rise: Rise) -> dict[str, float]:
    return {**asdict(rise), "relative": rise.relative, "relative_error": rise.relative_error}


def recipe_with_measurements(result: SearchResult) -> str:
    """The chosen mix as YAML that `rewrite MODEL --recipe FILE` takes, with what was measured and predicted of it."""
    chosen, load = result.chosen, result.workload
    name = re.sub(r"[^a-z0-9]+", "-", f"searched-{result.fabric}-tp{result.ranks['tp'] * result.ranks['sp']}".lower())
    parts = ", ".join(f"{name} in {count}" for name, count in chosen.mix.counts().items())
    around = "" if chosen.mix.base == Mix.base else f"{chosen.mix.base} with "
    what = f"{around}{parts} of the layers" if parts else f"{around}nothing rewritten"
    summary = f"Found by a search on {result.fabric} within a rise in loss of {result.budget:.3g}: {what}."
    measured = MeasuredRecipe(
        model=Path(result.model).name,
        fabric=result.fabric,
        tp=result.ranks["tp"],
        sp=result.ranks["sp"],
        workload=f"batch {load['batch']}, {load['prompt']} + {load['generate']} tokens",
        speedup=round(chosen.speedup, _DIGITS),
        seconds_per_token=float(f"{chosen.speed.decode:.{_DIGITS}g}"),
        text=result.text,
        loss=round(result.loss, _DIGITS),
        budget=result.budget,
        calibration=_measured_rise(chosen.rise),
        held_out=None if chosen.held_out is None else _measured_rise(chosen.held_out),
    )
    recipe = recipe_of(chosen.mix, name[:64], summary)
    return recipe.model_copy(update={"measured": measured}).to_yaml()


def _measured_rise(rise: Rise) -> MeasuredRise:
    shares = {"rise": rise.relative, "error": rise.relative_error, "seen": rise.seen / rise.loss}
    figures = {"loss": rise.loss, "kl": rise.kl, **shares}
    return MeasuredRise(**{name: round(value, _DIGITS) for name, value in figures.items()})
