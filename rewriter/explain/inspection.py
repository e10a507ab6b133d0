"""`rewrite inspect`: blocks, collectives and memory of a model, before and after a recipe, from its config.

The inspection is plain data; the tables (`inspection_tables`) are made from it, so that JSON and terminal agree.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Group
from torch import nn

from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.common.numbers import json_text
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import declared_dtype
from rewriter.explain.inspection_tables import tables
from rewriter.explain.padding import padding, tensor_parallel
from rewriter.explain.plan_table import plan_data, plan_text
from rewriter.ir import Program
from rewriter.ir.carrying import stream_count
from rewriter.ir.communication import by_layer, by_place, collectives, quantized, summary
from rewriter.ir.layer_plan import BlockPlan, layer_plans
from rewriter.ir.ops import SequencePlan
from rewriter.ir.phases import prompt_phase
from rewriter.ir.sequence_plan import KINDS
from rewriter.ir.stream import why_no_stream
from rewriter.passes.phases import exact_wiring
from rewriter.passes.placement.rank_memory import memory
from rewriter.passes.sequence.distributed_attention import ALGORITHMS, AttentionShape
from rewriter.passes.sequence.sequence_costs import lower_bound
from rewriter.passes.sequence.sequence_plans import MARGIN, PlanCost, attention_shapes, planning, plans, sequence_plan
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.recipes.unfired import Rule, rule, skipped_rules, standard_layers, unfired, without_measurements
from rewriter.tracing import trace, trace_skeleton
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.weights.checkpoint import has_weights


@dataclass(frozen=True)
class Inspection:
    """Blocks, communication, sequence, memory, rules and header of a model, as JSON values by these names.

    Printing it with rich gives tables.
    """

    data: Mapping[str, Any]
    program: Program = field(repr=False)

    @property
    def plan(self) -> str:
        """The plan of every layer as text: reads, sums, what crosses to the next layer, how ranks hold each tensor."""
        return plan_text(self.program)

    def to_json(self) -> str:
        return json_text(self.data, indent=2)

    def __rich__(self) -> Group:
        return tables(self.data)


@collector_paused()
def inspect(
    model: Any,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    tp: int = 1,
    sp: int = 1,
    tokens: int | None = None,
    context: RunContext = RunContext(),
    set: Mapping[str, Any] | None = None,
) -> Inspection:
    """Reads, writes, communication and memory of `model` on `tp` ranks, and what `recipe` changes. Reads no weights.

    With `sp` ranks that share the tokens of a sequence, the plans for its attention, ranked for sequences of `tokens`,
    which is also what a recipe's sequence_parallel then plans for, unless it names a length itself.
    `model` is a directory, a bare config.json, a hub id or a config object. `set` overrides options of a recipe. One
    that cannot be applied because the model has no residual stream is reported with the reason. Raises RewriterError
    for what a user can cause otherwise: no such model or recipe, a `tp` that does not divide the heads, a recipe whose
    passes do not fit the model.
    """
    for option, ranks in (("--tp", tp), ("--sp", sp)):
        if ranks < 1:
            raise RewriterError(f"{option} {ranks}: expected 1 or more ranks")
    loaded = with_length(load_recipe(recipe, set), tokens) if recipe is not None else None
    trust_remote_code = context.trust_remote_code
    config = load_config(model, trust_remote_code)
    skeleton = build_skeleton(config, trust_remote_code)
    if loaded is not None and any(p.planning for p in loaded.build()) and has_weights(model):
        original = trace(model, trust_remote_code=trust_remote_code)  # headers say how weights are stored
    else:
        original = trace_skeleton(skeleton, remote_code=trust_remote_code)
    after, rules = _applied(original, loaded, tp, sp)
    rewritten = after is not None
    # plain tensor parallelism, with which a recipe is compared, of the sizes that it gives the model
    standard = tensor_parallel((after and after.origin) or original, tp)
    after = after or standard
    rules += [*unfired(after), *(standard_layers(after) if rewritten else [])]
    data = {
        "model": {
            "name": os.fspath(model) if isinstance(model, (str, os.PathLike)) else original.source.model_type,
            "type": original.source.model_type,
            "architecture": original.source.architecture,
            "layers": original.source.num_layers,
            "streams": stream_count(original),
            "parameters": sum(math.prod(p.shape) for p in original.parameters.values()),
            "beside_text": _beside_text(skeleton.model, original),
            "dtype": declared_dtype(original.source.config) or "float32",
        },
        "mesh": dict(after.mesh),
        "tokens": tokens,
        "recipe": loaded.name if loaded is not None else None,
        "passes": [
            {"name": r.name, "kind": r.kind, "summary": r.summary, "fired": r.fired, "routine": r.routine}
            | {"options": json.loads(json.dumps(r.options, default=list))}
            for r in after.history
        ],
        "blocks": _blocks(after),
        "plan": plan_data(after),
        "communication": {
            "convention": "bytes per token: the reduced tensor once per all-reduce (codes and scales where quantized), "
            "the gathered tensor per all-gather",
            "before": _traffic(standard),
            "after": _traffic(after) if rewritten else None,
        },
        "phases": _phases(after),
        "sequence": sequence(after, sp, tokens),
        "memory": asdict(memory(after)),
        "padding": padding(original, after, standard, tp),
        "rules": rules,
    }
    return Inspection(data, after)


def _beside_text(model: nn.Module, program: Program) -> dict[str, int]:
    """Parameters of what a forward on text does not use (towers, projectors), by the outermost module that holds
    nothing else; those of several layers together."""
    used = {path for name in program.parameters for path in _paths(name)}
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if name not in used and name not in program.ties:
            outermost = re.sub(r"\.\d+\.", ".*.", next(path for path in _paths(name) if path not in used))
            sizes[outermost] = sizes.get(outermost, 0) + parameter.numel()
    return sizes


def _paths(name: str) -> list[str]:
    """`a.b.weight` as a, a.b and a.b.weight."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _applied(original: Program, recipe: Recipe | None, tp: int, sp: int) -> tuple[Program | None, list[Rule]]:
    """(the program that the recipe makes, rules), without a program where the model has no stream to apply it to."""
    no_stream = why_no_stream(original)
    if recipe is None:
        return None, [] if no_stream is None else [rule("residual stream", no_stream)]
    try:
        recipe, rules = without_measurements(recipe, partial(tensor_parallel, original, tp))
        after, skipped = apply_recipe(original, recipe, tp, sp=sp)
    except RewriterError as error:
        if no_stream is None:
            raise
        return None, [rule(recipe.name, f"not applied. {error}")]
    return after, [*rules, *skipped_rules(recipe, skipped)]


