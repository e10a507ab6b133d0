"""The plan of a program's layers as plain text: what `rewrite inspect --plan` prints, and golden files hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rewriter.ir import Program
from rewriter.ir.layer_plan import BlockPlan, LayerGroup, ModulePlan, grouped, layer_plans, module_plans
from rewriter.ir.phases import prompt_phase
from rewriter.passes.phases import exact_wiring
from rewriter.passes.sequence.sequence_plans import sequence_plan


def plan_text(program: Program) -> str:
    """Each group of equal layers: what its blocks read, what becomes of their sums, what crosses to the next layer, and
    how ranks hold every tensor. Tensors are listed again only where they differ from the group before. Where passes
    rewire the prompt alone: of rewired tokens, then of exact ones."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in program.mesh.items()) or "one device"
    lines = [f"{program.source.model_type}, {program.source.num_layers} layers, {mesh}"]
    if (sharing := sequence_plan(program)) is not None:
        lines.append(f"tokens over {sharing.ranks} ranks, attention: {sharing}")
    phase = prompt_phase(program)
    wirings = {"": program}
    if phase is not None:
        lines.append(f"rewired tokens: {phase}; exact tokens: all others, and what is generated")
        wirings = {"rewired tokens": program, "exact tokens": exact_wiring(program)}
    before: list[ModulePlan] = []
    for title, wiring in wirings.items():
        lines += ["", title] if title else []
        for group in grouped(layer_plans(wiring)):
            lines += ["", *_group(group)]
            tensors = module_plans(wiring, group.first)
            if tensors != before:
                lines += ["", *_tensors(tensors)]
            before = tensors
    return "\n".join(lines) + "\n"


def plan_data(program: Program) -> list[dict[str, Any]]:
    """The plan of one wiring as JSON values: each group of equal layers, with the tensors of its first."""
    return [
        group.to_dict() | {"tensors": [asdict(tensor) for tensor in module_plans(program, group.first)]}
        for group in grouped(layer_plans(program))
    ]


def reads(block: BlockPlan) -> str:
    """ "x", "x of 1 block before", with "+ own part" where the block reads what its rank has added since."""
    late = max(block.late, default=0)
    return (
        f"x of {late} block{'s' * (late > 1)} before" * bool(late) + "x" * (not late) + " + own part" * block.own_part
    )


def _sum(block: BlockPlan) -> str:
    """Fate of the sum over ranks of a block's output."""
    if block.reduction == "hidden":
        blocks = f"{block.meanwhile} block{'s' * (block.meanwhile > 1)}"
        return f"behind {blocks if block.meanwhile else 'what x becomes'}"
    return {"none": "–", "exposed": "at once", "dropped": "left out"}[block.reduction]


def _group(group: LayerGroup) -> list[str]:
    plan = group.plan
    carried = any(block.carries != "as it is" for block in plan.blocks)
    rows = [
        (
            block.name,
            block.mode.label,
            reads(block),
            *[block.carries] * carried,
            _sum(block),
            block.split,
            "differs" if block.ranks_differ else "same",
        )
        for block in plan.blocks
    ]
    extra = ("x itself",) if carried else ()
    head = ("block", "mode", "reads", *extra, "sum over ranks", "weights", "x after it, by rank")
    several = f"  x is {plan.streams} streams: {plan.streams} vectors a token"
    count = f"{plan.collectives} collective{'s' * (plan.collectives > 1)}"
    traffic = f"{count} ({plan.hidden} hidden), {plan.bytes_per_token:,} bytes a token"
    return [
        group.label + (f": {traffic}" if plan.collectives else ""),
        *[several] * (plan.streams > 1),
        *_aligned([head, *rows]),
        f"  to what follows: {'; '.join(plan.crosses)}",
    ]


def _tensors(tensors: Sequence[ModulePlan]) -> list[str]:
    rows = [(t.path, t.kind, t.sharding, _size(t.on_rank), _size(t.full)) for t in tensors]
    return _aligned([("tensor", "module", "split", "on a rank", "of"), *rows])


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
