"""Rewrites of layers, mixes of them, each a recipe, and greedy mixes by gain per cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rewriter.passes import available
from rewriter.passes.selection import runs_of
from rewriter.recipes import Recipe

PROMPT = "prompt-"  # begins names of rewrites for tokens of the prompt alone
STANDARD = "tensor-parallel"
SCHEDULES = ("fuse_projections", "overlap")  # passes that change no result


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of `layers` neighbouring layers, or one format of a layer's messages.

    `does`: what a layer becomes; `options`: its pass with its options, to which the layers are added. `bound`: ranks
    keep residuals of their own, so there have to be several ranks. `prompt`: for tokens of the prompt alone.
    """

    layers: int
    does: str
    options: Mapping[str, Any]
    bound: bool = False

    @property
    def prompt(self) -> bool:
        return "phase" in self.options

    @property
    def format(self) -> bool:
        return "format" in self.options

    @property
    def merges(self) -> bool:
        """The reductions of a layer's blocks, side by side, become one."""
        return "norm" in self.options


_FORMAT, _PARALLEL = {"pass": "quantize_collectives"}, {"pass": "parallel_block"}
_SUM, _DROP, _KEEP = {"pass": "desync", "resync": "sum"}, ["keep", "drop"], ["keep", "keep"]
_OWN = {"pass": "ladder", "variant": "own_partial"}
_DROP_MLP, _DROP_MLPS = {**_SUM, "pattern": [_DROP, _KEEP]}, {**_SUM, "pattern": [*[_DROP] * 3, _KEEP]}
_ALL_TOKENS = {
    "ladder": Rewrite(1, "reads the stream one block late", {"pass": "ladder"}),
    "own-partial": Rewrite(1, "ladder, with the rank's own part of the late sum", _OWN, True),
    "drop": Rewrite(1, "attention's reduction waits for the MLP's", {"pass": "drop_sync"}, True),
    "drop-mlp": Rewrite(2, "the MLP's reduction waits for the next layer's attention", _DROP_MLP, True),
    "drop-mlps": Rewrite(4, "the same, three layers in a row", _DROP_MLPS, True),
    "desync-4x": Rewrite(2, "one reduction for two layers", {**_SUM, "n": 4}, True),
    "desync-8x": Rewrite(4, "one reduction for four layers", {**_SUM, "n": 8}, True),
    "parallel": Rewrite(1, "attention and MLP side by side, with one norm", {**_PARALLEL, "norm": "attention"}),
    "parallel-own": Rewrite(1, "attention and MLP side by side, each with its norm", {**_PARALLEL, "norm": "own"}),
    "int8": Rewrite(1, "messages in 8 bits", {**_FORMAT, "format": "int8"}),
    "int4-hadamard": Rewrite(1, "messages in 4 bits, rotated", {**_FORMAT, "format": "int4-hadamard"}),
}
_PROMPT_ALONE = {
    PROMPT + name: Rewrite(r.layers, f"for the prompt alone: {r.does}", {**r.options, "phase": "prompt"}, r.bound)
    for name, r in _ALL_TOKENS.items()
}
REWRITES = {**_ALL_TOKENS, **_PROMPT_ALONE}


@dataclass(frozen=True, order=True)
class Part:
    """A rewrite from layer `start` on; `name` is its key in `REWRITES`."""

    start: int
    name: str

    @property
    def rewrite(self) -> Rewrite:
        return REWRITES[self.name]

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.rewrite.layers)

    @cached_property
    def places(self) -> int:
        """A bit for each layer's rewrite, or format. A layer has one of each: parts with a common bit exclude each
        other."""
        return sum(1 << (2 * layer + self.rewrite.format) for layer in self.layers)


