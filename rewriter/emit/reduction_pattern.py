"""What became of every reduction of a model: which blocks keep it, drop it, or read it late."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rewriter import ops
from rewriter.analysis.per_rank import local_values
from rewriter.analysis.residual import Block, residual_blocks, stream_values
from rewriter.ir import Program
from rewriter.ir.marks import marks

_SENTENCES = {
    "standard": "`{name}` is reduced and added as in the source.",
    "ladder": "`{name}` reads the residual stream as it was one block before.",
    "own_partial": (
        "`{name}` reads the residual stream as it was one block before, and of the block between what the lane itself "
        "computed."
    ),
    "parallel": "`{name}` reads what the block beside it reads.",
    "drop": "`{name}` is not reduced: each lane adds what it computed to a residual of its own.",
    "whole": "`{name}` could not be split: each lane adds all of it to its own residual.",
    "keep_mean": "`{name}` is reduced, and the lanes go on from the mean of their residuals.",
    "keep_sum": "`{name}` is reduced, together with all that the lanes added since they last agreed.",
    "keep": "`{name}` is reduced and added as in the source.",
}


@dataclass(frozen=True)
class BlockMode:
    """One block of a layer: the name of its main module in the layer, and what became of its reduction."""

    name: str
    mode: str

    @property
    def word(self) -> str:
        return self.mode.partition("_")[0] if self.mode.startswith("keep") else self.mode


def described(block: BlockMode) -> str:
    """A sentence for the generated file."""
    return _SENTENCES[block.mode].format(name=block.name)


def layer_modes(program: Program) -> list[tuple[BlockMode, ...]]:
    """The modes of the blocks of every layer."""
    local = local_values(program.graph, program.parameters)
    stream = stream_values(program.graph)
    layers: list[list[BlockMode]] = [[] for _ in range(program.source.num_layers)]
    rewritten = _by_layer(program)
    for layer, blocks in _by_layer(program.origin or program).items():
        # a parallel layer has one block for what were two
        for place, block in enumerate(blocks):
            index = rewritten[layer][min(place, len(rewritten[layer]) - 1)].index
            mode: str = marks(stream[index + 1]).mode or "standard"
            if mode == "desync":
                mode = _desynced(stream[index], stream[index + 1], local)
            name = block.path.rpartition(".")[2] if block.kind != "parallel" else "layer"
            layers[layer].append(BlockMode(name, mode))
    return [tuple(blocks) for blocks in layers]


def _by_layer(program: Program) -> dict[int, list[Block]]:
    layers: dict[int, list[Block]] = {}
    for block in residual_blocks(program):
        layers.setdefault(block.layer, []).append(block)
    return layers


def _desynced(before: fx.Node, value: fx.Node, local: set[fx.Node]) -> str:
    if value in local:
        return "drop"
    if before not in local:
        return "keep"
    return "keep_mean" if value.target is ops.all_reduce else "keep_sum"


def pattern_table(program: Program) -> list[dict[str, str]]:
    """Per layer, block by block: for config.json and the manifest."""
    return [{block.name: block.mode for block in blocks} for blocks in layer_modes(program)]
