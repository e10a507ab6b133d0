"""Which keys a query sees when both are runs of positions of one global sequence: the mask, padding at either end, and
packed sequences. Masks are made tile by tile, never for the full sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ops import MaskSpec
from rewriter.sequence.token_layout import TokenRun


@dataclass(frozen=True, eq=False)
class Visibility:
    """The mask of a global sequence.

    spec: the rule over positions. length: tokens without the padding at the right; positions from there on are neither
    seen nor see. first_valid: int64 [B], positions below are padding at the left, of which the same holds. segments:
    integers [B, length], packed sequences; a query sees keys of its own segment only. Positions count from the first
    valid token of a row, or from the start of a segment, which only a chunk mask notices.

    Raises RewriterError for tensors of other shapes.
    """

    spec: MaskSpec
    length: int
    first_valid: Tensor | None = None
    segments: Tensor | None = None

    def __post_init__(self) -> None:
        if self.first_valid is not None and self.first_valid.dim() != 1:
            raise RewriterError(
                f"first_valid of shape {list(self.first_valid.shape)}: expected one position per row, [B]"
            )
        if self.segments is not None and (self.segments.dim() != 2 or self.segments.shape[1] != self.length):
            raise RewriterError(
                f"segment ids of shape {list(self.segments.shape)}: expected [B, {self.length}], one per token of the "
                "full sequence, on every rank"
            )

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
        """Where the positions of a token's sequence start: [B, N], [B, 1], or 0.

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