@dataclass(frozen=True)
class Mix:
    """Parts, sorted, none of which excludes another. `base` is the exact recipe around them: tensor-parallel, or one
    that shards tokens."""

    parts: tuple[Part, ...] = ()
    base: str = STANDARD

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts)))

    @property
    def key(self) -> str:
        """A name by which it is found again."""
        return " ".join([self.base, *(f"{part.name}@{part.start}" for part in self.parts)])

    @property
    def layers(self) -> dict[str, list[int]]:
        """The layers of each rewrite that it has, ascending, by name."""
        of = {name: [layer for p in self.parts if p.name == name for layer in p.layers] for name in REWRITES}
        return {name: layers for name, layers in of.items() if layers}


def recipe_of(mix: Mix, name: str = "searched", summary: str = "A mix that was found by a search.") -> Recipe:
    """The recipe of a mix. Passes that merge reductions come first, formats of messages last."""
    merges, rewires, formats = list[Any](), list[Any](), list[Any]()
    for rewrite, layers in ((REWRITES[name], layers) for name, layers in mix.layers.items()):
        runs = f"{layers[0]}-{layers[-1]}" if len(list(runs_of(layers))) == 1 < len(layers) else layers
        passes = merges if rewrite.merges else formats if rewrite.format else rewires
        passes.append({**rewrite.options, "layers": runs})
    around = [] if mix.base == STANDARD else Recipe.load(mix.base).passes
    shared = [p.to_dict() for p in around if available()[p.pass_name].shards_tokens]
    merged, fused, overlapped = ({"pass": name, "optional": True} for name in ("merge_reductions", *SCHEDULES))
    passes = [{"pass": "tensor_parallel"}, *merges, merged, *rewires, *shared, *formats, fused, overlapped]
    paper = "searched by `rewrite search`; its passes are described in docs/concepts/rewrites.md"
    return Recipe.model_validate({"name": name, "summary": summary, "paper": paper, "passes": passes})


@dataclass(frozen=True)
class Option:
    """A part that mixes may have. `cost`: its KL(original ‖ rewritten) alone, nats per token. `gain`: seconds by which
    it is predicted to shorten a generation, among others like it."""

    part: Part
    cost: float
    gain: float


def greedy(options: Sequence[Option], begun: Sequence[Option] = (), most: float = math.inf) -> list[Sequence[Option]]:
    """Mixes from `begun` on, each made from the one before by the option that gains most per cost. It takes the place
    of those that exclude it, which count against it. Every step gains, and costs less than `most`, nats per token."""
    mixes = [begun]
    while True:
        found, best = None, 0.0
        for option in (option for option in options if option.gain > 0):
            replaced = [other for other in mixes[-1] if other.part.places & option.part.places]
            gain = option.gain - sum(other.gain for other in replaced)
            cost = max(option.cost - sum(other.cost for other in replaced), 1e-12)
            if gain > 1e-12 and cost < most and gain / cost > best:
                found, best = option, gain / cost
        if found is None:
            return mixes
        mixes.append([*(other for other in mixes[-1] if not other.part.places & found.part.places), found])


def toward(options: Sequence[Option], base: str, within: Callable[[Mix], bool | None]) -> Iterator[tuple[Mix, Mix]]:
    """(the mix to measure next, the fastest that may be within the budget), of greedy mixes around `base`.

    `within`: whether a mix was measured to be within the budget, None where it was not measured. The next one is in the
    middle between the last within the budget and the first beyond it. Where nothing is between them, steps that cost as
    much as the one between them are not made any more.
    """
    order = greedy(options)
    while True:
        mixes = [Mix(tuple(option.part for option in taken), base) for taken in order]
        known = {n: inside for n, mix in enumerate(mixes) if (inside := within(mix)) is not None}
        low = max((n for n, inside in known.items() if inside), default=0)
        high = min((n for n in known if n > low), default=len(mixes))
        if high - low > 1:
            yield mixes[(low + high) // 2], mixes[high - 1]
        elif high == len(mixes):
            return
        else:
            before, after = (sum(option.cost for option in order[n]) for n in (low, high))
            order[low:] = greedy(options, order[low], (after - before) * (1 - 1e-9))
