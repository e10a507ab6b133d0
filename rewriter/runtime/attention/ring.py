"""Zigzag ring attention (arXiv 2310.01889, balanced as in Megatron's and Transformer Engine's): the baseline.

Of 2P equal chunks of a sequence, rank p holds chunks p and 2P − 1 − p. Keys and values of all ranks come by in P steps,
from one neighbour to the other; the next are on their way while the present ones are used. Under a causal mask a rank
sees, of what an earlier rank holds, the first chunk with both of its own, and of what a later rank holds both chunks
with its second: a full rectangle of equal area and one kernel call, at every step on every rank.

In backward keys and values go round again, followed by the sums of their gradients, in the accumulation dtype. A
sum starts at the rank after the owner of its keys and takes P − 1 steps back to it, where the owner's part is added. Of
that part the owner computes one half at the start, while the first keys are on their way to it, the other at the end,
while the sum is: nothing travels that no computation hides.

Bytes per rank, with n tokens, K key/value heads, e bytes of the dtype and a of the accumulation dtype:

    forward     (P−1)·nK(D+E)e
    backward    (P−1)·nK(D+E)e + (P−1)·nK(D+E)a

Quantized keys and values: the bytes of nK vectors instead of nK(D+E)e; gradients go round as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rewriter.ir.ops import MaskSpec
from rewriter.ir.sequence_plan import TokenRun, runs
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.attention_call import AttentionCall, KeysAndValues, OwnTensors, RankAttention
from rewriter.runtime.attention.exchanges import RingExchange
from rewriter.runtime.attention.partial_merge import Merger, unseen
from rewriter.runtime.attention.tiles import Gradients, Visibility, tile_backward, tile_forward
from rewriter.runtime.collectives.exchange import Tensors, Transfer, pack, unpack


def forward(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_BHSE, lse_BHS, k_kept, v_kept) of `RankAttention`. k and v are kept as they are."""
    merger = Merger()
    for source, arrived in _rounds((k_BKSD, v_BKSE), RingExchange.column(call.mesh)):
        k, v = call.opened(arrived)
        if source == call.mesh.row:  # the first of all
            merger.add(*unseen(q_BHSD, v))
        for tile in _tiles(call, source, q_BHSD.shape[2]):
            part = tile_forward(
                q_BHSD[:, :, tile.rows],
                k[:, :, tile.columns],
                v[:, :, tile.columns],
                *(tile.queries, tile.keys, tile.seen, call.scale),
            )
            if part is not None:
                merger.add(*part, tile.rows)
        del arrived, k, v  # before the next but one set out
    return *call.finished(*merger.result(), q_BHSD.dtype), k_BKSD, v_BKSE


def backward(own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `RankAttention`."""
    ring, q_BHSD = RingExchange.column(call.mesh), own.q_BHSD
    dtype, sums = q_BHSD.dtype, accumulation_dtype(q_BHSD.dtype)
    dq = torch.zeros_like(q_BHSD, dtype=sums)
    dk, dv = (q_BHSD.new_zeros(*kept[0].shape[:3], x.shape[3], dtype=sums) for x in (q_BHSD, own.do_BHSE))
    kv_heads = kept[0].shape[1]
    at_start, at_end = slice(0, -(-kv_heads // 2)), slice(-(-kv_heads // 2), kv_heads)
    coming: Transfer | None = None  # the sum that this rank is the next to add to
    for source, arrived in _rounds(kept, ring):
        k, v = call.opened(arrived)
        if source == ring.place:
            _add_gradients(own, k, v, Gradients(dq, dk, dv), call, source, at_start)
            continue
        message = k.new_zeros(k.numel() + v.numel(), dtype=sums)
        into = Gradients(dq, *_views(message, k, v))
        _add_gradients(own, k, v, into, call, source, slice(0, kv_heads))
        if coming is not None:
            message += coming.wait()[0]
        coming = ring.shift(message, 1, "ring.dkv")
        del arrived, k, v, message, into
    _add_gradients(own, *call.opened(kept), Gradients(dq, dk, dv), call, ring.place, at_end)
    if coming is not None:
        for total, part in zip((dk, dv), _views(coming.wait()[0], dk, dv), strict=True):
            total += part
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _rounds(own: Tensors, ring: RingExchange) -> Iterator[tuple[int, Tensors]]:
    """(owner, its `own`) of every rank, this one first, then from its neighbour what that had before. The next ones are
    already on their way whenever some are given."""
    message = pack(own) if ring.size > 1 else own[0]
    for step in range(ring.size):
        coming = ring.shift(message, 1, "ring.kv") if step + 1 < ring.size else None
        yield (ring.place - step) % ring.size, own if step == 0 else unpack(message, own)
        if coming is not None:
            (message,) = coming.wait()


def _views(message: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """The two parts of a message in the shapes of k and v."""
    dk, dv = message.split([k.numel(), v.numel()])
    return dk.view(k.shape), dv.view(v.shape)


def _add_gradients(
    queries: Tensors, k: Tensor, v: Tensor, into: Gradients, call: AttentionCall, source: int, kv_heads: slice
) -> None:
    """Add what the queries (do, q, o, lse) that read `kv_heads` give with the keys of rank `source`."""
    group = into.dq.shape[1] // k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    if heads.start == heads.stop:
        return
    for tile in _tiles(call, source, into.dq.shape[2]):
        do, q, o, lse, dq = (x[:, heads, tile.rows] for x in (*queries, into.dq))
        k_part, v_part, dk, dv = (x[:, kv_heads, tile.columns] for x in (k, v, into.dk, into.dv))
        part = Gradients(dq, dk, dv)
        tile_backward(do, q, k_part, v_part, o, lse, tile.queries, tile.keys, tile.seen, call.scale, part)


@dataclass(frozen=True)
class _Tile:
    """Indices of local queries and of a rank's keys, their positions, and what the former see of the latter."""

    rows: slice
    columns: slice
    queries: TokenRun
    keys: TokenRun
    seen: Visibility


def _tiles(call: AttentionCall, source: int, count: int) -> Iterator[_Tile]:
    """The tiles that the keys of rank `source` give with this rank's `count` queries, none of them certainly empty."""
    place, ranks, seen = call.mesh.row, call.mesh.rows, call.seen
    mine, theirs = (runs("zigzag", rank, ranks, count * ranks) for rank in (place, source))
    chunks = slice(0, count // 2), slice(count // 2, count)
    if not seen.simple:
        for rows, queries in zip(chunks, mine, strict=True):
            for columns, keys in zip(chunks, theirs, strict=True):
                if not seen.none(queries, keys):
                    yield _Tile(rows, columns, queries, keys, seen)
        return
    # Only the order of positions matters, and local tokens are in order: indices stand for positions. Padding is the
    # last of all tokens, hence the last of a rank's, and is cut off.
    real, theirs_real = (sum(run.below(seen.length).count for run in held) for held in (mine, theirs))
    rows, columns = slice(0, real), slice(0, theirs_real)
    if seen.causal and source < place:
        columns = slice(0, min(theirs_real, count // 2))
    elif seen.causal and source > place:
        rows = slice(count // 2, real)
    if rows.start < rows.stop and columns.stop > 0:
        queries, keys = TokenRun(0, 1, rows.stop - rows.start), TokenRun(0, 1, columns.stop)
        spec = MaskSpec("causal" if seen.causal and source == place else "bidirectional")
        yield _Tile(rows, columns, queries, keys, Visibility(spec, max(queries.count, keys.count)))


RING = RankAttention(forward, backward)
