"""Rewrites of layers, and mixes of them. A mix is a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.passes import available
from rewriter.passes.selection import runs_of
from rewriter.recipes import Recipe

PROMPT = "prompt-"  # begins names of rewrites for tokens of the prompt alone
STANDARD = "tensor-parallel"
PAPER = "searched by `rewrite search`; its passes are described in docs/concepts/rewrites.md"


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of `layers` neighbouring layers, or one format of a layer's messages.

    `name`: as reports call it; `does`: what a layer becomes; `options`: its pass with its options, to which the layers
    are added. `bound`: ranks keep residuals of their own, so there have to be several ranks.
    """

    name: str
    layers: int
    does: str
    options: Mapping[str, Any]
    bound: bool = False

    @property
    def prompt(self) -> bool:
        """True if it is for tokens of the prompt alone."""
        return self.name.startswith(PROMPT)

    @property
    def format(self) -> bool:
        """True for a format of messages, which a layer can have beside another rewrite."""
        return bool(self.options["pass"] == "quantize_collectives")


_DESYNC, _DROP, _KEEP = {"pass": "desync", "resync": "sum"}, ["keep", "drop"], ["keep", "keep"]
_OWN, _FORMAT = {"pass": "ladder", "variant": "own_partial"}, {"pass": "quantize_collectives"}
_DROP_MLP, _DROP_MLPS = {**_DESYNC, "pattern": [_DROP, _KEEP]}, {**_DESYNC, "pattern": [*[_DROP] * 3, _KEEP]}
_ONE_NORM, _OWN_NORMS = ({"pass": "parallel_block", "norm": norm} for norm in ("attention", "own"))
_ALL_TOKENS = (
    Rewrite("ladder", 1, "reads the stream one block late", {"pass": "ladder"}),
    Rewrite("own-partial", 1, "ladder, with the rank's own part of the late sum", _OWN, True),
    Rewrite("drop", 1, "attention's reduction waits for the MLP's", {"pass": "drop_sync"}, True),
    Rewrite("drop-mlp", 2, "the MLP's reduction waits for the next layer's attention", _DROP_MLP, True),
    Rewrite("drop-mlps", 4, "the same, three layers in a row", _DROP_MLPS, True),
    Rewrite("desync-4x", 2, "one reduction for two layers", {**_DESYNC, "n": 4}, True),
    Rewrite("desync-8x", 4, "one reduction for four layers", {**_DESYNC, "n": 8}, True),
    Rewrite("parallel", 1, "attention and MLP side by side, with one norm", _ONE_NORM),
    Rewrite("parallel-own", 1, "attention and MLP side by side, each with its norm", _OWN_NORMS),
    Rewrite("int8", 1, "messages in 8 bits", {**_FORMAT, "format": "int8"}),
    Rewrite("int4-hadamard", 1, "messages in 4 bits, rotated", {**_FORMAT, "format": "int4-hadamard"}),
)
_PROMPT_ALONE = (
    Rewrite(PROMPT + r.name, r.layers, f"for the prompt alone: {r.does}", {**r.options, "phase": "prompt"}, r.bound)
    for r in _ALL_TOKENS
)
REWRITES = {rewrite.name: rewrite for rewrite in (*_ALL_TOKENS, *_PROMPT_ALONE)}


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

    @property
    def places(self) -> int:
        """A bit for each layer's rewrite, or format, that it is."""
        return sum(1 << (2 * layer + self.rewrite.format) for layer in self.layers)

    def excludes(self, other: Part) -> bool:
        """True if a layer would have two rewrites, or two formats, with both."""
        return bool(self.places & other.places)


@dataclass(frozen=True)
class Mix:
    """Parts, none of which excludes another; they are sorted. What none is in is standard and exact.

    `base` is the exact recipe around them: tensor-parallel, or one that shards tokens.
    """

    parts: tuple[Part, ...] = ()
    base: str = STANDARD

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts)))

    @property
    def key(self) -> str:
        """A name by which it is found again."""
        return " ".join([self.base, *(f"{part.name}@{part.start}" for part in self.parts)])

    @property
    def touched(self) -> list[int]:
        """The layers that are not as they were, ascending."""
        return sorted({layer for part in self.parts for layer in part.layers})

    @property
    def layers(self) -> dict[str, list[int]]:
        """The layers of each rewrite that it has, ascending, by name."""
        of = {name: [layer for p in self.parts if p.name == name for layer in p.layers] for name in REWRITES}
        return {name: layers for name, layers in of.items() if layers}


def recipe_of(mix: Mix, name: str = "searched", summary: str = "A mix that was found by a search.") -> Recipe:
    """The recipe of a mix. Passes that merge reductions come first, formats of messages last."""
    passes: dict[str, list[dict[str, Any]]] = {"merge": [], "rewire": [], "format": []}
    for rewrite, layers in ((REWRITES[name], layers) for name, layers in mix.layers.items()):
        runs = list(runs_of(layers))
        chosen: Any = f"{layers[0]}-{layers[-1]}" if len(runs) == 1 < len(layers) else layers
        rewires = "merge" if rewrite.options["pass"] == "parallel_block" else "rewire"
        passes["format" if rewrite.format else rewires].append({**rewrite.options, "layers": chosen})
    around = () if mix.base == STANDARD else Recipe.load(mix.base).passes
    listed = [
        {"pass": "tensor_parallel"},
        *passes["merge"],
        {"pass": "merge_reductions", "optional": True},
        *passes["rewire"],
        *(p.to_dict() for p in around if available()[p.pass_name].shards_tokens),
        *passes["format"],
        {"pass": "fuse_projections", "optional": True},
        {"pass": "overlap", "optional": True},
    ]
    return Recipe.model_validate({"name": name, "summary": summary, "paper": PAPER, "passes": listed})
