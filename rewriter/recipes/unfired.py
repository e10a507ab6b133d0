"""Rules that did not fire: passes without effect, and layers and blocks that a recipe leaves as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rewriter.ir import Program
from rewriter.ir.marks import STANDARD
from rewriter.ir.residual import residual_blocks
from rewriter.passes.base import scopes
from rewriter.passes.selection import spans
from rewriter.recipes import Recipe

Rule = dict[str, Any]
"""`rule`: a pass, `reason`: why it did not fire, `routine`: as in `Pass`."""


def unfired(program: Program) -> list[Rule]:
    """Passes without effect, and what a pass had to leave as it was, in the passes' own words."""
    rules = []
    for entry in program.history:
        if not entry.fired:
            rules.append(rule(entry.name, entry.summary, entry.routine))
        rules += [rule(entry.name, note, entry.routine) for note in entry.notes]
    return rules


def rule(name: str, reason: str, routine: bool = False) -> Rule:
    """One rule that did not fire."""
    return {"rule": name, "reason": reason, "routine": routine}


def skipped_rules(recipe: Recipe, skipped: Iterable[tuple[str, str]]) -> list[Rule]:
    """The passes of `recipe` that were not applied, each with the reason."""
    routine = {rewrite.name for rewrite in recipe.build() if rewrite.routine}
    return [rule(name, reason, name in routine) for name, reason in skipped]


def standard_layers(program: Program) -> list[Rule]:
    """The layers that no rewiring pass touched, and the block that has nothing to skip."""
    applied = zip(program.history, scopes(program), strict=True)
    entries = [r for r, scope in applied if r.kind == "approximating" and scope != "runtime"]
    if not entries:
        return []
    blocks = residual_blocks(program)
    rewired = {b.layer for b in blocks if b.mode != STANDARD or b.reads != (b.index,)}
    names = ", ".join(dict.fromkeys(entry.name for entry in entries))
    rules = []
    if kept := sorted({b.layer for b in blocks} - rewired):
        selection = entries[0].options.get("layers") if len(entries) == 1 else None
        why = "no pass selects them" if selection is None else f"not in layers={selection!r}"
        rules.append(rule(names, f"layers {spans(kept)} keep their reads: {why}"))
    if blocks and blocks[0].mode.reads != "newest":
        reason = f"{blocks[0].kind} {blocks[0].layer} reads the embedding: there is nothing to skip"
        rules.append(rule(names, reason))
    return rules


def without_measurements(recipe: Recipe, standard: Callable[[], Program]) -> tuple[Recipe, list[Rule]]:
    """`recipe` where other options stand for the measurements that its passes request, and what stands for them.

    `standard` gives the model under tensor parallelism alone, and is called where a pass asks for one. What is
    inspected (how many reductions, which bytes) does not depend on what a measurement would choose.
    """
    rules: list[Rule] = []
    for index, rewrite in enumerate(recipe.build()):
        if rewrite.planning:
            recipe = recipe.with_options(index, rewrite.planning)
        if rewrite.request is not None and (program := standard()).mesh:
            options, reason = rewrite.supposed(program)
            recipe = recipe.with_options(index, options)
            rules.append(rule(rewrite.name, reason, rewrite.routine))
    return recipe, rules
