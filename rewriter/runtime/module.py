"""What every emitted `Model` is, whatever its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import nn

from rewriter.errors import RewriterError
from rewriter.runtime.cache import SlotSpec


class RuntimeModel(nn.Module):
    """Base of an emitted model: forward(input_ids_BS, position_ids_BS, ctx, logits_to_keep=0) -> logits_BSV of the full
    vocabulary; `logits_to_keep` n > 0 gives those of the last n tokens only, so that prefill need not compute the rest.

    `slots` says what a cache must hold, in order of the slot numbers that attention calls use. `dropout_probability`
    is the largest one in the source model's configuration; the traced computation is that of evaluation, which has
    none.
    """

    slots: Sequence[SlotSpec] = ()
    dropout_probability: float = 0.0

    def train(self, mode: bool = True) -> Self:
        if mode and self.dropout_probability > 0:
            raise RewriterError(
                f"{type(self).__name__}.train(): the model has dropout probability {self.dropout_probability}, which "
                "the sharded module does not apply. Train it in eval mode, or set dropout to 0 in config.json and "
                "rewrite again"
            )
        return super().train(mode)
