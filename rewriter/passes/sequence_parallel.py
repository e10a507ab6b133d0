"""Sequence parallelism: every rank holds part of the tokens, and attention finds the keys of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Module, Program, args_of, edit_bodies, ops, placeholders, put_after
from rewriter.passes.base import Effect, Pass, Scope, record
from rewriter.passes.sequence.sequence_plans import (
    AXIS,
    allowed,
    attention_shapes,
    attentions,
    choose,
    planning,
    sequence_plan,
)
from rewriter.passes.sequence.token_locality import check_tokens

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class SequenceParallel(Pass):
    """y = gather(f(shard(x))): tokens are sharded once, after the inputs, and gathered once, at the logits.

    Between the two every value belongs to one token, so a rank computes those of its own tokens from its own tokens;
    only attention reads others, and is exact over all of them (Attention2D, arXiv 2503.15758, Alg. 1 to 11; a ring of
    keys and values; DeepSpeed-Ulysses, arXiv 2309.14509). The axis size is the mesh's "sp". Positions are sharded
    like tokens, so that each keeps the place it has in the full sequence. All layers have one plan, for tokens are
    sharded once.

    `kind`: which attention; auto lets the planner choose. `grid` is [heads, rows, columns]; auto lets the planner
    choose for attention2d, and follows from the kind for the others. `overlap`: whether attention2d computes block by
    block while the next blocks travel; auto lets the planner choose. `tokens` is the length to plan for, which changes
    nothing where nothing is left to choose; auto: the positions that the model's config names, at most 131,072.

    Exact. Raises RewriterError on one rank, for a grid that does not fit the axis or the heads, and for a model that
    reads other tokens outside of attention, naming the module, the operator and the reason.
    """

    kind: Literal["auto", "attention2d", "ring", "ulysses"] = "auto"
    grid: Literal["auto"] | Grid = "auto"
    overlap: Literal["auto"] | bool = "auto"
    tokens: Literal["auto"] | int = "auto"

    name: ClassVar[str] = "sequence_parallel"
    effect: ClassVar[Effect] = "exact"
    scope: ClassVar[Scope] = "runtime"
    shards_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tokens != "auto" and self.tokens < 1:
            raise RewriterError(f"tokens: {self.tokens}; expected auto, or a length of 1 or more to plan for")

    def check_mesh(self, mesh: Mapping[str, int]) -> None:
        if mesh.get(AXIS, 1) == 1:
            raise RewriterError(f"{self.name} shards the tokens of a sequence over ranks. Give --sp 2 or more.")

    def shrunken(self, kept: Sequence[int], count: int, plan: ops.SequencePlan | None = None) -> Sequence[Pass]:
        """The same plan, though another might be chosen for the copy's sizes."""
        return [self if plan is None else SequenceParallel(plan.kind, plan.grid, plan.overlap)]

    def apply(self, program: Program) -> Program:
        self.check_mesh(program.mesh)
        ranks = program.mesh[AXIS]
        if sequence_plan(program) is not None:
            raise RewriterError(f"{self.name}: the tokens are sharded already. Leave out the second of the two")
        for path, node in attentions(program):
            if any(node.kwargs.get(name) is not None for name in ("bias", "slopes", "by_distance")):
                reason = "adds a bias per query and key to its scores (ALiBi or the like)"
            elif node.kwargs.get("keys") is not None:
                reason = "sees keys that an indexer chooses among those of all tokens"
            elif node.kwargs.get("key_bias") is not None:
                reason = "adds a bias per key to its scores, of keys that other ranks hold"
            elif node.kwargs.get("softcap") is not None:
                cap = node.kwargs["softcap"]
                reason = f"caps its scores by {cap} · tanh, which kernels for parts of a sequence lack"
            else:
                continue
            raise RewriterError(f"{self.name}: {path} {reason}. {_NEXT}")
        check_tokens(program)
        shapes = attention_shapes(program)
        if not shapes:
            raise RewriterError(f"{self.name}: the model has no attention, so there is nothing to plan. {_NEXT}")
        setting = planning(program, None if self.tokens == "auto" else self.tokens)
        options: dict[str, Any] = {"kind": self.kind, "grid": self.grid, "overlap": self.overlap}
        plan = choose(shapes, ranks, **options, setting=setting)
        masks: Any = [node.kwargs["mask"] for _, node in attentions(program)]
        counts = Counter(str(mask.kind) for mask in masks)
        text = ", ".join(f"{n} {what}" for what, n in counts.items())
        summary = f"{ranks} ranks, {plan.layout} tokens: {text} attention as {plan}"
        if len(allowed(shapes, ranks, **options)) > 1:
            summary += f", planned for {setting.tokens:,} tokens"
        return record(program, self, summary, graph=_wired(program, plan), modules=_planned(program, plan))


_NEXT = "Rewrite this model without it: --sp 1"


def _wired(program: Program, plan: ops.SequencePlan) -> fx.Graph:
    """The wiring between sharded inputs and gathered logits."""
    graph, _ = program.edit()
    for node in placeholders(graph):
        if node.target != "ctx" and node.users:
            put_after(node, ops.shard_tokens, AXIS, plan)
    output = graph.output_node()
    gathered: Any = (args_of(output)[0], AXIS, plan)
    with graph.inserting_before(output):
        output.args = (graph.call_function(ops.gather_tokens, gathered),)
    return graph


def replanned(program: Program, plan: ops.SequencePlan) -> dict[str, Any]:
    """The graph and modules of `program`, whose tokens are sharded, with another plan for the same layout."""
    graph, _ = program.edit()
    for node in graph.nodes:
        if node.target in (ops.shard_tokens, ops.gather_tokens):
            node.args = (*node.args[:2], plan)
    return {"graph": graph, "modules": _planned(program, plan)}


def _planned(program: Program, plan: ops.SequencePlan) -> dict[str, Module]:
    """The modules of `program`, where every attention has the plan."""

    def edit(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=ops.attention):
            node.kwargs = {**node.kwargs, "sequence": plan}

    return edit_bodies(program.modules, edit)
