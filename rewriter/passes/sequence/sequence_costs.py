"""Memory and time of a plan for sequence-sharded attention on a rank, and the least bytes that any plan exchanges.

Symbols as in `distributed_attention`. Memory counts the tensors of the algorithms, not what transports copy. Time is
the α-β model of `rewriter.fabric` and the arithmetic at the device's rate; work is equal on all ranks, which cyclic and
zigzag tokens make nearly true. Where messages overlap with computation, the longer of both counts, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.fabric import Channel, Device, Fabric, Link
from rewriter.ir.ops import SequencePlan
from rewriter.passes.sequence.distributed_attention import (
    ALGORITHMS,
    AttentionShape,
    Axis,
    WireBytes,
    axis_ranks,
    kv_bytes,
    messages,
    quantizes,
    slowest,
)


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one layer's attention on one rank.

    `saved`: what forward keeps for backward (Alg. 1 line 7): q, k, v and o of the rank's own tokens, as they are after
    heads were exchanged, and their log-sum-exp; nothing gathered. `forward`, `backward`: what each pass holds besides
    at its peak.
    """

    saved: int
    forward: int
    backward: int


@dataclass(frozen=True)
class AttentionSeconds:
    """Time of one layer. `compute` is a part of `forward` and `backward` together; the rest waits for messages."""

    forward: float
    backward: float
    compute: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def memory(plan: SequencePlan, shape: AttentionShape, tokens: int) -> AttentionMemory:
    """Memory of one layer's attention on every rank.

    Without overlap, forward peaks with q, k and v gathered and the partial outputs made of them, backward with q, o,
    do, log-sum-exp, k and v gathered and gradients in the accumulation dtype. With overlap, k, v and their gradients
    are gathered as before, but of what travels in a row there are two blocks at a time. In a single column, where no
    queries come that would need them again, and in a ring there are two blocks of k and v, the one in use and the one
    that arrives, and two of their gradients, a rank's own and those of the block in use. Where heads are exchanged, the
    tensors before stand next to those after. Quantized keys and values are kept and gathered as bytes, and computed
    with as they are dequantized: all that are gathered, or of passing blocks the one in use.
    """
    heads, rows, columns = plan.grid
    size, sum_size = shape.dtype_bytes, shape.accumulation_bytes
    local = shape.batch * plan.local_tokens(tokens)
    q, o, lse = (local * shape.q_heads * width for width in (shape.head_dim, shape.value_dim, 1))
    kv_head = local * (shape.head_dim + shape.value_dim)
    kv = max(shape.kv_heads, heads) * kv_head
    sent = kv_bytes(plan, shape, tokens) if quantizes(plan, shape, tokens) else kv * size
    block_wise = ALGORITHMS[plan.kind].overlaps(plan)
    across = min(2, columns) if block_wise else columns
    passing = block_wise and columns == 1
    down = min(2, rows) if passing else rows
    exchanged = (q + shape.kv_heads * kv_head) * size if heads > 1 else 0

    def gathered(nbytes: int, blocks: int) -> int:
        return nbytes * blocks if blocks > 1 else 0  # its own block is saved already

    keys = gathered(sent, down)
    if quantizes(plan, shape, tokens):
        keys += (1 if passing else down) * kv * size
    merged = across * (o + lse) * sum_size if block_wise else gathered(o * size + lse * sum_size, across)
    return AttentionMemory(
        saved=(q + o) * size + sent + lse * sum_size,
        forward=exchanged + gathered(q * size, across) + merged + keys,
        backward=exchanged
        + o * size
        + gathered((q + 2 * o) * size + lse * sum_size, across)
        + across * q * sum_size
        + keys
        + down * kv * sum_size,
    )


def channels(
    plan: SequencePlan, fabric: Fabric, links: Mapping[Axis, Link] | None = None, tensor_parallel: int = 1
) -> dict[Axis, Channel]:
    """Links of each axis of the grid. `links` gives an axis its own link instead of the fabric's; the
    transposition takes the slower of its row's and its column's."""
    given = dict(links or {})
    of_plane = [given[axis] for axis in ("row", "column") if axis in given]
    if of_plane:
        given.setdefault("plane", min(of_plane, key=lambda link: link.bandwidth))
    return {
        axis: Channel(ranks, ranks, given[axis], given[axis])
        if axis in given
        else fabric.channel(ranks, distance, plan.ranks * tensor_parallel)
        for axis, (ranks, distance) in axis_ranks(plan, tensor_parallel).items()
    }


def seconds(
    plan: SequencePlan,
    shape: AttentionShape,
    tokens: int,
    device: Device,
    through: Mapping[Axis, Channel],
) -> AttentionSeconds:
    """Time of one layer's attention on the slowest rank."""
    pairs = shape.visible_pairs(tokens) * shape.q_heads * shape.batch / plan.ranks
    head, value = shape.head_dim, shape.value_dim
    calls = ALGORITHMS[plan.kind].kernel_calls(plan, shape) * device.call
    # forward: q kᵀ, p v; backward: q kᵀ, do vᵀ, pᵀ do, ds k, dsᵀ q
    forward = pairs * (2 * head + 2 * value) / device.flops + calls
    backward = pairs * (6 * head + 4 * value) / device.flops + calls
    first = _pass(plan, shape, tokens, through, forward, backward=False)
    return AttentionSeconds(first, _pass(plan, shape, tokens, through, backward, backward=True), forward + backward)


