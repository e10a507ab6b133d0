"""Attention2D with overlap (arXiv 2503.15758, Alg. 4 to 6 and 8 to 11) on r rows × c columns, any r and c.

The layouts and the bytes are those of `attention2d`, but blocks are computed while the next ones are on their way:
first a rank's own queries with each block of keys and values of its column as it arrives, then each block of queries of
its row with all of these. Of the row's queries only the block in use and the one that arrives are in memory. In
backward, the gradients of a block of keys and values are finished by the last block of queries and sent while it goes
on with the next (Alg. 11).

A block of queries are those t ≡ i + r·j' (mod rc), one of keys and values those t ≡ c·i' + j: equal steps, one kernel
call, on blocks that stay where they arrived. (Under a causal mask, a column's keys in one tile would be a staircase of
r steps, section 4.1 of the paper, and as many calls.)

One thing differs from the paper. There, partial results pass from neighbour to neighbour, each of which adds its own;
here each goes straight to its owner, who merges in the accumulation dtype. That is as many bytes, but a value is
rounded to the dtype of the wire once instead of up to c − 1 times.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rewriter.ir.sequence_plan import TokenRun
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.attention2d_gathered import to_columns, to_rows
from rewriter.runtime.attention.attention_call import AttentionCall, KeysAndValues, OwnTensors
from rewriter.runtime.attention.exchanges import Returns, RingExchange
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.partial_merge import Merger, merge_in_turn, unseen
from rewriter.runtime.attention.tiles import Gradients, tile_backward, tile_forward
from rewriter.runtime.collectives.exchange import Tensors


def forward(
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


def backward(own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
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


def _runs(mesh: AttentionMesh, j: int, i: int, tokens: int) -> tuple[TokenRun, TokenRun]:
    """Positions of the queries that column j of this row holds, and of the keys that row i of this column keeps."""
    ranks = mesh.rows * mesh.columns
    return TokenRun(mesh.row + mesh.rows * j, ranks, tokens), TokenRun(mesh.columns * i + mesh.column, ranks, tokens)


def _output(q_BHSD: Tensor, kv: Tensors, j: int, i: int, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of column j over the keys of row i."""
    k, v = kv
    part = tile_forward(q_BHSD, k, v, *_runs(call.mesh, j, i, q_BHSD.shape[2]), call.seen, call.scale)
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
    tile_backward(do, q, k, v, o, lse, *_runs(call.mesh, j, i, q.shape[2]), call.seen, call.scale, into)


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))
