"""Mask rules: the keys that a query sees, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MaskKind = Literal["causal", "window", "chunk", "bidirectional"]


@dataclass(frozen=True)
class MaskSpec:
    """The keys that a query sees, as a rule over positions instead of a materialised mask.

    Positions count from the first valid token of a row, so left padding shifts nothing.

    causal: `t <= s`. window: `s - size < t <= s`. chunk: `t <= s` within one block of `size` positions.
    bidirectional: all.
    """

    kind: MaskKind
    size: int | None = None

    def __post_init__(self) -> None:
        if (self.kind in ("window", "chunk")) != (self.size is not None):
            raise ValueError(f"MaskSpec {self.kind!r} with size {self.size!r}: only window and chunk have a size")

    def visible(self, query_positions: Any, key_positions: Any) -> Any:
        """Boolean [..., S, T] from positions [..., S] and [..., T] (int64)."""
        s, t = query_positions[..., :, None], key_positions[..., None, :]
        if self.kind == "bidirectional":
            return (s >= 0) | (t >= 0) | True
        seen = t <= s
        if self.kind == "window":
            seen = seen & (t > s - self.size)
        elif self.kind == "chunk":
            seen = seen & (s // self.size == t // self.size)
        return seen

    @property
    def causal(self) -> bool:
        """No query sees a later key."""
        return self.kind != "bidirectional"

    @property
    def reach(self) -> int | None:
        """Distance in positions from which on no query sees a key before it; None without such a bound."""
        return self.size

    @property
    def cached(self) -> int | None:
        """The last positions that a cache keeps; None for all."""
        return self.size if self.kind == "window" else None

    @property
    def shifts(self) -> bool:
        """True if visibility between two positions changes where both are shifted by the same distance."""
        return self.kind == "chunk"

    def unbounded(self, length: int) -> bool:
        """Among `length` positions it is plainly causal or bidirectional: kernels without a mask suffice."""
        return self.reach is None or self.reach >= length

    def first_key(self, position: int, origin: bool = True) -> int:
        """The first key that a query at `position` may see, which may be negative. Without `origin`, positions are
        counted from anywhere."""
        if self.size is None:
            return 0
        return position - position % self.size if self.shifts and origin else position - self.size + 1

    def intersection(self, other: MaskSpec) -> MaskSpec | None:
        """The rule that shows what both show; None where there is none."""
        for a, b in ((self, other), (other, self)):
            if a == b or not a.causal or (a.kind == "causal" and b.causal):
                return b
        if self.kind == other.kind == "window":
            return min(self, other, key=lambda spec: spec.size or 0)
        return None

    @property
    def label(self) -> str:
        """causal, window 4, …"""
        return self.kind if self.size is None else f"{self.kind} {self.size}"

    @property
    def source(self) -> str:
        """The expression that makes it."""
        return f'MaskSpec("{self.kind}"' + (")" if self.size is None else f", {self.size})")


def visible_pairs(length: int, causal: bool = True, reach: int | None = None) -> int:
    """Pairs of a query and a key that it sees among `length` positions. A chunk counts as a window of its size."""
    if not causal:
        return length * length
    reach = min(reach or length, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach
