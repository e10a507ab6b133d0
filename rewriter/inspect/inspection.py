"""What `rewrite inspect` shows: blocks, collectives and memory of a model, before and after a recipe, from its config.

The inspection is plain data; the tables (`rewriter.inspect.tables`) are made from it, so that JSON and terminal tell
the same. Torch and transformers are imported on the first call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused

if TYPE_CHECKING:
    from rich.console import Group

    from rewriter.analysis.communication import Collective
    from rewriter.analysis.residual import Block
    from rewriter.ir import Program
    from rewriter.recipes import Recipe


@dataclass(frozen=True)
class Inspection:
    """What was found, as JSON values: `data["blocks"]`, `["communication"]`, `["sequence"]`, `["memory"]`, `["rules"]`
    and the header.

    Printing it with rich gives tables.
    """

    data: Mapping[str, Any]

    def to_json(self) -> str:
        """The inspection as JSON."""
        return json.dumps(self.data, indent=2, ensure_ascii=False)

    def __rich__(self) -> Group:
        from rewriter.inspect.tables import tables

        return tables(self.data)


def inspect(
    model: Any,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    tp: int = 1,
    trust_remote_code: bool = False,
    sp: int = 1,
    tokens: int | None = None,
) -> Inspection:
    """What `model` reads, writes, communicates and holds on `tp` ranks, and what `recipe` changes. Reads no weights.

    With `sp` ranks that share the tokens of a sequence, the plans for its attention, ranked for sequences of `tokens`,
    which is also what a recipe's sequence_parallel then plans for, unless it names a length itself.
    `model` is a directory, a bare config.json, a hub id or a config object. A recipe that cannot be applied because the
    model has no residual stream is reported with the reason. Raises RewriterError for what a user can cause otherwise:
    no such model or recipe, a `tp` that does not divide the heads, a recipe whose passes do not fit the model.
    """
    with collector_paused():
        return _inspect(model, recipe, tp, trust_remote_code, sp, tokens)


def _inspect(
    model: Any,
    recipe: str | os.PathLike[str] | Recipe | None,
    tp: int,
    trust_remote_code: bool,
    sp: int,
    tokens: int | None,
) -> Inspection:
    from rewriter.inspect.rules import standard_layers, unfired, without_measurements
    from rewriter.inspect.sequence_table import sequence, with_length
    from rewriter.recipes.apply import apply_recipe, load_recipe
    from rewriter.tracing import trace_skeleton
    from rewriter.tracing.meta_model import build_skeleton, load_config

    for option, ranks in (("--tp", tp), ("--sp", sp)):
        if ranks < 1:
            raise RewriterError(f"{option} {ranks}: expected 1 or more ranks")
    loaded = with_length(load_recipe(recipe), tokens) if recipe is not None else None
    config = load_config(model, trust_remote_code)
    original = trace_skeleton(build_skeleton(config, trust_remote_code), remote_code=trust_remote_code)
    standard = _standard(original, tp)
    rules: list[dict[str, str]] = []
    no_stream = _why_no_stream(original)
    after = standard
    applied = loaded is not None
    if loaded is not None:
        try:
            loaded, supposed = without_measurements(loaded, standard)
            after, skipped = apply_recipe(original, loaded, tp, sp=sp)
            rules += supposed
            rules += [{"rule": name, "reason": reason} for name, reason in skipped]
        except RewriterError as error:
            if no_stream is None:
                raise
            applied = False
            rules.append({"rule": loaded.name, "reason": f"not applied. {error}"})
    elif no_stream is not None:
        rules.append({"rule": "residual stream", "reason": no_stream})
    rules += unfired(after)
    rules += standard_layers(after) if applied else []
    data = {
        "model": _header(original, model),
        "mesh": dict(after.mesh),
        "tokens": tokens,
        "recipe": loaded.name if loaded is not None else None,
        "passes": [
            {
                "name": r.name,
                "kind": r.kind,
                "options": json.loads(json.dumps(r.options, default=list)),
                "summary": r.summary,
            }
            for r in after.history
        ],
        "blocks": _blocks(after),
        "communication": _communication(standard, after if applied else None),
        "sequence": sequence(after, sp, tokens),
        "memory": _memory(after),
        "rules": rules,
    }
    return Inspection(data)


def _standard(program: Program, tp: int) -> Program:
    """Plain tensor parallelism, what a recipe is compared with; the traced program itself on one rank."""
    from rewriter.passes.tensor_parallel import TensorParallel

    return TensorParallel().apply(program.with_(mesh={"tp": tp}, origin=program)) if tp > 1 else program


def _why_no_stream(program: Program) -> str | None:
    from rewriter.analysis.residual import annotate, stream_values

    if stream_values(program.graph):
        return None
    try:
        annotate(program.edit()[0], program.source.num_layers)
    except RewriterError as error:
        return str(error)
    return None


def _header(program: Program, model: Any) -> dict[str, Any]:
    import math

    source = program.source
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else source.model_type
    return {
        "name": name,
        "type": source.model_type,
        "architecture": source.architecture,
        "layers": source.num_layers,
        "parameters": sum(math.prod(p.shape) for p in program.parameters.values()),
        "dtype": str(source.config.get("dtype") or "float32").removeprefix("torch."),
    }


# --- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(program: Program) -> list[dict[str, Any]]:
    """One row per residual block, in order of the stream."""
    from rewriter.analysis.communication import collectives
    from rewriter.analysis.per_rank import local_values
    from rewriter.analysis.residual import residual_blocks, stream_values
    from rewriter.ir.marks import marks

    blocks = residual_blocks(program)
    local = local_values(program.graph, program.parameters)
    own = {i for i, value in enumerate(stream_values(program.graph)) if value in local}
    found: dict[int | None, list[Collective]] = {}
    for collective in collectives(program):
        found.setdefault(collective.block, []).append(collective)
    split = _split_modules(program)
    return [
        {
            "block": block.index,
            "layer": block.layer,
            "kind": block.kind,
            "path": block.path,
            "mode": block.mode.name,
            "reads": _reads(block, blocks, own),
            "stale": bool(program.origin) and block.reads != (block.index,),
            "writes": f"x after {_name(block)}",
            "reductions": [
                {"place": c.place, "bytes_per_token": c.bytes_per_token, "hidden": c.hidden}
                for c in found.get(block.index, [])
            ],
            "dropped": any(marks(n).dropped for n in block.branch),
            "on_ranks": "one device" if not program.mesh else _on_ranks(program, block, split),
        }
        for block in blocks
    ]


def _name(block: Block) -> str:
    return f"{block.kind} {block.layer}"


def _reads(block: Block, blocks: Sequence[Block], own: Collection[int]) -> str:
    """What a block reads, in words: the stream, whose, and which blocks' writes it does not see yet."""
    parts = []
    for value in block.reads:
        base = f"x after {_name(blocks[value - 1])}" if value else "the embedding"
        missed = ", ".join(_name(b) for b in blocks[value : block.index])
        if missed and block.mode.reads == "earlier_and_own":
            missed = f" (stale: misses {missed}, but for this rank's part)"
        elif missed:
            missed = f" (stale: misses {missed})"
        whose = "this rank's own " if value in own else ""
        parts.append(f"{whose}{base}{missed}")
    return " and ".join(parts) or "nothing of the stream"


