"""The wiring of a rewritten model as entries of config.json, so that an engine knows it without the generated code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from rewriter.ir import Program, args_of
from rewriter.ir.carrying import stream_count
from rewriter.ir.layer_plan import layer_plans
from rewriter.ir.marks import Mode, marks
from rewriter.ir.op_semantics import function_of, kind_of, starts_sum
from rewriter.ir.phases import prompt_phase
from rewriter.ir.residual import Block, by_layer, is_add, is_scaling, read_index, residual_blocks, weighted_modules
from rewriter.passes.phases import without_prompt_passes


@dataclass(frozen=True)
class BlockMode:
    """One block of the source's layer: the name of its main module in the layer, and its mode in the rewritten one."""

    name: str
    mode: Mode


def wiring_config(program: Program, bound: bool) -> dict[str, Any]:
    """The entries of config.json on a program that one device computes.

    rewriter_delays: per layer and block of the source, how many blocks late it reads the residual stream.
    rewriter_norms: per layer, blocks that read it through another block's norm, with that one's name; only where some
    do. rewriter_pattern: per layer, the mode of each block by its name; rewriter_modes: the meaning of each mode. These
    two only where delays and norms do not say all. Where passes rewire the prompt alone, these describe rewired tokens,
    and rewriter_phase says how many at a prompt's ends are exact: exact_tail and exact_head. Where other passes rewire
    exact tokens too, rewriter_exact has the same entries of theirs. rewriter_streams: of how many vectors of the hidden
    size the residual stream is, where not of one.
    """
    config: dict[str, Any] = {"rewriter_delays": _delays(program)}
    if (streams := stream_count(program)) > 1:
        config["rewriter_streams"] = streams
    if any(norms := _shared_norms(program)):
        config["rewriter_norms"] = norms
    meanings = mode_meanings(program)
    if bound or any("factor" in m or "altered" in m for m in meanings.values()):
        config |= {"rewriter_pattern": pattern_table(program), "rewriter_modes": meanings}
    if (phase := prompt_phase(program)) is not None:
        config["rewriter_phase"] = asdict(phase)
        exact = wiring_config(without_prompt_passes(program), bound)
        own_modes = not any(exact.get("rewriter_modes", {}).values()) and "rewriter_norms" not in exact
        if not own_modes or any(map(any, exact["rewriter_delays"])):
            config["rewriter_exact"] = exact
    return config


