"""How the blocks of each layer are wired to the residual stream: what they read, where they write, what is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from rewriter.analysis.communication import collectives, local_values
from rewriter.analysis.residual import by_layer, residual_blocks, stream_values
from rewriter.ir import Program
from rewriter.ir.marks import marks

Reduction = Literal["none", "exposed", "hidden", "dropped"]


@dataclass(frozen=True)
class WiredBlock:
    """One block. `late` are how many blocks before its own place the stream values stand that it reads (0: the newest).

    `own` says that ranks hold different values of the stream after it, `own_partial` that it also reads what its rank
    has added since. `reduction` is what becomes of its partial sums, on one device "none". `mode` is its label.
    """

    name: str
    kind: str
    mode: str
    late: tuple[int, ...]
    reduction: Reduction
    own: bool = False
    own_partial: bool = False


@dataclass(frozen=True)
class WiredLayers:
    """Consecutive layers, `first` to `last`, that are wired alike; what each communicates per token."""

    first: int
    last: int
    blocks: tuple[WiredBlock, ...]
    collectives: int
    hidden: int
    bytes_per_token: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def label(self) -> str:
        """ "layer 3", "layers 1–4"."""
        return f"layer {self.first}" if self.count == 1 else f"layers {self.first}–{self.last}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def wired_layers(program: Program) -> list[WiredLayers]:
    """Every layer, alike neighbours together; empty for a model without a residual stream."""
    layers = each_layer(program)
    found: list[WiredLayers] = []
    for _, run in groupby(layers, key=lambda w: (w.blocks, w.collectives, w.hidden, w.bytes_per_token)):
        alike = list(run)
        found.append(
            WiredLayers(alike[0].first, alike[-1].last, alike[0].blocks, *_traffic(alike[0]))
        )  # fmt: skip
    return found


def each_layer(program: Program) -> list[WiredLayers]:
    """The layers one by one."""
    blocks = residual_blocks(program)
    stream = stream_values(program.graph)
    local = local_values(program.graph, program.parameters) if program.mesh else set()
    sent = collectives(program)
    found = []
    for layer, inside in sorted(by_layer(blocks).items()):
        wired = []
        for block in inside:
            mine = [c for c in sent if c.block == block.index and c.place == "block"]
            dropped = any(marks(n).dropped for n in block.branch)
            reduction: Reduction = "dropped" if dropped else "none"
            if mine:
                reduction = "hidden" if all(c.hidden for c in mine) else "exposed"
            name = block.path.rpartition(".")[2] if block.kind != "parallel" else "attention + mlp"
            late = tuple(sorted({block.index - read for read in block.reads}))
            wired.append(
                WiredBlock(name, block.kind, block.mode.label, late, reduction, stream[block.index + 1] in local,
                           block.mode.reads == "earlier_and_own")
            )  # fmt: skip
        own = [c for c in sent if c.layer == layer]
        hidden = sum(c.hidden for c in own)
        found.append(WiredLayers(layer, layer, tuple(wired), len(own), hidden, sum(c.bytes_per_token for c in own)))
    return found


def _traffic(layers: WiredLayers) -> tuple[int, int, int]:
    return layers.collectives, layers.hidden, layers.bytes_per_token


def reads_in_words(blocks: Sequence[WiredBlock]) -> str:
    """What the blocks of a layer read: "newest", "1 late", for each block."""
    words = []
    for block in blocks:
        late = max(block.late, default=0)
        read = "newest" if late == 0 else f"{late} late"
        words.append(f"{block.name}: {read}" + (" + own part" if block.own_partial else ""))
    return ", ".join(words)
