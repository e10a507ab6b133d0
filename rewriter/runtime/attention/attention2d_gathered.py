"""Attention2D without overlap (arXiv 2503.15758, Alg. 1 to 3) on r rows × c columns, any r and c.

Rank (i, j) holds the tokens t ≡ i + r·j (mod rc). Gathered within its row, queries are those t ≡ i (mod r). Keys and
values move first, from the rank that holds class c·i + j to rank (i, j); gathered within a column they are then those
t ≡ j (mod c). One tile of scores per rank; partial outputs go back to the ranks of the row, each merges its own. c = 1
gathers keys and values alone, r = 1 queries alone: nothing moves first.

Per rank, what others send (n tokens, H query and K key/value heads, e bytes of the dtype, ℓ of the lse):

    forward     [class moves] · n·K(D+E)e + (c−1)·nHDe + (r−1)·nK(D+E)e + (c−1)·nH(Ee + ℓ)
    backward    (c−1)·nH((D+2E)e + ℓ) + (r−1)·nK(D+E)e + (c−1)·nHDe + (r−1)·nK(D+E)e + [class moves] · nK(D+E)e

Partial results travel in q's dtype and are summed in fp32 (fp64 for fp64) where they arrive: a sum that travels is
rounded at each step, and in bf16 that alone is beyond twice the error of one device. Saved are q, the moved k and v, o
and lse (Alg. 1, line 7); backward gathers again. Of quantized keys and values, K(D+E)e of `to_rows` and of the gathers
is the bytes of K vectors, and these are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.ir.sequence_plan import TokenRun
from rewriter.kernels import accumulation_dtype, merge
from rewriter.runtime.attention.attention_call import AttentionCall, KeysAndValues, OwnTensors
from rewriter.runtime.attention.exchanges import interleaved
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.partial_merge import unseen
from rewriter.runtime.attention.tiles import Gradients, tile_backward, tile_forward
from rewriter.runtime.collectives.exchange import Transfer, all_to_all_start, exchange_start, gather_start


def forward(
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


def backward(own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
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
    """To each rank of `group` its tokens r, r + ranks, … of sorted ones, in `dtypes`; the own ones stay as exact as
    they are."""
    parts = [[t[:, :, rank::ranks] for t in tensors] for rank in range(ranks)]
    return all_to_all_start(parts, group, name, dtypes)


def summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of what several ranks found, made in the accumulation dtype and rounded once to `dtype`."""
    return functools.reduce(torch.add, parts[1:], parts[0].to(accumulation_dtype(dtype))).to(dtype)
