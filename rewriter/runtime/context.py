"""What a forward pass must know besides its tokens: where they stand, and what came before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from rewriter.errors import RewriterError

if TYPE_CHECKING:
    from rewriter.runtime.cache import StaticCache


@dataclass(frozen=True)
class Context:
    """Passed explicitly to every layer; `Context()` is right for training and scoring of unpadded rows.

    cache: keys and values of earlier calls, or None (then every call sees its own tokens only).
    position: int64 scalar tensor, the place of the first new token in the cache; None means that nothing came before,
    which
        is what prefill and training say, and what lets attention take its fast paths. A tensor, never an int: a
        compiled decode step must not be compiled again for every token.
    first_valid: int64 [B], the number of padding tokens at the left of each row; None means that there are none.
    segment_ids: packed sequences; refused until attention can separate them.
    """

    cache: StaticCache | None = None
    position: Tensor | None = None
    first_valid: Tensor | None = None
    segment_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if self.segment_ids is not None:
            raise RewriterError(
                "Context: segment_ids (packed sequences) are not supported, attention would mix them. Pass one "
                "sequence per row and pad at the left"
            )
        if self.position is not None and self.cache is None:
            raise RewriterError("Context: position is given without a cache. Pass both, or neither for whole sequences")

    def bound(self, slot: int) -> Context:
        """The same context with a cache of the one entry `slot`: see `StaticCache.bound`."""
        return self if self.cache is None else replace(self, cache=self.cache.bound(slot))


def _flatten(ctx: Context) -> tuple[list[Any], None]:
    return [ctx.cache, ctx.position, ctx.first_valid], None


def _unflatten(values: Any, _: None) -> Context:
    return Context(*values)


pytree.register_pytree_node(Context, _flatten, _unflatten, serialized_type_name="rewriter.runtime.Context")
