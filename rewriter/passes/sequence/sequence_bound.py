"""The least that ranks can exchange for one layer's attention, with any algorithm: what plans are compared with.

A device that scores S pairs of one key/value head, seen by u (query head, token) pairs and v tokens, has S ≤ u · v: a
set is no larger than the product of its projections. It needs the q of all u and the k and v of all v, and for each
of the u a part of the output leaves it. Tokens are sharded, so of each head it owns G · n queries and n keys (G = Hq /
Hkv, n = N / P); all else travels. With equal work, each device scores Hq · N² / P pairs. The least number of words over
all choices of u and v per key/value head follows exactly, since the work that a head gains grows

- ever faster with what is spent on it, while n · G is the smaller side: best is to fill head after head, at the end
  4 · N · D · √(Hq / P) for P ≥ Hq, which a grid reaches after heads are exchanged; or
- first by rows of the owned queries, then slower, where one rank's queries are more than the keys of a sequence
  (G > P): best is to gather keys of all heads, as a ring does.

Backward, do is needed and dq leaves for each query, dk and dv leave for each key; the tensors of forward may have been
kept, as Ulysses keeps them, and δ and log-sum-exps travel free.

Where the bound is heuristic: it takes work as equal on all devices, so it bounds their mean, received and sent alike,
and it does not let a device compute a projection again instead of receiving it. Under a causal mask half the pairs are
scored, so that in the limit 1 / √2 of the words suffice; but only tiles entirely below the diagonal could do with them.
Tiles of cyclic or zigzag tokens are half masked, so no plan here can come nearer than the bound of full
attention.
"""

from __future__ import annotations

import math

from rewriter.passes.sequence.attention_shape import AttentionShape, WireBytes


def lower_bound(shape: AttentionShape, tokens: int, ranks: int, causal: bool = False) -> WireBytes:
    """Bytes that a rank of `ranks` must receive at least, in the mean, for sequences of `tokens`.

    `causal` halves the pairs, not `shape.causal`.
    """
    both = shape.head_dim + shape.value_dim  # q and o, k and v, do and dq, dk and dv
    size, scale = shape.dtype_bytes, shape.batch * tokens
    forward = _least(shape, ranks, causal, both * size, both * shape.kv_bytes)
    backward = _least(shape, ranks, causal, both * size, both * size)
    return WireBytes(scale * forward, scale * backward)


def _least(shape: AttentionShape, ranks: int, causal: bool, query: float, key: float) -> float:
    """The least cost in units of N, when a query of one head costs `query` and a key of one head `key`.

    Sides are measured by their costs, x = `query` · u and y = `key` · v, and work by their products.
    """
    heads = shape.kv_heads
    sides = sorted([(query * shape.groups / ranks, query * shape.groups), (key / ranks, key)])
    (low, low_cap), (high, high_cap) = sides  # what is owned, and all there is
    work = query * key * shape.q_heads / ranks / (2 if causal else 1) - heads * low * high
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
