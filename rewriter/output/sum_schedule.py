"""The plan of a rewritten model's layers, from config.json: what each block reads, and what its sum does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unsupported(Exception):
    """vLLM's own layers cannot compute a rewritten model. The message is a clause: "… because MESSAGE"."""


class Sum(Enum):
    """The fate of the all-reduce of a block's output."""

    INSIDE = "inside"  # vLLM's own, inside the block
    BEGIN = "begin"  # begins after the block; nothing else is under way
    STEP = "step"  # begins, and the sum before it ends
    DRAIN = "drain"  # begins and ends after the block, after the sum before it
    HOLD = "hold"  # goes with the next block's
    BOTH = "both"  # takes the held one with it
    DROP = "left_out"  # is left out: every rank adds its own part
    RESYNC_SUM = "all_since"  # takes all that the ranks have added since they last agreed
    RESYNC_MEAN = "mean"  # the ranks go on from the mean of what they have


@dataclass(frozen=True)
class Wire:
    """Long messages of a sum: the `format` of those of `min_bytes` bytes or more, before quantization."""

    format: str
    min_bytes: int


@dataclass(frozen=True)
class SumStep:
    """One block. late: it reads the stream without what the block before it adds; own: but with this rank's own part of
    that. factor: of what it adds. wire: of its sum, None where that travels exact. unreduced: the block itself leaves
    out its all-reduce."""

    late: bool
    own: bool
    sum: Sum
    factor: float = 1.0
    wire: Wire | None = None

    @property
    def unreduced(self) -> bool:
        return self.sum is not Sum.INSIDE or self.wire is not None

    @property
    def summed(self) -> bool:
        return self.sum not in (Sum.DROP, Sum.HOLD)


@dataclass(frozen=True)
class SumSchedule:
    """The steps of every layer, and the number of `ranks` that the model is bound to (None: any)."""

    layers: tuple[tuple[SumStep, ...], ...]
    norms: tuple[Mapping[str, str], ...]  # of each layer: blocks that read through another block's norm, and that
    ranks: int | None

    @property
    def overlapped(self) -> int:
        """The number of sums that overlap with the next block."""
        return sum(step.sum in (Sum.BEGIN, Sum.STEP) for layer in self.layers for step in layer)

    @property
    def summed(self) -> int:
        """The number of all-reduces."""
        return sum(step.summed for layer in self.layers for step in layer)

    @property
    def quantized(self) -> Counter[Wire]:
        """The number of all-reduces that travel quantized, by how."""
        return Counter(step.wire for layer in self.layers for step in layer if step.wire is not None and step.summed)


def schedule_of(config: Any, cuts: Sequence[int] = (), mergeable: bool = True) -> SumSchedule:
    """The schedule of the model that `config` (of transformers) describes; that of rewired tokens, where it has others.

    `cuts` are the layers after which a pipeline stage ends, as the last: what is under way ends there. `mergeable`:
    sums of two blocks that nobody reads in between may be one, since nothing stands between a block's sum and the
    stream but numbers. Raises Unsupported.
    """
    delays = getattr(config, "rewriter_delays", None)
    if delays is None:
        raise Unsupported("config.json has no rewriter_delays: rewrite the model again with this version of rewriter")
    if (streams := getattr(config, "rewriter_streams", None)) is not None:
        raise Unsupported(
            f"its layers mix {streams} residual streams, and vLLM's pass on one: use `rewrite serve DIR --engine "
            "transformers`, or `rewrite generate` on several ranks"
        )
    if getattr(config, "rewriter_exact", None) is not None:
        raise Unsupported("passes of all tokens rewire those that passes of the prompt leave exact")
    labels = [tuple(layer.values()) for layer in getattr(config, "rewriter_pattern", None) or ()]
    modes: Mapping[str, Mapping[str, Any]] | None = getattr(config, "rewriter_modes", None)
    if labels and modes is None:
        raise Unsupported("config.json has no rewriter_modes: `rewrite refresh` writes them")
    labels = labels or [("",) * len(layer) for layer in delays]
    if [len(layer) for layer in labels] != [len(layer) for layer in delays]:
        raise Unsupported("rewriter_delays and rewriter_pattern of config.json do not fit each other")
    if any(late not in (0, 1) for layer in delays for late in layer):
        raise Unsupported("a block reads the stream more than one block late")
    late = [bool(value) for layer in delays for value in layer]
    label = [name for names in labels for name in names]
    meaning = [(modes or {}).get(name, {}) for name in label]
    if altered := [name for name, says in zip(label, meaning, strict=True) if says.get("altered")]:
        raise Unsupported(f"blocks of mode {altered[0]} compute what only the generated code knows")
    layer_of = [number for number, layer in enumerate(delays) for _ in layer]
    count, last = len(late), {*cuts, len(delays) - 1}

    def next_late(place: int) -> bool:
        """True where the next block of this stage does without what this one adds."""
        following = place + 1
        if following >= count or (layer_of[following] != layer_of[place] and layer_of[place] in last):
            return False
        return late[following]

    def merges(place: int) -> bool:
        within = place + 1 < count and layer_of[place + 1] == layer_of[place]
        exact = mergeable and not label[place] and not label[min(place + 1, count - 1)]
        return exact and within and not late[place] and next_late(place) and not next_late(place + 1)

    wires = _wires(getattr(config, "rewriter_quantized", None), len(delays))
    steps: list[list[SumStep]] = [[] for _ in delays]
    before = Sum.INSIDE
    for place in range(count):
        before = _sum(meaning[place].get("sum"), before, late[place], next_late(place), merges(place))
        own = late[place] and meaning[place].get("own_part", False)
        layer, factor = layer_of[place], meaning[place].get("factor", 1.0)
        steps[layer].append(SumStep(late[place], own, before, factor, wires[layer]))
    norms = tuple(getattr(config, "rewriter_norms", None) or [{}] * len(delays))
    return SumSchedule(tuple(map(tuple, steps)), norms, getattr(config, "rewriter_ranks", None))


def _wires(said: Sequence[Mapping[str, Any]] | None, layers: int) -> list[Wire | None]:
    """Of each layer, how its sums travel."""
    wires: list[Wire | None] = [None] * layers
    for entry in said or ():
        for layer in entry.get("layers", range(layers)):
            wires[layer] = Wire(entry["format"], entry["min_bytes"])
    return wires


def _sum(said: str | None, before: Sum, late: bool, next_late: bool, merges: bool) -> Sum:
    """The fate of a block's sum, given that of the block before it, and what its mode says of it."""
    if said is not None:
        return Sum(said)
    under_way = late and before in (Sum.BEGIN, Sum.STEP)
    if before is Sum.HOLD:
        return Sum.BOTH
    if merges:
        return Sum.HOLD
    if next_late:
        return Sum.STEP if under_way else Sum.BEGIN
    return Sum.DRAIN if under_way else Sum.INSIDE


def hf_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values in place of those of this config.json by which the plugin serves the checkpoint in vLLM: the plugin's
    name, where the source's own was kept because only sums are quantized."""
    if not config.get("rewriter_quantized") or "rewriter_layers" in config:
        return {}
    return {"architectures": [f"Rewriter{name}" for name in config["architectures"]]}