def _split_modules(program: Program) -> set[str]:
    """Paths of the modules that hold a split parameter, each with all paths above."""
    paths: set[str] = set()
    for name, parameter in program.parameters.items():
        if parameter.ranges is not None:
            while "." in name:
                name = name.rpartition(".")[0]
                paths.add(name)
    return paths


def _on_ranks(program: Program, block: Block, split: set[str]) -> str:
    from rewriter.analysis.residual import computes

    working = [
        str(n.target) for n in block.branch if n.op == "call_module" and computes(program.modules[str(n.target)])
    ]
    parts = [path in split for path in working]
    return "split" if all(parts) and parts else "split in part" if any(parts) else "replicated"


# --- communication and memory ----------------------------------------------------------------------------------------


def _communication(standard: Program, after: Program | None) -> dict[str, Any]:
    return {
        "convention": "bytes per token: the reduced tensor once per all-reduce (codes and scales where quantized), the "
        "gathered tensor per all-gather",
        "before": _traffic(standard),
        "after": _traffic(after) if after is not None else None,
    }


def _traffic(program: Program) -> dict[str, Any]:
    from rewriter.analysis.communication import by_layer, by_place, collectives, quantized, summary

    found = collectives(program)
    travel = quantized(found)
    return {
        "quantized": None if travel is None else asdict(travel),
        "total": asdict(summary(found)),
        "places": {place: asdict(traffic) for place, traffic in by_place(found).items()},
        "layers": [{"layer": layer, **asdict(traffic)} for layer, traffic in by_layer(found).items()],
    }


def _memory(program: Program) -> dict[str, int]:
    from rewriter.analysis.rank_memory import memory

    return asdict(memory(program))
