"""Attention as `rewriter.runtime` runs it: its kernels, and the messages of ranks that share tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.passes.sequence.distributed_attention import (
    ALGORITHMS,
    AttentionMessage,
    AttentionShape,
    axis_ranks,
    messages,
    slowest,
)
from rewriter.predict.kernel_cost import Item, Kernel, ModuleExchange, measured_as
from rewriter.predict.workload import ForwardPass

# of `runtime.attention.cached` where it makes a mask: where the new tokens stand, and which keys each of them sees
_MASK_KERNELS = 12


def attention_items(
    q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], given: ForwardPass, ranks: tuple[int, int]
) -> list[Item]:
    """The items of one attention node. q [B, H, S, D], k [B, K, S, D] and v [B, K, S, E] are those of the rank's new
    tokens; `ranks` are the sizes of "sp" and "tp"."""
    plan: SequencePlan | None = options.get("sequence")
    mask: MaskSpec = options["mask"]
    shape = AttentionShape(
        q.shape[1], k.shape[1], q.shape[3], v.shape[3], batch=q.shape[0], dtype_bytes=q.element_size(),
        causal=mask.causal, window=mask.reach,
    )  # fmt: skip
    cache = cache_kernels(k, v)
    before = given.before if _fills(mask, q.shape[2], options, given) else 0
    if given.is_decode and not before:
        return _after_prompt(shape, q.shape[2], options, given, ranks, cache)
    if plan is not None and plan.ranks > 1:
        return [*cache, *_over_ranks(shape, plan, given.tokens, ranks[1])]
    tokens = before + q.shape[2]
    read = float(q.nbytes + k.nbytes + v.nbytes) * tokens / q.shape[2]
    biases = _biases(shape, tokens, tokens, options)
    if options.get("bias") is None and not biases and mask.unbounded(tokens):
        padded = [Kernel("queries", "glue", float(q.nbytes) * (1 + tokens / q.shape[2]))] if before else []
        kernels = _kernels(shape, float(shape.visible_pairs(tokens)), tokens, tokens, options, read, given)
        return _together([*cache, *padded, *kernels], given.fused)
    # a kernel that is given a mask computes what it hides, too
    every = float(tokens * tokens)
    masks = [Kernel("mask", "glue", every) for _ in range(1 if given.fused else _MASK_KERNELS)]
    kernels = _kernels(shape, every, tokens, tokens, options, read + every, given)
    return [*biases, *_together([*cache, *kernels], given.fused), *masks]


def _biases(shape: AttentionShape, queries: int, keys: int, options: Mapping[str, Any]) -> list[Kernel]:
    """Biases that are made of each query and key: what a key's distance adds is gathered and filled in with 0; the
    largest of each key are chosen by key/value head and added to those that are seen."""
    pairs = float(shape.batch * queries * keys)
    if options.get("by_distance") is not None:
        return [Kernel("bias", "glue", 2 * pairs * shape.q_heads * shape.dtype_bytes) for _ in range(2)]
    if options.get("key_bias") is not None:
        chosen = [Kernel("choice", "glue", 2 * pairs * shape.kv_heads * shape.dtype_bytes) for _ in range(3)]
        return [*chosen, Kernel("bias", "glue", pairs * shape.q_heads * shape.dtype_bytes)]
    return []


def _fills(mask: MaskSpec, queries: int, options: Mapping[str, Any], given: ForwardPass) -> bool:
    """True for a part of a prompt that attends without a mask (`runtime.attention.cached`): as many queries as keys."""
    plan: SequencePlan | None = options.get("sequence")
    others = ("softcap", "sinks", "by_distance", "key_bias")
    plain = given.plain or any(options.get(name) is not None for name in others)
    over_ranks = plan is not None and plan.ranks > 1
    return (
        mask.causal and mask.unbounded(given.before + queries) and given.before <= queries and not (plain or over_ranks)
    )


def cache_kernels(k: Tensor, v: Tensor) -> list[Kernel]:
    """Kernels that store the keys and values of new tokens."""
    return [Kernel("cache", "glue", float(k.nbytes + v.nbytes)) for _ in range(2)]


def _together(kernels: list[Kernel], fused: bool) -> list[Item]:
    """A fused attention kernel with what stores keys and values before it and, over a cache, says what is seen, where
    the module is compiled: measured as one."""
    last = kernels[-1]
    if not fused or last.work != "attention":
        return list(kernels)
    sizes = {name: getattr(last, name) for name in ("batches", "rows", "columns", "depth", "groups")}
    return [measured_as("attention", "attention", kernels, **sizes)]


def _kernels(
    shape: AttentionShape,
    pairs: float,
    queries: int,
    keys: int,
    options: Mapping[str, Any],
    read: float,
    given: ForwardPass,
) -> list[Kernel]:
    """Attention of `pairs` of a query and a key (per head and sequence) that reads `read` bytes."""
    if given.plain:
        return _plain(shape, queries, keys if given.is_decode else max(keys, given.plain), given.fused)
    size, rows = shape.dtype_bytes, shape.batch * shape.q_heads
    out = float(rows * queries * shape.value_dim * size)
    flops = 2.0 * pairs * rows * (shape.head_dim + shape.value_dim)
    if options.get("softcap") is None and options.get("sinks") is None:
        return [_attention(shape, read + out, flops, queries, keys)]
    return _unfused(shape, queries, keys, read, 0.0)


def _plain(shape: AttentionShape, queries: int, keys: int, compiled: bool) -> list[Kernel]:
    """Products of every query with every key, as PyTorch's math backend of scaled_dot_product_attention runs them:
    scores and their softmax are written and read, keys and values are those of each query head. A compiler makes the
    products of one query reductions that read a head's keys once per query head; else they are repeated in memory."""
    size, rows = shape.dtype_bytes, shape.batch * shape.q_heads
    repeats = shape.q_heads // shape.kv_heads
    read = [float(rows * keys * dim * size) for dim in (shape.head_dim, shape.value_dim)]
    copied = repeats > 1 and not (compiled and queries == 1)
    copies = [Kernel("repeat", "glue", nbytes * (1 + 1 / repeats)) for nbytes in read] if copied else []
    return [*copies, *_unfused(shape, queries, keys, read[0] + rows * queries * shape.head_dim * size, read[1])]


