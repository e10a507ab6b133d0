"""Rewrites of layers, and mixes of them. A mix is a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewriter.passes import available
from rewriter.passes.selection import runs_of
from rewriter.recipes import Recipe


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of `layers` neighbouring layers. `name`: as reports call it; `does`: what a layer becomes; `passed`:
    its pass with its options, to which the layers are added. `bound`: ranks keep residuals of their own, so there have
    to be several ranks. `early`: its pass merges reductions, so that it comes before others. `prompt`: it rewires
    tokens of the prompt alone."""

    name: str
    layers: int
    does: str
    passed: Mapping[str, Any]
    bound: bool = False
    early: bool = False
    prompt: bool = False

    @property
    def of_prompt(self) -> Rewrite:
        """The same rewrite for tokens of the prompt alone."""
        passed, does = {**self.passed, "phase": "prompt"}, f"for the prompt alone: {self.does}"
        return replace(self, name=PROMPT + self.name, does=does, passed=passed, prompt=True)


PROMPT = "prompt-"  # begins names of rewrites and formats for tokens of the prompt alone


def _desync(**options: Any) -> dict[str, Any]:
    return {"pass": "desync", **options, "resync": "sum"}


_DROP, _KEEP = ["keep", "drop"], ["keep", "keep"]
_OWN = {"pass": "ladder", "variant": "own_partial"}
_EVERY_TOKEN = (
    Rewrite("ladder", 1, "reads the stream one block late", {"pass": "ladder"}),
    Rewrite("own-partial", 1, "ladder, with the rank's own part of the late sum", _OWN, True),
    Rewrite("drop", 1, "attention's reduction waits for the MLP's", {"pass": "drop_sync"}, True),
    Rewrite(
        "drop-mlp", 2, "the MLP's reduction waits for the next layer's attention", _desync(pattern=[_DROP, _KEEP]), True
    ),
    Rewrite("drop-mlps", 4, "the same, three layers in a row", _desync(pattern=[_DROP] * 3 + [_KEEP]), True),
    Rewrite("desync-4x", 2, "one reduction for two layers", _desync(n=4), True),
    Rewrite("desync-8x", 4, "one reduction for four layers", _desync(n=8), True),
    Rewrite(
        "parallel", 1, "attention and MLP side by side, with one norm",
        {"pass": "parallel_block", "norm": "attention"}, early=True,
    ),
    Rewrite(
        "parallel-own", 1, "attention and MLP side by side, each with its norm",
        {"pass": "parallel_block", "norm": "own"}, early=True,
    ),
)  # fmt: skip
REWRITES = (*_EVERY_TOKEN, *(one.of_prompt for one in _EVERY_TOKEN))
_FORMATS = {"int8": "messages in 8 bits", "int4-hadamard": "messages in 4 bits, rotated"}
FORMATS = {**_FORMATS, **{PROMPT + name: f"for the prompt alone: {does}" for name, does in _FORMATS.items()}}
DOES = {**{rewrite.name: rewrite.does for rewrite in REWRITES}, **FORMATS}
"""Description of a layer, by name of a rewrite or of a format of its messages."""

BY_NAME = {rewrite.name: rewrite for rewrite in REWRITES}


def of_prompt(name: str) -> bool:
    """True for the name of a rewrite or format for tokens of the prompt alone."""
    return name.startswith(PROMPT)


@dataclass(frozen=True, order=True)
class PlacedRewrite:
    """A rewrite from layer `start` on."""

    start: int
    rewrite: str

    @property
    def layers(self) -> range:
        return range(self.start, self.start + BY_NAME[self.rewrite].layers)

    def __str__(self) -> str:
        return f"{self.rewrite}@{self.start}"


@dataclass(frozen=True)
class Mix:
    """The choice for every layer: placements, and formats of messages by layer. Others are standard and exact.

    `base` is the exact recipe around them: tensor-parallel, or one that shards tokens.
    """

    placements: tuple[PlacedRewrite, ...] = ()
    formats: tuple[tuple[int, str], ...] = ()
    base: str = "tensor-parallel"

    @property
    def key(self) -> str:
        """A name by which it is found again."""
        return " ".join([self.base, *map(str, self.placements), *(f"{name}@{layer}" for layer, name in self.formats)])

    @property
    def bound(self) -> bool:
        return any(BY_NAME[p.rewrite].bound for p in self.placements)

    @property
    def phased(self) -> bool:
        """True if a part of it rewires tokens of the prompt alone."""
        return any(of_prompt(p.rewrite) for p in self.placements) or any(of_prompt(name) for _, name in self.formats)

    @property
    def touched(self) -> tuple[int, ...]:
        """The layers that are not as they were, ascending."""
        return tuple(
            sorted({layer for p in self.placements for layer in p.layers} | {layer for layer, _ in self.formats})
        )

    @property
    def parts(self) -> list[Mix]:
        """Mixes of one placement or one format of a layer, which together are this one."""
        formats = [Mix(formats=(layer,)) for layer in self.formats]
        return [*(Mix((placement,)) for placement in self.placements), *formats]

    def counts(self) -> dict[str, int]:
        """Number of layers of each rewrite, by name."""
        counts: Counter[str] = Counter()
        for p in self.placements:
            counts[p.rewrite] += len(p.layers)
        counts.update(name for _, name in self.formats)
        return dict(counts)


def mix_of(placements: Sequence[PlacedRewrite], formats: Mapping[int, str] | None = None, base: str = Mix.base) -> Mix:
    """A mix with its parts in order, so that equal mixes have equal keys."""
    return Mix(tuple(sorted(placements)), tuple(sorted((formats or {}).items())), base)


def recipe_of(mix: Mix, name: str = "searched", summary: str = "A mix that was found by a search.") -> Recipe:
    """The recipe of a mix."""
    passes: list[dict[str, Any]] = [{"pass": "tensor_parallel"}]
    rewired: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for rewrite in REWRITES:
        if layers := [layer for p in mix.placements if p.rewrite == rewrite.name for layer in p.layers]:
            rewired[rewrite.early].append({**rewrite.passed, "layers": _selection(layers)})
    passes += [*rewired[True], {"pass": "merge_reductions", "optional": True}, *rewired[False]]
    if mix.base != Mix.base:
        known = available()
        passes += [p.to_dict() for p in Recipe.load(mix.base).passes if known[p.pass_name].shards_tokens]
    for format in FORMATS:
        if chosen := [layer for layer, known in mix.formats if known == format]:
            phase = {"phase": "prompt"} if of_prompt(format) else {}
            passes.append(
                {"pass": "quantize_collectives", "format": format.removeprefix(PROMPT), "layers": _selection(chosen)}
                | phase
            )
    passes.append({"pass": "fuse_projections", "optional": True})
    passes.append({"pass": "overlap", "optional": True})
    return Recipe.model_validate({"name": name, "summary": summary, "paper": PAPER, "passes": passes})


PAPER = "searched by `rewrite search`; its passes are described in docs/concepts/rewrites.md"


def _selection(layers: Sequence[int]) -> Any:
    runs = list(runs_of(sorted(layers)))
    if len(runs) == 1 and len(runs[0]) > 1:
        return f"{runs[0][0]}-{runs[0][-1]}"
    return list(layers)