def _blocks(program: Program) -> list[dict[str, Any]]:
    blocks = [(plan.layer, block) for plan in layer_plans(program) for block in plan.blocks]
    writers = [f"{'local ' * block.local}{block.kind} {layer}" for layer, block in blocks]
    local = {block.index for _, block in blocks if block.local}
    own = {block.index + 1 for _, block in blocks if block.ranks_differ}
    return [
        {
            "block": block.index,
            "layer": layer,
            "kind": block.kind,
            "local": block.local,
            "path": block.path,
            "mode": block.mode.name,
            "reads": _reads(block, writers, own, local),
            "carries": block.carries,
            "stale": bool(program.origin) and block.reads != (block.index,),
            "writes": f"x after {writers[block.index]}",
            "reductions": [
                {"place": c.place, "bytes_per_token": c.bytes_per_token, "hidden": c.hidden} for c in block.collectives
            ],
            "dropped": block.reduction == "dropped",
            "on_ranks": block.split,
        }
        for layer, block in blocks
    ]


def _phases(program: Program) -> dict[str, Any] | None:
    """Both wirings of passes that rewire the prompt alone: which tokens are rewired, for which all else that is said
    of the program holds, and what holds for the exact ones. None where all tokens are computed alike."""
    phase = prompt_phase(program)
    if phase is None:
        return None
    exact = exact_wiring(program)
    return {
        "rewired": str(phase),
        "exact_head": phase.exact_head,
        "exact_tail": phase.exact_tail,
        "exact": {"blocks": _blocks(exact), "plan": plan_data(exact), "communication": _traffic(exact)},
    }


def _reads(block: BlockPlan, writers: Sequence[str], own: Collection[int], local: Collection[int]) -> str:
    """The values of the stream that a block reads: whose, and which blocks' writes it does not see yet. What `local`
    blocks write is there at once."""
    parts = []
    for value in block.reads:
        base = f"x after {writers[value - 1]}" if value else "the embedding"
        late = [writers[index] for index in range(value, block.index) if index not in local]
        if missed := ", ".join(late):
            but = ", but for this rank's part" if block.own_part else ""
            base += f" (stale: misses {missed}{but})"
        whose = "this rank's own " if value in own else ""
        parts.append(f"{whose}{base}")
    return " and ".join(parts) or "nothing of the stream"


def _traffic(program: Program) -> dict[str, Any]:
    messages = collectives(program)
    travel = quantized(messages)
    return {
        "quantized": None if travel is None else asdict(travel),
        "total": asdict(summary(messages)),
        "places": {place: asdict(traffic) for place, traffic in by_place(messages).items()},
        "layers": [{"layer": layer, **asdict(traffic)} for layer, traffic in by_layer(messages).items()],
    }