def _unfused(shape: AttentionShape, queries: int, keys: int, read: float, values: float) -> list[Kernel]:
    """Without a fused kernel: scores of what is `read` are written, capped, masked, exponentiated in fp32 and read
    again, with `values` bytes beyond what was read."""
    size, rows = shape.dtype_bytes, shape.batch * shape.q_heads
    scores, out = float(rows * queries * keys), float(rows * queries * shape.value_dim * size)
    head, value = shape.head_dim, shape.value_dim
    return [
        Kernel("scores", "product", read + scores * size, 2.0 * scores * head, 0, rows, queries, keys, head),
        Kernel("softmax", "glue", scores * (4 * size + 8)),
        Kernel("values", "product", scores * size + values + out, 2.0 * scores * value, 0, rows, queries, value, keys),
    ]


def _attention(shape: AttentionShape, nbytes: float, flops: float, queries: int, keys: int) -> Kernel:
    return Kernel(
        "attention", "attention", nbytes, flops, batches=shape.batch * shape.q_heads, rows=queries, columns=keys,
        depth=shape.head_dim, groups=shape.batch * shape.kv_heads,
    )  # fmt: skip


def _after_prompt(
    shape: AttentionShape,
    queries: int,
    options: Mapping[str, Any],
    given: ForwardPass,
    ranks: tuple[int, int],
    cache: list[Kernel],
) -> list[Item]:
    """New tokens over the static cache, of which each rank of "sp" holds a part; the parts of the result are gathered
    and merged."""
    plan: SequencePlan | None = options.get("sequence")
    across = plan.ranks if plan is not None else 1
    keys = -(-min(given.keys, shape.window or given.keys) // across)
    size = shape.dtype_bytes
    if given.small_cache:  # as long as fewer keys of the model's dtype take, which are as many bytes
        keys = -(-keys // size)
    read = float(shape.batch * keys * shape.kv_heads * (shape.head_dim + shape.value_dim) * size)
    read += shape.batch * queries * shape.q_heads * shape.head_dim * size
    small = float(shape.batch * queries * keys)
    masks = [Kernel("mask", "glue", small) for _ in range(1 if given.fused else _MASK_KERNELS)]
    kernels = _kernels(shape, float(queries * keys), queries, keys, options, read, given)
    if queries > 1 and across == 1 and not given.plain and shape.q_heads != shape.kv_heads:
        # with a mask, kernels are given keys and values of each query head (`runtime.attention.cached`)
        moved = float(shape.batch * keys * (shape.kv_heads + shape.q_heads) * size)
        cache = [*cache, *(Kernel("repeat", "glue", moved * dim) for dim in (shape.head_dim, shape.value_dim))]
    items = [*_biases(shape, queries, keys, options), *_together([*cache, *masks, *kernels], given.fused)]
    if across > 1:
        rows = shape.batch * shape.q_heads * queries
        nbytes = rows * (shape.value_dim * size + shape.accumulation_bytes) * across
        group = tuple(range(0, across * ranks[1], ranks[1]))
        items.append(ModuleExchange("all_gather", "sp", nbytes, group, "parts of attention"))
        items.append(Kernel("merge", "glue", 2.0 * nbytes))
    return items


def _over_ranks(shape: AttentionShape, plan: SequencePlan, tokens: int, tp: int) -> list[Item]:
    """Full sequences whose tokens are sharded: the planned messages between the kernels, as `sequence_costs` orders
    them. In overlapped plans a message overlaps with the tile that runs meanwhile."""
    sent = [m for m in messages(plan, shape, tokens, slowest(plan)) if not m.backward]
    pairs = shape.visible_pairs(tokens) / plan.ranks
    calls = max(1, ALGORITHMS[plan.kind].kernel_calls(plan, shape))
    size, local = shape.dtype_bytes, -(-tokens // plan.ranks)
    widths = shape.head_dim + shape.value_dim
    moved = 2.0 * shape.batch * local * (shape.q_heads + shape.kv_heads) * widths * size
    flops = 2.0 * pairs * shape.batch * shape.q_heads * widths
    tile = _attention(shape, moved / calls, flops / calls, local, local)
    if not ALGORITHMS[plan.kind].overlaps(plan):
        before = [_exchange(m, plan, tp) for m in sent if not m.results]
        after = [_exchange(m, plan, tp) for m in sent if m.results]
        return [*before, *[tile] * calls, *after]
    return _overlapped(sent, plan, tp, tile, calls)


def _overlapped(sent: list[AttentionMessage], plan: SequencePlan, tp: int, tile: Kernel, calls: int) -> list[Item]:
    """Blocks of keys (and, in a grid, of queries) travel one by one, each while the tiles of the block before run."""
    blocks: list[ModuleExchange] = []
    items: list[Item] = []
    results: list[list[ModuleExchange]] = [[], []]  # of rows and columns, then of heads
    for message in sent:
        across = message.axis in ("heads", "plane")
        if message.results:
            results[across].append(_exchange(message, plan, tp))
        elif across:
            items.append(_exchange(message, plan, tp))
        else:
            pair = _ranks(message, plan, tp)[:2]
            one = ModuleExchange("send", "sp", message.nbytes // message.peers, pair, message.name)
            blocks += [one] * message.peers
    left = calls
    for i, block in enumerate(blocks):
        here = max(1, round(left / (len(blocks) - i + 1))) if left > 1 else 0
        left -= here
        items += [replace(block, overlaps=here), *[tile] * here]
    return [*items, *[tile] * left, *results[0], *results[1]]


def _exchange(message: AttentionMessage, plan: SequencePlan, tp: int) -> ModuleExchange:
    """A message as one collective: operands are gathered in a row or column, everything else changes ranks."""
    ranks = _ranks(message, plan, tp)
    if message.axis == "plane":
        return ModuleExchange("send", "sp", message.nbytes, ranks[:2], message.name)
    total = message.nbytes * (message.peers + 1) // message.peers
    kind: Literal["all_to_all", "all_gather"] = (
        "all_to_all" if message.axis == "heads" or message.results else "all_gather"
    )
    return ModuleExchange(kind, "sp", total, ranks, message.name)


def _ranks(message: AttentionMessage, plan: SequencePlan, tp: int) -> tuple[int, ...]:
    size, distance = axis_ranks(plan, tp)[message.axis]
    return tuple(range(0, size * distance, distance))
