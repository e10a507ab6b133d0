"""Attention of a run of queries over a run of keys: one tile of the scores of a sequence that is sharded.

Under a causal mask, queries at positions s + a·σ and keys at t + b·τ (arithmetic progressions) are split by
L = lcm(σ, τ) into classes of step L. A query class at s_u + a·L sees of a key class at t_w + b·L the keys with
b ≤ a + d, d = ⌊(s_u − t_w) / L⌋. On a grid of r × c ranks (σ = r, τ = c) d is 0 or −1: plain or strictly causal. Every
such staircase is cut so that a kernel is called for a full rectangle or a causal square only: kernels disagree about
all others. Other masks go to the kernel as tensors, in blocks of queries of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rewriter.ir.ops import MaskSpec
from rewriter.ir.sequence_plan import TokenRun
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.local import kernel_backward, kernel_forward
from rewriter.runtime.attention.partial_merge import add_part, merged


@dataclass(frozen=True, eq=False)
class Visibility:
    """The mask of a global sequence.

    spec: the rule over positions. length: tokens without the padding at the right; positions from there on are neither
    seen nor see. first_valid: int64 [B], positions below are padding at the left, of which the same holds. segments:
    integers [B, length], packed sequences; a query sees keys of its own segment only. Positions count from the first
    valid token of a row, or from the start of a segment, which only a chunk mask notices.
    """

    spec: MaskSpec
    length: int
    first_valid: Tensor | None = None
    segments: Tensor | None = None

    @property
    def causal(self) -> bool:
        """No query sees a later key."""
        return self.spec.causal

    @property
    def simple(self) -> bool:
        """Causal or bidirectional and nothing else: kernels without a mask suffice."""
        return self.spec.unbounded(self.length) and self.first_valid is None and self.segments is None

    def span(self, queries: TokenRun, keys: TokenRun) -> slice:
        """Indices of `keys` outside which no query of `queries` sees any: a bound from positions alone."""
        queries, keys = queries.below(self.length), keys.below(self.length)
        if queries.count == 0:
            return slice(0, 0)
        stop = keys.below(queries.last + 1).count if self.causal else keys.count
        aligned = self.first_valid is None and self.segments is None
        start = keys.below(self.spec.first_key(queries.start, aligned)).count
        return slice(start, max(start, stop))

    def none(self, queries: TokenRun, keys: TokenRun) -> bool:
        """Certainly no query sees a key, so that the tile can be left out."""
        span = self.span(queries, keys)
        return span.start == span.stop

    def seen(self, queries: TokenRun, keys: TokenRun, device: torch.device | str = "cpu") -> Tensor:
        """Boolean [B or 1, 1, queries, keys]."""
        s, t = queries.positions(device)[None], keys.positions(device)[None]  # [1, queries], [1, keys]
        s_origin, t_origin = self._origin(s), self._origin(t)
        seen = self.spec.visible(s - s_origin, t - t_origin)
        if self.segments is not None:
            seen = seen & (
                self._of_token(self.segments, s)[..., :, None] == self._of_token(self.segments, t)[..., None, :]
            )
        real_s, real_t = s < self.length, t < self.length
        if self.first_valid is not None:
            first = self.first_valid.to(device)[:, None]
            real_s, real_t = real_s & (s >= first), real_t & (t >= first)
        return (seen & real_s[..., :, None] & real_t[..., None, :])[:, None]

    def _origin(self, positions: Tensor) -> Tensor | int:
        """First position of each token's sequence: [B, N], [B, 1], or 0.

        Windows and causality compare positions, which an origin does not change; within a chunk mask it is the same for
        a query and the keys it may see unless they are of other segments.
        """
        if not self.spec.shifts:
            return 0
        origin: Tensor | int = 0
        if self.segments is not None:
            starts = torch.arange(self.length, device=self.segments.device).expand_as(self.segments).clone()
            starts[:, 1:].masked_fill_(self.segments[:, 1:] == self.segments[:, :-1], 0)
            origin = self._of_token(starts.cummax(1).values, positions)
        if self.first_valid is not None:
            first = self.first_valid.to(positions.device)[:, None]
            origin = first if isinstance(origin, int) else torch.maximum(origin, first)
        return origin

    def _of_token(self, values: Tensor, positions: Tensor) -> Tensor:
        """[B, N] of values [B, length] at positions [1, N]; those of padding mean nothing."""
        return values.to(positions.device)[:, positions[0].clamp(max=self.length - 1)]


_MASK_ELEMENTS = 1 << 22  # of one block's mask
_LEAST_BLOCK = 128  # queries: smaller blocks make kernels slow


@dataclass
class Gradients:
    """Running sums in the accumulation dtype: dq_BHSD, dk_BKTD, dv_BKTE. They may be views of larger tensors."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class _Piece:
    """One kernel call: which indices of queries and keys, and how they see each other.

    fresh: no piece before it computed these rows, so that there is nothing to merge with.
    """

    rows: slice
    columns: slice
    causal: bool = False
    masked: bool = False
    fresh: bool = True


