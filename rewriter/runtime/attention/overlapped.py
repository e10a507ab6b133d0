"""Attention2D with overlap (arXiv 2503.15758, Alg. 4 to 6 and 8 to 11) on a plane of r rows × c columns, any r and c.

The layouts and the bytes are those of `rewriter.runtime.attention.plane`, but blocks are computed while the next ones
are on their way: first a rank's own queries with each block of keys and values of its column as it arrives, then each
block of queries of its row with all of these. Of the row's queries only the block in use and the one that arrives are
in memory. In backward, the gradients of a block of keys and values are finished by the last block of queries and sent
while it goes on with the next (Alg. 11).

A block of queries are those t ≡ i + r·j' (mod rc), one of keys and values those t ≡ c·i' + j: equal steps, one kernel
call under a causal mask. Blocks of a column are laid together in the order of positions, t ≡ j (mod c), so that the
later blocks of queries are one tile with all of them: one kernel call for any mask but the causal one, whose staircase
of r steps (section 4.1 of the paper) is r calls.

One thing differs from the paper. There, partial results pass from neighbour to neighbour, each of which adds its own;
here each goes straight to its owner, who merges in the accumulation dtype. That is as many bytes, but a value is
rounded to the dtype of the wire once instead of up to c − 1 times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewriter.runtime.attention import sinks as sink_logits
from rewriter.runtime.attention.call import Call
from rewriter.runtime.attention.grid import Grid
from rewriter.runtime.attention.layout import Run
from rewriter.runtime.attention.line import Line, Returns
from rewriter.runtime.attention.merge import Merger, unseen
from rewriter.runtime.attention.plane import to_columns, to_rows
from rewriter.runtime.attention.tiles import Gradients, accumulation_dtype, tile_backward, tile_forward
from rewriter.runtime.attention.wire import Tensors


def forward(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: Call, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_BHSE, lse_BHS, k_kept, v_kept); see `rewriter.runtime.attention.call`. Alg. 4."""
    grid, row, column = call.grid, Line.row(call.grid), Line.column(call.grid)
    blocks = row.blocks((q_BHSD,), "overlapped.q")
    next(blocks)  # the own queries: the next ones are on their way from here on
    k_kept, v_kept = to_rows([k_BKSD, v_BKSE], grid)
    merger = Merger()
    merger.add(*unseen(q_BHSD, v_BKSE))
    gathered = _Column((k_kept, v_kept), grid)
    queries = _queries(grid, grid.column, q_BHSD)
    for i, (k, v) in column.blocks((k_kept, v_kept), "overlapped.kv"):  # Alg. 5
        part = tile_forward(q_BHSD, k, v, queries, gathered.run(i), call.seen, call.scale)
        if part is not None:
            merger.add(*part)
        gathered.put(i, (k, v))

    def add(lse_part: Tensor, o_part: Tensor) -> None:
        merger.add(o_part, lse_part)

    outputs = Returns(row, "overlapped.o", add)
    for j, block in blocks:  # Alg. 6
        outputs.send(_partial_output(block[0], _queries(grid, j, q_BHSD), gathered, call), row.distance(j))
        del block  # before the next but one sets out
    outputs.finish()
    o, lse = merger.result()
    if sinks_H is not None:
        o, lse = sink_logits.fold(o, lse, sinks_H)
    return o.to(q_BHSD.dtype), lse, k_kept, v_kept


