"""`rewrite inspect --sp N`: every plan for attention over sharded tokens with its price, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rewriter.ir import Program
from rewriter.ir.ops import SequencePlan
from rewriter.passes.sequence.distributed_attention import ALGORITHMS, AttentionShape
from rewriter.passes.sequence.sequence_costs import lower_bound
from rewriter.passes.sequence.sequence_plans import MARGIN, PlanCost, attention_shapes, planning, plans, sequence_plan
from rewriter.recipes import Recipe

_SHAPE = ("layers", "q_heads", "kv_heads", "head_dim", "value_dim", "causal", "window")


def sequence(program: Program, ranks: int, tokens: int | None) -> dict[str, Any] | None:
    """Plans for `ranks` sequence ranks beside the tensor-parallel ones of `program`, best first.

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
    from rewriter.ir.sequence_plan import KINDS

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