def quantized_config(program: Program, config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of config.json on a sharded program whose sums travel quantized, beside those of `config`.

    rewriter_quantized: per format and min_bytes, the layers whose sums do, where not all do. Where the recipe keeps the
    model's wiring, rewriter_delays say so, and rewriter_phase says which tokens' sums do, where not all tokens' do.
    Empty where nothing is quantized, and where the wiring is of all tokens and quantization of the prompt alone: layers
    of an engine tell tokens apart by one phase.
    """
    layers: dict[tuple[str, int], set[int]] = {}
    for node in program.graph.nodes:
        if starts_sum(node) and node.kwargs and (layer := marks(node).layer) is not None:
            layers.setdefault((node.kwargs["format"], node.kwargs["min_bytes"]), set()).add(layer)
    phase, rewired = prompt_phase(program), "rewriter_delays" in config
    if not layers or (phase is not None and rewired and "rewriter_phase" not in config):
        return {}
    every = set(range(program.source.num_layers))
    entries = [
        {"format": format, "min_bytes": least} | ({} if of == every else {"layers": sorted(of)})
        for (format, least), of in layers.items()
    ]
    own = {} if rewired else {"rewriter_delays": _delays(program)}
    return own | {"rewriter_quantized": entries} | ({} if phase is None else {"rewriter_phase": asdict(phase)})


def layer_modes(program: Program) -> list[tuple[BlockMode, ...]]:
    """The modes of the blocks of every layer of the source."""
    layers: list[tuple[BlockMode, ...]] = [()] * program.source.num_layers
    rewritten = {plan.layer: plan.blocks for plan in layer_plans(program)}
    for plan in layer_plans(program.origin or program):
        now = rewritten[plan.layer]  # a parallel layer has one block for what were two
        layers[plan.layer] = tuple(
            BlockMode(
                block.path.rpartition(".")[2] if block.kind != "parallel" else "layer",
                now[min(place, len(now) - 1)].mode,
            )
            for place, block in enumerate(plan.blocks)
        )
    return layers


def pattern_table(program: Program) -> list[dict[str, str]]:
    """Per layer, block by block: for config.json and the manifest."""
    return [{block.name: block.mode.label for block in blocks} for blocks in layer_modes(program)]


def sentences(program: Program) -> dict[str, str]:
    """The sentence of each entry of the pattern, for the manifest and the card."""
    return {b.mode.label: b.mode.sentence for blocks in layer_modes(program) for b in blocks}


def mode_meanings(program: Program) -> dict[str, dict[str, Any]]:
    """By label of the modes in the pattern, what an engine has to do that differs from a standard block.

    "sum": what becomes of the block's sum (`Mode.sum`). "own_part": the block reads its rank's own part of a sum that
    is late. "factor": what the block adds is multiplied by it. "altered": the block computes in yet another way, which
    only the generated code knows.
    """
    meanings: dict[str, dict[str, Any]] = {b.mode.label: {} for blocks in layer_modes(program) for b in blocks}
    original = program.origin or program
    before = {path: b for b in residual_blocks(original) for path in weighted_modules(b, original.modules)}
    for block in residual_blocks(program):
        meaning = meanings.setdefault(block.mode.label, {})
        if block.mode.sum != "all_reduce":
            meaning["sum"] = block.mode.sum
        elif block.mode.reads == "earlier_and_own":
            meaning["own_part"] = True
        elif not block.mode.own_residual:
            paths = weighted_modules(block, program.modules)
            sources = list(dict.fromkeys(before[path] for path in paths if path in before))
            factor = _ratio(block.writes, [write for source in sources for write in source.writes])
            known = meaning.setdefault("factor", factor)
            same = _operators([block], program) == _operators(sources, original)
            if factor is None or factor != known or not same:
                meaning["altered"] = True
    for meaning in meanings.values():
        if meaning.get("factor") == 1.0:
            del meaning["factor"]
    return meanings


def _ratio(writes: Sequence[fx.Node], before: Sequence[fx.Node]) -> float | None:
    """The number that writes are multiplied by, compared with those before; None where it is not one number."""
    now, then = sorted(map(_factor, writes)), sorted(map(_factor, before))
    if now == then:
        return 1.0
    return now[0] / then[0] if len({*now}) == len({*then}) == 1 else None


def _factor(write: fx.Node) -> float:
    """The product of the numbers that a write is multiplied by."""
    factor = 1.0
    while is_scaling(write):
        number = next(float(a) for a in args_of(write) if not isinstance(a, fx.Node))
        factor = factor * number if function_of(write) == "mul" else factor / number
        write = write.all_input_nodes[0]
    return factor


def _operators(blocks: list[Block], program: Program) -> Counter[str]:
    """Operators of blocks, apart from norms, sums, factors and collectives."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(weighted_modules(block, program.modules))
        for node in block.branch:
            plain = is_add(node) or is_scaling(node) or kind_of(node) == "collective"
            if node.op == "call_function" and not plain:
                counts[str(node.target)] += 1
    return counts


def _delays(program: Program) -> list[list[int]]:
    blocks = residual_blocks(program)
    original = {layer: len(members) for layer, members in by_layer(residual_blocks(program.origin or program)).items()}
    of_layer = by_layer(blocks)
    # a parallel layer has one block for what were two
    widths = [original[b.layer] // len(of_layer[b.layer]) for b in blocks]
    before = [0, *accumulate(widths)]  # original blocks before each value of the stream
    table: list[list[int]] = [[] for _ in range(program.source.num_layers)]
    for block, width in zip(blocks, widths, strict=True):
        late = before[block.index] - before[min(block.reads)]
        table[block.layer] += [late + place for place in range(width)]
    return table


def _shared_norms(program: Program) -> list[dict[str, str]]:
    original = program.origin or program
    own, now = _entry_norms(original), _entry_norms(program)
    table: list[dict[str, str]] = [{} for _ in range(program.source.num_layers)]
    for block in residual_blocks(original):
        if block.path in own and now.get(block.path, own[block.path]) != own[block.path]:
            table[block.layer][block.path.rpartition(".")[2]] = now[block.path].rpartition(".")[2]
    return table


def _entry_norms(program: Program) -> dict[str, str]:
    """The path of each block's main module, with that of the child through which it reads the stream."""
    norms = {}
    for node in program.graph.nodes:
        children = [s for s in node.all_input_nodes if s.op == "call_module"]
        entries = [s for s in children if any(read_index(source) is not None for source in s.all_input_nodes)]
        if node.op == "call_module" and len(entries) == 1:
            norms[str(node.target)] = str(entries[0].target)
    return norms
