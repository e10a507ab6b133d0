"""A long text in windows, each of which begins as texts of the model do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rewriter.common.text_settings import top_setting


def begins_texts(tokens_T: Tensor, config: Mapping[str, Any]) -> bool:
    """True where the first of `tokens_T` (int64) is the one that begins every text of the model (`bos_token_id`).

    Without it many models compute something else: its keys are what heads with nothing to attend to look at.
    """
    return len(tokens_T) > 0 and int(tokens_T[0]) == top_setting(config, "bos_token_id")


def text_windows(tokens_T: Tensor, length: int, *, begins: bool, overlap: int = 0) -> list[Tensor]:
    """`tokens_T`, or what is known of each, in windows of `length` at most, of which the last may be shorter.

    `begins`: the first token stands before each of the others too. Else the last `overlap` tokens of a window begin the
    next one.
    """
    if begins and length > 1:
        rest = tokens_T[length:].split(length - 1) if len(tokens_T) > length else ()
        return [tokens_T[:length], *(torch.cat([tokens_T[:1], piece]) for piece in rest)]
    last = max(1, len(tokens_T) - overlap)
    return [tokens_T[start : start + length] for start in range(0, last, length - overlap)]
