"""Attention2D without overlap (arXiv 2503.15758, Alg. 1 to 3) on a plane of r rows × c columns, any r and c.

Rank (i, j) holds the tokens t ≡ i + r·j (mod rc). Gathered within its row, queries are those t ≡ i (mod r). Keys and
values move first, from the rank that holds class c·i + j to rank (i, j); gathered within a column they are then those
t ≡ j (mod c). One tile of scores per rank; partial outputs go back to the ranks of the row, each merges its own. c = 1
gathers keys and values alone, r = 1 queries alone: nothing moves first.

Per plane and rank, what others send (n tokens, H query and K key/value heads, e bytes of the dtype, ℓ of the lse):

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

from rewriter.runtime.attention import sinks as sink_logits
from rewriter.runtime.attention.attention_call import Call
from rewriter.runtime.attention.mesh import Grid
from rewriter.runtime.attention.partial_merge import merge, unseen
from rewriter.runtime.attention.tiles import Gradients, accumulation_dtype, tile_backward, tile_forward
from rewriter.runtime.attention.token_runs import Run
from rewriter.runtime.exchange import Transfer, all_to_all_start, exchange_start, gather_start


def forward(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: Call, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_BHSE, lse_BHS, k_kept, v_kept); see `rewriter.runtime.attention.attention_call`. Alg. 1."""
    grid = call.grid
    coming_q = gather_start([q_BHSD], grid.in_row, "plane.q")
    k_kept, v_kept = to_rows([k_BKSD, v_BKSE], grid)
    k, v = call.opened(interleaved(gather_start([k_kept, v_kept], grid.in_column, "plane.kv").wait()))
    (q,) = interleaved(coming_q.wait())
    del coming_q  # and with it what arrived, now copied in order
    part = tile_forward(q, k, v, *runs(grid, q_BHSD.shape[2]), call.seen, call.scale)
    if part is None:  # no query of this row sees a key of this column
        part = unseen(q, v)
    del k, v, q
    o, lse = part
    coming = dealt_start([lse, o], [lse.dtype, q_BHSD.dtype], grid.columns, grid.in_row, "plane.o")
    parts = [(o, lse) for lse, o in coming.wait()]
    # rounded to q's dtype as it is written, unless something is still to be done with it in fp32
    o, lse = merge(parts, dtype=q_BHSD.dtype if sinks_H is None else None)
    o, lse = sink_logits.fold(o, lse, sinks_H)
    return o.to(q_BHSD.dtype), lse, k_kept, v_kept


def backward(
    do_BHSE: Tensor, q_BHSD: Tensor, k_kept: Tensor, v_kept: Tensor, o_BHSE: Tensor, lse_BHS: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); see `rewriter.runtime.attention.attention_call`. Alg. 3."""
    grid, dtype = call.grid, q_BHSD.dtype
    coming_q = gather_start([lse_BHS, q_BHSD, o_BHSE, do_BHSE], grid.in_row, "plane.q")
    k, v = call.opened(interleaved(gather_start([k_kept, v_kept], grid.in_column, "plane.kv").wait()))
    lse, q, o, do = interleaved(coming_q.wait())
    del coming_q  # and with it what arrived, now copied in order
    into = Gradients(*(torch.zeros_like(x, dtype=accumulation_dtype(dtype)) for x in (q, k, v)))
    tile_backward(do, q, k, v, o, lse, *runs(grid, q_BHSD.shape[2]), call.seen, call.scale, into)
    del k, v, q, o, do, lse
    coming_dq = dealt_start([into.dq], [dtype], grid.columns, grid.in_row, "plane.dq")
    dkv = [into.dk, into.dv]
    coming_dkv = dealt_start(dkv, [dtype, dtype], grid.rows, grid.in_column, "plane.dkv")
    dk, dv = (summed(parts, dtype) for parts in zip(*coming_dkv.wait(), strict=True))
    dk, dv = to_columns([dk, dv], grid)
    dq = summed([part for (part,) in coming_dq.wait()], dtype)
    return dq, dk, dv


def runs(grid: Grid, tokens: int) -> tuple[Run, Run]:
    """The positions of a rank's gathered queries and keys, where each rank of the plane holds `tokens`."""
    return Run(grid.row, grid.rows, tokens * grid.columns), Run(grid.column, grid.columns, tokens * grid.rows)


def moves(grid: Grid) -> bool:
    """Whether this rank's keys and values are another's: class i + r·j is not c·i + j."""
    return grid.row + grid.rows * grid.column != grid.columns * grid.row + grid.column


def to_rows(tensors: Sequence[Tensor], grid: Grid) -> tuple[Tensor, ...]:
    """Those of class c·i + j from those of class i + r·j: keys and values in row-major order (Alg. 1, line 1)."""
    held, wanted = grid.row + grid.rows * grid.column, grid.columns * grid.row + grid.column
    wanted_by = held // grid.columns + grid.rows * (held % grid.columns)
    return _exchanged(tensors, grid, wanted_by, wanted, "plane.to_rows")


def to_columns(tensors: Sequence[Tensor], grid: Grid) -> tuple[Tensor, ...]:
    """The way back of `to_rows` (Alg. 3, line 6)."""
    wanted, held = grid.row + grid.rows * grid.column, grid.columns * grid.row + grid.column
    held_by = wanted // grid.columns + grid.rows * (wanted % grid.columns)
    return _exchanged(tensors, grid, held, held_by, "plane.to_columns")


def _exchanged(tensors: Sequence[Tensor], grid: Grid, to: int, source: int, name: str) -> tuple[Tensor, ...]:
    """`to` and `source` are places in the plane."""
    if not moves(grid):
        return tuple(tensors)
    arrived = exchange_start(tensors, grid.plane[to], grid.plane[source], name, grid.in_plane).wait()
    return tuple(t.clone() for t in arrived)  # they are kept: without the buffer of the message


def interleaved(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Tensors of sorted tokens from those of several ranks: dimension 2 takes one token of each in turn."""
    return tuple(p[0] if len(p) == 1 else torch.stack(p, 3).flatten(2, 3) for p in zip(*parts, strict=True))


def dealt_start(
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
