"""What a search found: what every rewrite costs and gains alone, the front of mixes, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rewriter.search.choices import Mix
from rewriter.search.gains import Speed
from rewriter.search.losses import Rise


@dataclass(frozen=True)
class Single:
    """One rewrite of one layer, or of neighbouring ones from `layer` on, everything else being as it was.

    `cost`: KL(original ‖ rewritten), nats per token, over `tokens` of the calibration text; `rise`: of the loss there,
    nats per token. `ordered`: with the order of heads and channels that was measured for it. `gain`: seconds by which a
    generation is predicted to get faster.
    """

    rewrite: str
    layer: int
    layers: int
    ordered: bool
    cost: float
    rise: float
    tokens: int
    gain: float | None


@dataclass(frozen=True)
class Point:
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
class Healed:
    """The chosen mix after a light training of `tokens` tokens: its rise on the text that was held out, before and
    after, and where the trained model is."""

    tokens: int
    before: Rise
    after: Rise
    directory: str


@dataclass(frozen=True)
class SearchResult:
    """`points` by rising seconds; `chosen` is one of them. `standard` is the model under plain tensor parallelism.

    `budget`: the rise in loss that was asked for, as a share of the original's loss on the calibration text (`loss`,
    nats per token). `agreement`: Kendall's τ of the estimated and the measured order of the front. `recipe`: the chosen
    one as YAML, with its measurements. `text`: what was measured on, in words. `ranks`: of the mesh, "tp" and "sp".
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
    chosen: Point
    points: tuple[Point, ...]
    singles: tuple[Single, ...]
    agreement: float
    rounds: int
    recipe: str
    ranks: Mapping[str, int]
    not_applied: Mapping[str, str] = field(default_factory=dict)
    healed: Healed | None = None
    seconds: float = 0.0

    @property
    def front(self) -> tuple[Point, ...]:
        """The points of which no other is both faster and closer to the original, fastest first."""
        return tuple(p for p in self.points if p.front)

    def to_json(self) -> dict[str, Any]:
        """Plain data; rises in nats per token and as shares of the loss, times in seconds."""
        found = asdict(self)
        found["points"] = [_point(p) for p in self.points]
        found["chosen"] = _point(self.chosen)
        found["singles"] = [asdict(s) for s in self.singles]
        return found


def _point(point: Point) -> dict[str, Any]:
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