def backward(
    do_BHSE: Tensor, q_BHSD: Tensor, k_kept: Tensor, v_kept: Tensor, o_BHSE: Tensor, lse_BHS: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); see `rewriter.runtime.attention.call`. Alg. 8."""
    grid, dtype, row, column = call.grid, q_BHSD.dtype, Line.row(call.grid), Line.column(call.grid)
    own = lse_BHS, do_BHSE, q_BHSD, o_BHSE
    blocks = row.blocks(own, "overlapped.q")
    next(blocks)
    dq = _sums(q_BHSD)
    gathered = _Column((k_kept, v_kept), grid)
    totals = tuple(map(_sums, gathered.all)) if grid.columns > 1 else None

    def sums(i: int) -> Tensors:
        """(dk, dv) of the keys of row i. They are summed over blocks of queries, where there are several."""
        if totals is None:
            return _sums(k_kept), _sums(v_kept)
        return tuple(total[:, :, i :: grid.rows] for total in totals)

    own_dkv = sums(grid.row)

    def add_keys(*parts: Tensor) -> None:
        for total, part in zip(own_dkv, parts, strict=True):
            total += part

    def add_queries(part: Tensor) -> None:
        nonlocal dq
        dq += part

    keys, queries = Returns(column, "overlapped.dkv", add_keys), Returns(row, "overlapped.dq", add_queries)
    for i, kv in column.blocks((k_kept, v_kept), "overlapped.kv"):  # Alg. 9
        dkv = own_dkv if i == grid.row else sums(i)
        _add_gradients(own, kv, _queries(grid, grid.column, q_BHSD), gathered.run(i), call, Gradients(dq, *dkv))
        gathered.put(i, kv)
        if i != grid.row and row.size == 1:
            keys.send(_rounded(dkv, dtype), column.distance(i))
        del kv, dkv
    for j, block in blocks:  # Alg. 10
        dq_part, at = _sums(q_BHSD), _queries(grid, j, q_BHSD)
        if totals is not None and row.distance(j) + 1 < row.size:
            _add_gradients(block, gathered.all, at, gathered.run(), call, Gradients(dq_part, *totals))
        else:  # Alg. 11: the own keys last, others wait for theirs
            for places in (*range(1, grid.rows), 0):
                i = (grid.row + places) % grid.rows
                dkv = sums(i)
                _add_gradients(block, gathered.block(i), at, gathered.run(i), call, Gradients(dq_part, *dkv))
                if places:
                    keys.send(_rounded(dkv, dtype), places)
        del block
        queries.send(_rounded((dq_part,), dtype), row.distance(j))
    keys.finish()
    dk, dv = to_columns(_rounded(own_dkv, dtype), grid)
    queries.finish()
    return dq.to(dtype), dk, dv


def _queries(grid: Grid, j: int, q_BHSD: Tensor) -> Run:
    """Positions of the queries that column j of this row holds."""
    return Run(grid.row + grid.rows * j, grid.rows * grid.columns, q_BHSD.shape[2])


class _Column:
    """Tensors [B, K, n, D] of the rows of this column, gathered as [B, K, n·r, D] in the order of positions.

    Nothing is gathered where there is nothing to gather (r = 1) or no later block of queries to use it (c = 1).
    """

    def __init__(self, own: Tensors, grid: Grid) -> None:
        self.grid, self.tokens, self.all = grid, own[0].shape[2], own
        self.gathers = grid.rows > 1 and grid.columns > 1
        if self.gathers:
            self.all = tuple(x.new_empty(*x.shape[:2], self.tokens * grid.rows, x.shape[3]) for x in own)

    def put(self, i: int, block: Tensors) -> None:
        """The block of row i."""
        if self.gathers:
            for held, x in zip(self.block(i), block, strict=True):
                held.copy_(x)

    def block(self, i: int) -> Tensors:
        """Views of the tokens of row i."""
        return tuple(x[:, :, i :: self.grid.rows] for x in self.all)

    def run(self, i: int | None = None) -> Run:
        """Positions of the tokens of row i, or of all rows."""
        rows, columns, column = self.grid.rows, self.grid.columns, self.grid.column
        if i is None:
            return Run(column, columns, self.tokens * rows)
        return Run(columns * i + column, rows * columns, self.tokens)


def _partial_output(q_BHSD: Tensor, queries: Run, gathered: _Column, call: Call) -> Tensors:
    """(lse, o) of a block of queries over the keys of this column, as they travel."""
    k, v = gathered.all
    part = tile_forward(q_BHSD, k, v, queries, gathered.run(), call.seen, call.scale)
    o, lse = unseen(q_BHSD, v) if part is None else part
    return lse, o.to(q_BHSD.dtype)


def _sums(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=accumulation_dtype(like.dtype))


def _rounded(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tuple(x.to(dtype).contiguous() for x in tensors)


def _add_gradients(block: Tensors, kv: Tensors, queries: Run, keys: Run, call: Call, into: Gradients) -> None:
    """Add what a block of queries gives with keys and values."""
    lse, do, q, o = block
    k, v = kv
    tile_backward(do, q, k, v, o, lse, queries, keys, call.seen, call.scale, into)