def tile_forward(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    queries: TokenRun,
    keys: TokenRun,
    seen: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor] | None:
    """(o_BHSE, lse_BHS) of the queries at positions `queries` over the keys at `keys`; None if no query sees a key.

    o is in q's dtype where each row came from one kernel call, else, being a sum, in the accumulation dtype, which is
    lse's. A row that sees no key has o = 0 and lse = −inf. Query head h reads key/value head h // (H / K).
    """
    if seen.none(queries, keys):
        return None
    pieces = list(_pieces(queries, keys, seen, q_BHSD.shape[0]))
    batch, heads, count, _ = q_BHSD.shape
    if len(pieces) == 1 and pieces[0].rows == slice(0, count, 1):
        return _call(q_BHSD, k_BKTD, v_BKTE, queries, keys, seen, scale, pieces[0])
    dtype, fresh = accumulation_dtype(q_BHSD.dtype), all(piece.fresh for piece in pieces)
    o = q_BHSD.new_zeros((batch, heads, count, v_BKTE.shape[-1]), dtype=q_BHSD.dtype if fresh else dtype)
    lse = q_BHSD.new_full((batch, heads, count), -torch.inf, dtype=dtype)
    denominator = torch.ones_like(lse)
    for piece in pieces:
        part = _call(q_BHSD, k_BKTD, v_BKTE, queries, keys, seen, scale, piece)
        rows = (slice(None), slice(None), piece.rows)
        if piece.fresh:
            o[rows], lse[rows] = part
        else:
            add_part(o[rows], lse[rows], denominator[rows], *part)
    return (o, lse) if fresh else merged(o, lse, denominator)


def tile_backward(
    do_BHSE: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    o_BHSE: Tensor,
    lse_BHS: Tensor,
    queries: TokenRun,
    keys: TokenRun,
    seen: Visibility,
    scale: float,
    into: Gradients,
) -> None:
    """Add this tile's part of the gradients to `into`.

    o and lse are those over *all* keys, not of this tile: then the gradients of tiles add up (the paper's section 3.1).
    Rows with lse = −inf, which no key on any rank is visible to, get no gradient, for any `do`.
    """
    if seen.none(queries, keys):
        return
    for piece in _pieces(queries, keys, seen, q_BHSD.shape[0]):
        rows, columns = piece.rows, piece.columns
        mask = _mask(piece, queries, keys, seen, q_BHSD.device)
        dq, dk, dv = kernel_backward(
            do_BHSE[:, :, rows],
            q_BHSD[:, :, rows],
            k_BKTD[:, :, columns],
            v_BKTE[:, :, columns],
            o_BHSE[:, :, rows],
            lse_BHS[:, :, rows],
            mask,
            piece.causal,
            scale,
        )
        into.dq[:, :, rows] += dq
        into.dk[:, :, columns] += dk
        into.dv[:, :, columns] += dv


def _call(
    q: Tensor, k: Tensor, v: Tensor, queries: TokenRun, keys: TokenRun, seen: Visibility, scale: float, piece: _Piece
) -> tuple[Tensor, Tensor]:
    mask = _mask(piece, queries, keys, seen, q.device)
    rows, columns = piece.rows, piece.columns
    return kernel_forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, piece.causal, scale)


def _mask(piece: _Piece, queries: TokenRun, keys: TokenRun, seen: Visibility, device: torch.device) -> Tensor | None:
    if not piece.masked:
        return None
    return seen.seen(_part(queries, piece.rows), _part(keys, piece.columns), device)


def _part(run: TokenRun, part: slice) -> TokenRun:
    """The positions of contiguous indices of `run`."""
    return TokenRun(run.start + part.start * run.step, run.step, part.stop - part.start)


def _pieces(queries: TokenRun, keys: TokenRun, seen: Visibility, batch: int) -> Iterator[_Piece]:
    """Kernel calls that together cover what `seen` shows of the tile. Padding, a suffix of a run, is left out."""
    queries, keys = queries.below(seen.length), keys.below(seen.length)
    if not seen.simple:
        yield from _blocks(queries, keys, seen, batch)
    elif not seen.causal:
        yield _Piece(slice(0, queries.count, 1), slice(0, keys.count, 1))
    else:
        yield from _classes(queries, keys)


def _blocks(queries: TokenRun, keys: TokenRun, seen: Visibility, batch: int) -> Iterator[_Piece]:
    """Blocks of queries with a mask, over the keys that any of them may see."""
    span = seen.span(queries, keys)
    most = _MASK_ELEMENTS // (batch * (span.stop - span.start))
    if seen.spec.reach is not None:  # a block of a window's length sees two windows: more would compute what none sees
        most = min(most, seen.spec.reach // queries.step)
    size = max(_LEAST_BLOCK, most)
    for start in range(0, queries.count, size):
        rows = slice(start, min(start + size, queries.count), 1)
        columns = seen.span(_part(queries, rows), keys)
        if columns.start < columns.stop:
            yield _Piece(rows, columns, masked=True)


def _classes(queries: TokenRun, keys: TokenRun) -> Iterator[_Piece]:
    """The causal tile, split into classes of equal steps and these into rectangles and squares."""
    step = math.lcm(queries.step, keys.step)
    row_step, column_step = step // queries.step, step // keys.step
    for u in range(min(row_step, queries.count)):
        own = queries.every(row_step, u)
        done: list[tuple[int, int]] = []
        for w in range(min(column_step, keys.count)):
            theirs = keys.every(column_step, w)
            offset = (own.start - theirs.start) // step
            for (low, high), (first, last), causal in _staircase(own.count, theirs.count, offset):
                yield _Piece(
                    slice(u + low * row_step, u + (high - 1) * row_step + 1, row_step),
                    slice(w + first * column_step, w + (last - 1) * column_step + 1, column_step),
                    causal,
                    fresh=all(high <= a or b <= low for a, b in done),
                )
                done.append((low, high))


def _staircase(rows: int, columns: int, offset: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """Rectangles (rows, columns, causal) that cover b ≤ a + offset of rows × columns, none of them empty."""
    low = min(max(-offset, 0), rows)  # the first row that sees a key
    high = min(max(columns - offset, low), rows)  # the first row that sees all keys with some to spare
    before = low + offset  # keys that all of these rows see
    if low < high:
        yield (low, high), (before, before + high - low), True
        if before > 0:
            yield (low, high), (0, before), False
    if high < rows and columns > 0:
        yield (high, rows), (0, columns), False
