"""What became of every reduction of a model: which blocks keep it, drop it, or read it late."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rewriter.ir import Program
from rewriter.ir.marks import Mode
from rewriter.ir.residual import by_layer, read_index, residual_blocks


@dataclass(frozen=True)
class BlockMode:
    """One block of a layer: the name of its main module in the layer, and how it is wired."""

    name: str
    mode: Mode


def layer_modes(program: Program) -> list[tuple[BlockMode, ...]]:
    """The modes of the blocks of every layer."""
    layers: list[list[BlockMode]] = [[] for _ in range(program.source.num_layers)]
    rewritten = by_layer(residual_blocks(program))
    for layer, blocks in by_layer(residual_blocks(program.origin or program)).items():
        # a parallel layer has one block for what were two
        for place, block in enumerate(blocks):
            mode = rewritten[layer][min(place, len(rewritten[layer]) - 1)].mode
            name = block.path.rpartition(".")[2] if block.kind != "parallel" else "layer"
            layers[layer].append(BlockMode(name, mode))
    return [tuple(blocks) for blocks in layers]


def pattern_table(program: Program) -> list[dict[str, str]]:
    """Per layer, block by block: for config.json and the manifest."""
    return [{block.name: block.mode.label for block in blocks} for blocks in layer_modes(program)]


def sentences(program: Program) -> dict[str, str]:
    """What each entry of the pattern means, for the manifest and the card."""
    return {b.mode.label: b.mode.sentence for blocks in layer_modes(program) for b in blocks}


def delays(program: Program) -> list[list[int]]:
    """Per layer and block of the original: how many blocks late it reads the residual stream. For config.json, so that
    an engine knows the wiring without the generated code."""
    blocks = residual_blocks(program)
    original = {layer: len(found) for layer, found in by_layer(residual_blocks(program.origin or program)).items()}
    of_layer = by_layer(blocks)
    # a parallel layer has one block for what were two
    widths = [original[b.layer] // len(of_layer[b.layer]) for b in blocks]
    before = [0, *accumulate(widths)]  # original blocks before each value of the stream
    table: list[list[int]] = [[] for _ in range(program.source.num_layers)]
    for block, width in zip(blocks, widths, strict=True):
        late = before[block.index] - before[min(block.reads)]
        table[block.layer] += [late + place for place in range(width)]
    return table


def shared_norms(program: Program) -> list[dict[str, str]]:
    """Per layer: blocks that read the stream through a norm of another block, each with the norm's name."""
    original = program.origin or program
    own, now = _entry_norms(original), _entry_norms(program)
    table: list[dict[str, str]] = [{} for _ in range(program.source.num_layers)]
    for block in residual_blocks(original):
        if block.path in own and now.get(block.path, own[block.path]) != own[block.path]:
            table[block.layer][block.path.rpartition(".")[2]] = now[block.path].rpartition(".")[2]
    return table


def _entry_norms(program: Program) -> dict[str, str]:
    """The path of each block's main module, with that of the child through which it reads the stream."""
    found = {}
    for node in program.graph.nodes:
        children = [s for s in node.all_input_nodes if s.op == "call_module"]
        entries = [s for s in children if any(read_index(source) is not None for source in s.all_input_nodes)]
        if node.op == "call_module" and len(entries) == 1:
            found[str(node.target)] = str(entries[0].target)
    return found
