"""Attention2D (arXiv 2503.15758) on r rows × c columns of ranks, any r and c: gathered (Alg. 1 to 3) and overlapped
(Alg. 4 to 6 and 8 to 11).

Rank (i, j) holds the tokens t ≡ i + r·j (mod rc). Keys and values move first, from the rank that holds class c·i + j to
rank (i, j). c = 1 gathers keys and values alone, r = 1 queries alone: nothing moves first.

*Gathered*: of a row, queries are those t ≡ i (mod r), of a column keys and values those t ≡ j (mod c): one tile of
scores per rank. *Overlapped*: blocks are computed while the next ones are on their way, a rank's own queries with each
block of keys and values of its column, then each block of queries of its row with all of these. Of the row's queries
only the block in use and the one that arrives are in memory. In backward, the gradients of a block of keys and values
are finished by the last block of queries and sent while it goes on with the next (Alg. 11). A block of queries are
those t ≡ i + r·j' (mod rc), one of keys and values those t ≡ c·i' + j: equal steps, one kernel call. (Under a causal
mask, a column's keys in one tile would be a staircase of r steps, section 4.1 of the paper, and as many calls.)

Per rank, what others send (n tokens, H query and K key/value heads, e bytes of the dtype, ℓ of the lse):

    forward     [class moves] · n·K(D+E)e + (c−1)·nHDe + (r−1)·nK(D+E)e + (c−1)·nH(Ee + ℓ)
    backward    (c−1)·nH((D+2E)e + ℓ) + (r−1)·nK(D+E)e + (c−1)·nHDe + (r−1)·nK(D+E)e + [class moves] · nK(D+E)e

Partial results go straight to their owners in q's dtype and are summed in fp32 (fp64 for fp64) where they arrive. In
the paper they pass from neighbour to neighbour: as many bytes, but a sum that travels is rounded at each step, and in
bf16 that alone is beyond twice the error of one device. Saved are q, the moved k and v, o and lse (Alg. 1, line 7);
backward gathers again. Of quantized keys and values, K(D+E)e of `to_rows` and of the gathers is the bytes of K vectors,
and these are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.ir.sequence_plan import TokenRun
from rewriter.kernels import accumulation_dtype, merge
from rewriter.runtime.attention.attention_call import AttentionCall, KeysAndValues, OwnTensors, RankAttention
from rewriter.runtime.attention.exchanges import Returns, RingExchange, interleaved
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.partial_merge import Merger, merge_in_turn, unseen
from rewriter.runtime.attention.tiles import Gradients, tile_backward, tile_forward
from rewriter.runtime.collectives.exchange import Tensors, Transfer, all_to_all_start, exchange_start, gather_start


def gathered_forward(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_BHSE, lse_BHS, k_kept, v_kept) of `RankAttention`. Alg. 1."""
    mesh = call.mesh
    coming_q = gather_start([q_BHSD], mesh.in_row, "attention2d.q")
    k_kept, v_kept = to_rows([k_BKSD, v_BKSE], mesh)
    k, v = call.opened(interleaved(gather_start([k_kept, v_kept], mesh.in_column, "attention2d.kv").wait()))
    (q,) = interleaved(coming_q.wait())
    del coming_q  # and with it what arrived, now copied in order
    part = tile_forward(q, k, v, *runs(mesh, q_BHSD.shape[2]), call.seen, call.scale)
    o, lse = unseen(q, v) if part is None else part  # no query of this row sees a key of this column
    del k, v, q, part
    coming = scatter_start([lse, o], [lse.dtype, q_BHSD.dtype], mesh.columns, mesh.in_row, "attention2d.o")
    parts = [(o, lse) for lse, o in coming.wait()]
    # rounded to q's dtype as it is written, unless something is still to be done with it in fp32
    o, lse = merge(parts, dtype=q_BHSD.dtype if call.sinks_H is None else None)
    return *call.finished(o, lse, q_BHSD.dtype), k_kept, v_kept