def _pass(
    plan: SequencePlan,
    shape: AttentionShape,
    tokens: int,
    through: Mapping[Axis, Channel],
    compute: float,
    backward: bool,
) -> float:
    sent = [m for m in messages(plan, shape, tokens, slowest(plan)) if m.backward == backward]
    outside = sum(through["heads"].exchange(m.nbytes) for m in sent if m.axis == "heads")
    outside += sum(through["plane"].hop(m.nbytes) for m in sent if m.axis == "plane")
    inner = [m for m in sent if m.axis in ("row", "column")]
    if not ALGORITHMS[plan.kind].overlaps(plan):
        sides = (through[m.axis].exchange if m.results else through[m.axis].gather for m in inner)
        return outside + compute + sum(take(m.nbytes) for take, m in zip(sides, inner, strict=True))
    block = {(m.axis, m.results): through[m.axis].hop(m.nbytes / m.peers) for m in inner}
    return outside + _overlapped(
        plan,
        compute,
        keys=block.get(("column", False), 0.0),
        key_sums=block.get(("column", True), 0.0),
        queries=block.get(("row", False), 0.0),
        results=block.get(("row", True), 0.0),
    )


def _overlapped(
    plan: SequencePlan, compute: float, *, keys: float, key_sums: float, queries: float, results: float
) -> float:
    """Alg. 4 and 8 with `compute` seconds of arithmetic; the others are the times of one block's message.

    Own queries against the column's keys as these arrive, while the first foreign queries do; then each foreign block
    of queries against all keys, while the next one arrives and the last one's results leave. Gradients of keys leave
    block by block next to the last block of queries; in a single column, next to all.
    """
    _, rows, columns = plan.grid
    tile = compute / (rows * columns)
    if columns == 1:
        return (rows - 1) * max(tile, keys + key_sums) + tile + key_sums
    gathering = max((rows - 1) * max(tile, keys) + tile, (rows - 1) * keys + queries)
    first = max(rows * tile, queries) if columns > 2 else 0.0
    between = (columns - 3) * max(rows * tile, queries + results) if columns > 3 else 0.0
    last = max((rows - 1) * max(tile, key_sums) + tile, results if columns > 2 else 0.0)
    return gathering + first + between + last + results


def lower_bound(shape: AttentionShape, tokens: int, ranks: int, causal: bool = False) -> WireBytes:
    """Bytes that a rank of `ranks` must receive at least, in the mean, for sequences of `tokens`, with any algorithm.
    `causal` halves the pairs, not `shape.causal`.

    A device that scores S pairs of one key/value head, seen by u (query head, token) pairs and v tokens, has S ≤ u · v:
    a set is no larger than the product of its projections. It needs the q of all u and the k and v of all v, and for
    each of the u a part of the output leaves it. Tokens are sharded, so of each head it owns G · n queries and n keys
    (G = Hq / Hkv, n = N / P); all else travels. With equal work, each device scores Hq · N² / P pairs. The least number
    of words over all choices of u and v per key/value head follows exactly, since the work that a head gains grows

    - ever faster with what is spent on it, while n · G is the smaller side: best is to fill head after head, at the end
      4 · N · D · √(Hq / P) for P ≥ Hq, which a grid reaches after heads are exchanged; or
    - first by rows of the owned queries, then slower, where one rank's queries are more than the keys of a sequence
      (G > P): best is to gather keys of all heads, as a ring does.

    Backward, do is needed and dq leaves for each query, dk and dv leave for each key; the tensors of forward may have
    been kept, as Ulysses keeps them, and δ and log-sum-exps travel free.

    Heuristic: it takes work as equal on all devices, so it bounds their mean, received and sent alike, and it does not
    let a device compute a projection again instead of receiving it. Under a causal mask half the pairs are scored, so
    that in the limit 1 / √2 of the words suffice; but only tiles entirely below the diagonal could do with them. Tiles
    of cyclic or zigzag tokens are half masked, so no plan here can come nearer than the bound of full attention.
    """
    each = (shape.head_dim + shape.value_dim) * shape.dtype_bytes  # q and o, k and v, do and dq, dk and dv
    least = shape.batch * tokens * each * _least(shape, ranks, causal)
    return WireBytes(least, least)


def _least(shape: AttentionShape, ranks: int, causal: bool) -> float:
    """The least number of queries and keys of one head together, in units of N; work is their product."""
    heads = shape.kv_heads
    low, low_cap = 1 / ranks, 1.0  # keys: what is owned, and all there is; queries are as many times the groups
    high, high_cap = shape.groups / ranks, float(shape.groups)
    work = shape.q_heads / ranks / (2 if causal else 1) - heads * low * high
    if work <= 0:
        return 0.0  # what a device owns is enough
    if low_cap <= high:  # the short side is filled before the sides are equal: from there each word scores less
        first = heads * (low_cap - low) * high
        return min(work, first) / high + max(0.0, work - first) / low_cap
    whole = low_cap * high_cap - low * high
    filled, rest = divmod(work, whole)
    return filled * (low_cap - low + high_cap - high) + _one_head(rest, low, high, min(low_cap, high_cap))


def _one_head(work: float, low: float, high: float, cap: float) -> float:
    """Cost of `work` more than low · high on one head: the short side grows until both are equal, then both until the
    lesser is full at `cap`, then the other."""
    product = low * high + work
    if product <= high * high:
        return product / high - low
    equal = math.sqrt(product)
    return (2 * equal if equal <= cap else cap + product / cap) - low - high
