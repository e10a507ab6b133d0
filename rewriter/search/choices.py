"""What a layer can be, and a mix: what every layer is. A mix is a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewriter.passes import available
from rewriter.passes.selection import runs_of
from rewriter.recipes import Recipe

FORMATS = ("int8", "int4-hadamard")


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of `layers` neighbouring layers. `name`: as reports call it; `passed`: its pass with its options, to
    which the layers are added. `bound`: ranks keep residuals of their own, so that the order of heads and channels
    matters, and there have to be several ranks. `early`: its pass merges reductions, so that it comes before others."""

    name: str
    layers: int
    passed: Mapping[str, Any]
    bound: bool = False
    early: bool = False


REWRITES = (
    Rewrite("ladder", 1, {"pass": "ladder"}),
    Rewrite("own-partial", 1, {"pass": "ladder", "variant": "own_partial"}, True),
    Rewrite("drop", 1, {"pass": "drop_sync"}, True),
    Rewrite("drop-mlp", 2, {"pass": "desync", "pattern": [["keep", "drop"], ["keep", "keep"]], "resync": "sum"}, True),
    Rewrite(
        "drop-mlps",
        4,
        {"pass": "desync", "pattern": [["keep", "drop"]] * 3 + [["keep", "keep"]], "resync": "sum"},
        True,
    ),
    Rewrite("desync-4x", 2, {"pass": "desync", "n": 4, "resync": "sum"}, True),
    Rewrite("desync-8x", 4, {"pass": "desync", "n": 8, "resync": "sum"}, True),
    Rewrite("parallel", 1, {"pass": "parallel_block", "norm": "attention"}, early=True),
    Rewrite("parallel-own", 1, {"pass": "parallel_block", "norm": "own"}, early=True),
)
WORDS = {
    "ladder": "reads the stream one block late",
    "own-partial": "ladder, with the rank's own part of the late sum",
    "drop": "attention's reduction waits for the MLP's",
    "drop-mlp": "the MLP's reduction waits for the next layer's attention",
    "drop-mlps": "the same, three layers in a row",
    "desync-4x": "one reduction for two layers",
    "desync-8x": "one reduction for four layers",
    "parallel": "attention and MLP side by side, with one norm",
    "parallel-own": "attention and MLP side by side, each with its norm",
    "int8": "messages in 8 bits",
    "int4-hadamard": "messages in 4 bits, rotated",
}
"""What each rewrite does to a layer, in words."""

BY_NAME = {rewrite.name: rewrite for rewrite in REWRITES}


@dataclass(frozen=True, order=True)
class Placement:
    """A rewrite from layer `start` on. `ordered`: its heads and channels are in an order measured for it."""

    start: int
    rewrite: str
    ordered: bool = False

    @property
    def layers(self) -> range:
        return range(self.start, self.start + BY_NAME[self.rewrite].layers)

    def __str__(self) -> str:
        return f"{self.rewrite}{'+permute' if self.ordered else ''}@{self.start}"


@dataclass(frozen=True)
class Mix:
    """What every layer is: placements, and formats of messages by layer. What is not named is standard and exact.

    `base` is the exact recipe around them: tensor-parallel, or one that shards tokens; `keys` is the format in which
    keys and values travel between ranks that share tokens, "" where they are exact.
    """

    placements: tuple[Placement, ...] = ()
    formats: tuple[tuple[int, str], ...] = ()
    base: str = "tensor-parallel"
    keys: str = ""

    @property
    def key(self) -> str:
        """A name by which it is found again."""
        named = [f"{_KEYS}{self.keys}"] if self.keys else []
        named += [*map(str, self.placements), *(f"{name}@{layer}" for layer, name in self.formats)]
        return " ".join([self.base, *named])

    @property
    def bound(self) -> bool:
        return any(BY_NAME[p.rewrite].bound for p in self.placements)

    @property
    def touched(self) -> tuple[int, ...]:
        """The layers that are not as they were, ascending."""
        return tuple(
            sorted({layer for p in self.placements for layer in p.layers} | {layer for layer, _ in self.formats})
        )

    def counts(self) -> dict[str, int]:
        """How many layers each rewrite has, by name."""
        found: dict[str, int] = {}
        for p in self.placements:
            found[p.rewrite] = found.get(p.rewrite, 0) + len(p.layers)
        for _, name in self.formats:
            found[name] = found.get(name, 0) + 1
        return found


_KEYS = "keys-and-values-"


def mix_of(placements: Sequence[Placement], formats: Mapping[int, str] | None = None, base: str = Mix.base) -> Mix:
    """A mix with its parts in order, so that equal mixes have equal keys."""
    return Mix(tuple(sorted(placements)), tuple(sorted((formats or {}).items())), base)


def parse(key: str) -> Mix:
    """The mix of a `Mix.key`."""
    base, *words = key.split(" ")
    placements, formats, keys = [], {}, ""
    for word in words:
        if word.startswith(_KEYS):
            keys = word.removeprefix(_KEYS)
            continue
        name, _, layer = word.rpartition("@")
        if name in FORMATS:
            formats[int(layer)] = name
        else:
            rewrite, _, ordered = name.partition("+")
            placements.append(Placement(int(layer), rewrite, bool(ordered)))
    return replace(mix_of(placements, formats, base), keys=keys)


def recipe_of(
    mix: Mix,
    orders: Mapping[str, str] | None = None,
    name: str = "searched",
    summary: str = "A mix that was found by a search.",
    measured_on: str | None = None,
) -> Recipe:
    """The recipe of a mix. `orders`: the rank of each unit, by block, of the placements that are ordered."""
    shares_tokens = mix.base != Mix.base
    passes: list[dict[str, Any]] = []
    if orders:
        passes.append(
            {"pass": "permute", "ranks": dict(orders), **({"measured_on": measured_on} if measured_on else {})}
        )
    passes.append({"pass": "tensor_parallel"})
    rewired = list(_rewired(mix))
    early = {rewrite.passed["pass"] for rewrite in REWRITES if rewrite.early}
    passes += [p for p in rewired if p["pass"] in early]
    passes.append({"pass": "merge_reductions", "optional": True})
    passes += [p for p in rewired if p["pass"] not in early]
    if shares_tokens:
        known = available()
        passes += [p.to_dict() for p in Recipe.load(mix.base).passes if known[p.pass_name].shards_tokens]
        if mix.keys:
            passes.append({"pass": "quantize_collectives", "axis": "sp", "format": mix.keys, "min_bytes": 0})
    for format in FORMATS:
        if chosen := [layer for layer, known in mix.formats if known == format]:
            passes.append({"pass": "quantize_collectives", "format": format, "layers": _selection(chosen)})
    passes.append({"pass": "fuse_projections", "optional": True})
    passes.append({"pass": "overlap", "optional": True})
    return Recipe.model_validate({"name": name, "summary": summary, "paper": PAPER, "passes": passes})


PAPER = "searched by `rewrite search`; its passes are described in docs/concepts/rewrites.md"


def _rewired(mix: Mix) -> Iterator[dict[str, Any]]:
    for rewrite in REWRITES:
        placed = [p for p in mix.placements if p.rewrite == rewrite.name]
        if not placed:
            continue
        layers = sorted(layer for p in placed for layer in p.layers)
        yield {**rewrite.passed, "layers": _selection(layers)}


def _selection(layers: Sequence[int]) -> Any:
    runs = list(runs_of(sorted(layers)))
    if len(runs) == 1 and len(runs[0]) > 1:
        return f"{runs[0][0]}-{runs[0][-1]}"
    return list(layers)
