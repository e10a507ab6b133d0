"""Rules that did not fire, in words: passes without effect, and layers and blocks that a recipe leaves as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewriter.ir import Program
    from rewriter.recipes import Recipe

Rule = dict[str, str]


def unfired(program: Program) -> list[Rule]:
    """Passes without effect, and what a pass had to leave as it was, in the passes' own words."""
    rules = []
    for entry in program.history:
        if not entry.fired:
            rules.append({"rule": entry.name, "reason": entry.summary})
        rules += [{"rule": entry.name, "reason": note} for note in entry.notes]
    return rules


def standard_layers(program: Program) -> list[Rule]:
    """The layers that no rewiring pass touched, and the block that has nothing to skip."""
    from rewriter.analysis.residual import residual_blocks
    from rewriter.passes.base import scopes

    applied = zip(program.history, scopes(program), strict=True)
    entries = [r for r, scope in applied if r.kind == "approximating" and scope != "runtime"]
    if not entries:
        return []
    blocks = residual_blocks(program)
    rewired = {b.layer for b in blocks if b.mode != "standard" or b.reads != (b.index,)}
    names = ", ".join(dict.fromkeys(entry.name for entry in entries))
    rules = []
    if kept := sorted({b.layer for b in blocks} - rewired):
        selection = entries[0].options.get("layers") if len(entries) == 1 else None
        why = "no pass selects them" if selection is None else f"not in layers={selection!r}"
        rules.append({"rule": names, "reason": f"layers {spans(kept)} keep their reads: {why}"})
    if blocks and blocks[0].mode in ("ladder", "own_partial"):
        reason = f"{blocks[0].kind} {blocks[0].layer} reads the embedding: there is nothing to skip"
        rules.append({"rule": names, "reason": reason})
    return rules


def with_supposed_costs(recipe: Recipe, standard: Program) -> tuple[Recipe, list[Rule]]:
    """`recipe` where a pass that needs a measurement is told that all layers cost the same, and that this was done.

    What is inspected (how many reductions, which bytes) does not depend on which layers a measurement would choose.
    """
    from rewriter.passes.drop_sync import DropSync, attention_reductions
    from rewriter.passes.permute import Permute

    rules: list[Rule] = []
    for rewrite in recipe.build():
        if isinstance(rewrite, DropSync) and rewrite.unmeasured and standard.mesh:
            droppable = attention_reductions(standard)
            count = standard.source.num_layers
            costs = tuple(0.0 if layer in droppable else None for layer in range(count))
            layers = replace(rewrite, sensitivity=costs).chosen(count)
            recipe = recipe.with_overrides({f"{rewrite.name}.layers": list(layers)})
            reason = f"which layers cost least is measured on the weights; layers {spans(layers)} stand for them here"
            rules.append({"rule": rewrite.name, "reason": reason})
        if isinstance(rewrite, Permute) and rewrite.unmeasured and standard.mesh:
            recipe = recipe.with_overrides({f"{rewrite.name}.ranks": {}})
            reason = "which heads and channels fit together is measured on the weights; they are left in order here"
            rules.append({"rule": rewrite.name, "reason": reason})
    return recipe, rules


def spans(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0–2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in runs)
