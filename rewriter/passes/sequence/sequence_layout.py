"""Sharding of a program's tokens, and the attention that has to find the keys of other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from rewriter.common.text_settings import context_length
from rewriter.fabric import load_fabric
from rewriter.ir import Program, args_of, nodes_inside, ops
from rewriter.ir.communication import model_dtype_bytes
from rewriter.ir.marks import marks
from rewriter.passes.sequence.distributed_attention import AttentionShape, messages, slowest
from rewriter.passes.sequence.sequence_plans import TOKENS, Setting

AXIS = "sp"


def sequence_plan(program: Program) -> ops.SequencePlan | None:
    """The plan that the program's tokens are sharded by, one per model; None where every rank has all tokens."""
    for node in program.graph.nodes:
        if node.target is ops.shard_tokens:
            plan: ops.SequencePlan = args_of(node)[2]
            return plan
    return None


def attentions(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """(path of the called body, node) of every attention of a forward pass; a body called twice counts twice."""
    for node in program.graph.nodes:
        if node.op == "call_module":
            nodes = nodes_inside(program.modules[str(node.target)], str(node.target))
            yield from ((path, inner) for path, inner in nodes if inner.target is ops.attention)


def attention_shapes(program: Program) -> tuple[AttentionShape, ...]:
    """The kinds of attention of a program, as one tensor-parallel rank computes them, with the number of each.

    Heads are a rank's own whether `tensor_parallel` was applied already or not. What that pass leaves replicated has
    all heads, which is known only after it.
    """
    ranks = program.mesh.get("tp", 1)
    split = any(entry.rewrite.makes_partials for entry in program.history)
    size = model_dtype_bytes(program)
    counts: Counter[AttentionShape] = Counter()
    for _, node in attentions(program):
        q, k, v = (operand.meta["val"].shape for operand in args_of(node)[:3])
        mask: ops.MaskSpec = node.kwargs["mask"]  # type: ignore[assignment]
        q_heads, kv_heads = int(q[1]), int(k[1])
        if split:
            q_heads = marks(node).local_q_heads or q_heads
            kv_heads = marks(node).local_kv_heads or kv_heads
        elif q_heads % ranks == 0:
            q_heads, kv_heads = local_heads(q_heads, kv_heads, ranks)
        shape = AttentionShape(
            q_heads, kv_heads, int(q[3]), int(v[3]), 1, 1, size, causal=mask.causal, window=mask.reach
        )
        counts[shape] += 1
    return tuple(replace(shape, layers=layers) for shape, layers in counts.items())


def planning(program: Program, tokens: int | None = None) -> Setting:
    """Setting that a program's plans are compared in: one fabric, within its device's memory.

    Without `tokens`, for the positions that the model has, of which more than TOKENS are not planned for.
    """
    length = tokens or min(TOKENS, context_length(program.source.config))
    fabric = load_fabric("h100-nvlink")
    ranks = program.mesh.get("tp", 1)
    return Setting(length, fabric, tensor_parallel=ranks, memory_limit=fabric.device.memory)


def bytes_per_token(program: Program) -> dict[str, dict[str, int]]:
    """{"forward" | "backward": {message: bytes}}: what attention of all layers sends per token that a rank holds.

    Of a rank that sends most, in the model's dtype, and of sequences long enough for keys and values to be quantized,
    if they are. Empty where every rank has all tokens.
    """
    plan = sequence_plan(program)
    if plan is None:
        return {}
    plan = replace(plan, min_bytes=0)
    local = plan.local_tokens(plan.multiple)
    sizes_by_pass: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for shape in attention_shapes(program):
        for message in messages(plan, shape, plan.multiple, slowest(plan)):
            when = "backward" if message.backward else "forward"
            sizes_by_pass[when][message.name] += shape.layers * message.nbytes // local
    return {when: dict(sizes) for when, sizes in sizes_by_pass.items()}


def local_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, key/value heads) that a rank of `ranks` holds: of the latter, those that its query heads read."""
    own, groups = q_heads // ranks, q_heads // kv_heads
    return own, max((r * own + own - 1) // groups - r * own // groups + 1 for r in range(ranks))