# --- plans for sharded tokens ----------------------------------------------------------------------------------------

_SHAPE = ("layers", "q_heads", "kv_heads", "head_dim", "value_dim", "causal", "window")


def sequence(program: Program, ranks: int, tokens: int | None) -> dict[str, Any] | None:
    """Plans for `ranks` sequence ranks times the tensor-parallel ones of `program`, best first.

    `tokens` is the length to plan for; without it, that for which the pass chooses. The setting is the pass's too.
    None on one rank and for a model whose attention is not recognised.
    """
    shapes = attention_shapes(program)
    if ranks == 1 or not shapes:
        return None
    named = [entry.options["tokens"] for entry in program.history if entry.rewrite.shards_tokens]
    setting = planning(program, tokens or next((length for length in named if length != "auto"), None))
    length = setting.tokens
    applied = sequence_plan(program)
    if applied is not None:
        setting = replace(setting, quantized=applied.quantized, min_bytes=applied.min_bytes)
    ranking = plans(shapes, ranks, setting)
    chosen = applied or ranking.best.plan
    causal = [lower_bound(shape, length, ranks, causal=True) for shape in shapes]
    return {
        "ranks": ranks,
        "tokens": length,
        "fabric": setting.fabric.figures(),
        "attention": [{name: getattr(shape, name) for name in _SHAPE} for shape in shapes],
        "chosen": _plan(chosen),
        "applied": applied is not None,
        "lower_bound": {
            **asdict(ranking.best.bound),
            "causal_forward": sum(s.layers * b.forward for s, b in zip(shapes, causal, strict=True)),
            "causal_backward": sum(s.layers * b.backward for s, b in zip(shapes, causal, strict=True)),
        },
        "plans": [_row(cost, chosen) for cost in ranking.costs],
        "refused": [{"reason": why, "grids": [list(g) for g in grids]} for why, grids in ranking.refused.items()],
        "notes": _notes(shapes, ranking.costs, applied),
    }


def with_length(recipe: Recipe, tokens: int | None) -> Recipe:
    """`recipe`, whose sequence_parallel plans for `tokens` unless it names a length itself."""
    for index, rewrite in enumerate(recipe.build()):
        if tokens is not None and rewrite.shards_tokens and rewrite.tokens == "auto":
            recipe = recipe.with_options(index, {"tokens": tokens})
    return recipe


def _plan(plan: SequencePlan) -> dict[str, Any]:
    name = str(replace(plan, quantized=None))
    return {"kind": plan.kind, "grid": list(plan.grid), "overlap": plan.overlap, "name": name}


def _row(cost: PlanCost, chosen: SequencePlan) -> dict[str, Any]:
    return {
        **_plan(cost.plan),
        "chosen": cost.plan == chosen,
        "bytes_forward": cost.wire.forward,
        "bytes_backward": cost.wire.backward,
        "memory_saved": cost.saved,
        "memory_live": cost.live,
        "fits": cost.fits,
        "seconds_forward": cost.times.forward,
        "seconds_backward": cost.times.backward,
        "seconds_compute": cost.times.compute,
        "times_lower_bound": cost.distance,
        "note": ALGORITHMS[cost.plan.kind].travels(cost.plan)
        + ("" if cost.fits else "; does not fit the device's memory"),
    }


def _notes(shapes: Sequence[AttentionShape], costs: Sequence[PlanCost], applied: SequencePlan | None) -> list[str]:
    notes = []
    windowed = [s for s in shapes if s.window is not None]
    if windowed:
        listed = ", ".join(f"{s.layers} of {s.window:,} tokens" for s in windowed)
        notes.append(
            f"Windows or chunks ({listed}) spare arithmetic, but no bytes: cyclic tokens of a window are on all ranks, "
            "and a ring sends all keys round."
        )
    if applied is not None and applied.quantized is not None:
        least = f" where a rank has {applied.min_bytes:,} bytes of them" if applied.min_bytes else ""
        notes.append(f"Keys and values travel as {applied.quantized}{least}, in every plan of the table.")
    own = next((c for c in costs if c.plan == applied), None)
    if own is not None and own.times.total > costs[0].times.total * (1 + MARGIN):
        best = costs[0].plan
        grid = "" if KINDS[best.kind].grid(best.ranks) else f" and grid {list(best.grid)}"
        notes.append(f"The recipe's plan is {own.plan}. Faster at this length: kind {best.kind}{grid}.")
    if all(not c.fits for c in costs):
        notes.append("No plan fits the device's memory. Recompute layers in backward, or give more ranks.")
    return notes