def gathered_backward(own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `RankAttention`. Alg. 3."""
    mesh, dtype, tokens = call.mesh, own.q_BHSD.dtype, own.q_BHSD.shape[2]
    coming_q = gather_start([own.lse_BHS, own.q_BHSD, own.o_BHSE, own.do_BHSE], mesh.in_row, "attention2d.q")
    k, v = call.opened(interleaved(gather_start(kept, mesh.in_column, "attention2d.kv").wait()))
    lse, q, o, do = interleaved(coming_q.wait())
    del coming_q  # and with it what arrived, now copied in order
    into = Gradients(*(torch.zeros_like(x, dtype=accumulation_dtype(dtype)) for x in (q, k, v)))
    tile_backward(do, q, k, v, o, lse, *runs(mesh, tokens), call.seen, call.scale, into)
    del k, v, q, o, do, lse
    coming_dq = scatter_start([into.dq], [dtype], mesh.columns, mesh.in_row, "attention2d.dq")
    dkv = [into.dk, into.dv]
    coming_dkv = scatter_start(dkv, [dtype, dtype], mesh.rows, mesh.in_column, "attention2d.dkv")
    dk, dv = (summed(parts, dtype) for parts in zip(*coming_dkv.wait(), strict=True))
    dk, dv = to_columns([dk, dv], mesh)
    dq = summed([part for (part,) in coming_dq.wait()], dtype)
    return dq, dk, dv


def runs(mesh: AttentionMesh, tokens: int) -> tuple[TokenRun, TokenRun]:
    """The positions of a rank's gathered queries and keys, where each rank holds `tokens`."""
    return TokenRun(mesh.row, mesh.rows, tokens * mesh.columns), TokenRun(mesh.column, mesh.columns, tokens * mesh.rows)


def moves(mesh: AttentionMesh) -> bool:
    """True if this rank's keys and values are another's: class i + r·j is not c·i + j."""
    return mesh.row + mesh.rows * mesh.column != mesh.columns * mesh.row + mesh.column


def to_rows(tensors: Sequence[Tensor], mesh: AttentionMesh) -> tuple[Tensor, ...]:
    """Those of class c·i + j from those of class i + r·j: keys and values in row-major order (Alg. 1, line 1)."""
    return _exchanged(tensors, mesh, False, "attention2d.to_rows")


def to_columns(tensors: Sequence[Tensor], mesh: AttentionMesh) -> tuple[Tensor, ...]:
    """The way back of `to_rows` (Alg. 3, line 6)."""
    return _exchanged(tensors, mesh, True, "attention2d.to_columns")


def _exchanged(tensors: Sequence[Tensor], mesh: AttentionMesh, back: bool, name: str) -> tuple[Tensor, ...]:
    if not moves(mesh):
        return tuple(tensors)
    by_columns, by_rows = mesh.row + mesh.rows * mesh.column, mesh.columns * mesh.row + mesh.column
    wanted_by = by_columns // mesh.columns + mesh.rows * (by_columns % mesh.columns)
    to, source = (by_rows, wanted_by) if back else (wanted_by, by_rows)
    arrived = exchange_start(tensors, mesh.members[to], mesh.members[source], name, mesh.in_grid).wait()
    return tuple(t.clone() for t in arrived)  # they are kept: without the buffer of the message


def scatter_start(
    tensors: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    ranks: int,
    group: ProcessGroup | None,
    name: str,
) -> Transfer:
    """Begin to send each rank r of `group` its tokens r, r + ranks, … of sorted ones, in `dtypes`; the own ones are not
    rounded."""
    parts = [[t[:, :, rank::ranks] for t in tensors] for rank in range(ranks)]
    return all_to_all_start(parts, group, name, dtypes)


def summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of several ranks' parts, made in the accumulation dtype and rounded once to `dtype`."""
    return functools.reduce(torch.add, parts[1:], parts[0].to(accumulation_dtype(dtype))).to(dtype)


# --- overlapped


def overlapped_forward(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_BHSE, lse_BHS, k_kept, v_kept) of `RankAttention`. Alg. 4."""
    mesh, row, column = call.mesh, RingExchange.row(call.mesh), RingExchange.column(call.mesh)
    blocks = row.blocks((q_BHSD,), "overlap.q")
    next(blocks)  # the own queries: the next ones are on their way from here on
    k_kept, v_kept = to_rows([k_BKSD, v_BKSE], mesh)
    merger = Merger()
    gathered: list[tuple[int, Tensors]] = []
    for i, arrived in column.blocks((k_kept, v_kept), "overlap.kv"):  # Alg. 5
        kv = call.opened(arrived)
        merger.add(*_output(q_BHSD, kv, mesh.column, i, call))
        if row.size > 1:
            gathered.append((i, kv))
        del arrived, kv  # before the next but one sets out

    def add(lse_part: Tensor, o_part: Tensor) -> None:
        merger.add(o_part, lse_part)

    outputs, dtypes = Returns(row, "overlap.o", add), (accumulation_dtype(q_BHSD.dtype), q_BHSD.dtype)
    for j, (q,) in blocks:  # Alg. 6
        outputs.send(_partial_output(q, gathered, j, call), dtypes, row.distance(j))
        del q
    outputs.finish()
    return *call.finished(*merger.result(), q_BHSD.dtype), k_kept, v_kept


def overlapped_backward(own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `RankAttention`. Alg. 8."""
    mesh, row, column = call.mesh, RingExchange.row(call.mesh), RingExchange.column(call.mesh)
    q_BHSD, dtype = own.q_BHSD, own.q_BHSD.dtype
    blocks = row.blocks(own, "overlap.q")
    next(blocks)
    own_dq = _zeros(q_BHSD, q_BHSD.shape)
    own_dk, own_dv = (_zeros(q_BHSD, (*kept[0].shape[:3], x.shape[3])) for x in (q_BHSD, own.do_BHSE))

    def add_keys(dk_part: Tensor, dv_part: Tensor) -> None:
        own_dk.add_(dk_part)
        own_dv.add_(dv_part)

    keys, queries = Returns(column, "overlap.dkv", add_keys), Returns(row, "overlap.dq", own_dq.add_)
    gathered: list[tuple[int, KeysAndValues, Tensor, Tensor]] = []
    for i, arrived in column.blocks(kept, "overlap.kv"):  # Alg. 9
        kv = call.opened(arrived)
        dk, dv = (own_dk, own_dv) if i == mesh.row else (_zeros(x, x.shape) for x in kv)
        _add_gradients(own, kv, Gradients(own_dq, dk, dv), mesh.column, i, call)
        if row.size > 1:
            gathered.append((i, kv, dk, dv))
        elif i != mesh.row:
            keys.send((dk, dv), (dtype, dtype), column.distance(i))
        del arrived, kv, dk, dv  # before the next but one sets out
    gathered = gathered[1:] + gathered[:1]  # the own keys last: others wait for the gradients of theirs
    for j, block in blocks:  # Alg. 10
        dq = _zeros(q_BHSD, q_BHSD.shape)
        for i, kv, dk, dv in gathered:
            _add_gradients(block, kv, Gradients(dq, dk, dv), j, i, call)
            if i != mesh.row and row.distance(j) == row.size - 1:  # Alg. 11
                keys.send((dk, dv), (dtype, dtype), column.distance(i))
        queries.send((dq,), (dtype,), row.distance(j))
        del block, dq
    keys.finish()
    dk, dv = to_columns([own_dk.to(dtype), own_dv.to(dtype)], mesh)
    queries.finish()
    return own_dq.to(dtype), dk, dv


def _block_runs(mesh: AttentionMesh, j: int, i: int, tokens: int) -> tuple[TokenRun, TokenRun]:
    """Positions of the queries that column j of this row holds, and of the keys that row i of this column keeps."""
    ranks = mesh.rows * mesh.columns
    return TokenRun(mesh.row + mesh.rows * j, ranks, tokens), TokenRun(mesh.columns * i + mesh.column, ranks, tokens)


def _output(q_BHSD: Tensor, kv: Tensors, j: int, i: int, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of column j over the keys of row i."""
    k, v = kv
    part = tile_forward(q_BHSD, k, v, *_block_runs(call.mesh, j, i, q_BHSD.shape[2]), call.seen, call.scale)
    return unseen(q_BHSD, v) if part is None else part


def _partial_output(q_BHSD: Tensor, gathered: list[tuple[int, Tensors]], j: int, call: AttentionCall) -> Tensors:
    """(lse, o) of the queries of column j over the keys of this column."""
    parts = (_output(q_BHSD, kv, j, i, call) for i, kv in gathered)
    o, lse = merge_in_turn(parts) if len(gathered) > 1 else next(parts)
    return lse, o


def _add_gradients(block: Tensors, kv: Tensors, into: Gradients, j: int, i: int, call: AttentionCall) -> None:
    """Add what the queries (do, q, o, lse) of column j give with the keys of row i."""
    do, q, o, lse = block
    k, v = kv
    tile_backward(do, q, k, v, o, lse, *_block_runs(call.mesh, j, i, q.shape[2]), call.seen, call.scale, into)


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))


GATHERED = RankAttention(gathered_forward, gathered_backward)
OVERLAPPED = RankAttention(overlapped_forward, overlapped_backward)
