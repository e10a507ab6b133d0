"""What every emitted `Model` is, whatever its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from rewriter.errors import RewriterError
from rewriter.runtime.cache import SlotSpec
from rewriter.runtime.context import Context
from rewriter.runtime.generate import positions


class RuntimeModel(nn.Module):
    """Base of an emitted model, which defines `compute`; users call the model itself, whose `forward` is here.

    `slots` says what a cache must hold, in order of the slot numbers that attention calls use. `dropout_probability`
    is the largest one in the source model's configuration; the traced computation is that of evaluation, which has
    none.
    """

    slots: Sequence[SlotSpec] = ()
    dropout_probability: float = 0.0

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor | None = None,
        ctx: Context | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """logits_BSV of the full vocabulary for tokens int64 [B, S].

        `position_ids_BS` (int64) are by default 0 … S − 1, counted from each row's first valid token; `ctx` is by
        default that of whole, unpadded rows. `logits_to_keep` n > 0 gives the logits of the last n tokens only, so that
        prefill need not compute the rest. Raises RewriterError for tokens behind a cache without their positions.
        """
        ctx = ctx or Context()
        if position_ids_BS is None:
            if ctx.position is not None:
                raise RewriterError(
                    f"{type(self).__name__}: the context says that tokens stand behind others, but position_ids is "
                    "None. Pass their positions"
                )
            batch, length = input_ids_BS.shape
            position_ids_BS = positions(length, ctx.first_valid, batch, input_ids_BS.device)
        return self.compute(input_ids_BS, position_ids_BS, ctx, logits_to_keep)

    def compute(
        self, input_ids: Tensor, position_ids: Tensor, ctx: Context, logits_to_keep: int = 0, gather: bool = True
    ) -> Tensor:
        """What a model computes: generated code. `gather` is for models whose tokens are sharded, see `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no compute")

    def train(self, mode: bool = True) -> Self:
        if mode and self.dropout_probability > 0:
            raise RewriterError(
                f"{type(self).__name__}.train(): the model has dropout probability {self.dropout_probability}, which "
                "the sharded module does not apply. Train it in eval mode, or set dropout to 0 in config.json and "
                "rewrite again"
            )
        return super().train(mode)
