"""A long text in windows, each of which begins as texts of the model do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from rewriter.common.text_settings import top_setting

Tokens = TypeVar("Tokens")  # a list of int, or an int64 tensor [T]


def begins_texts(tokens: Sequence[int] | Any, config: Mapping[str, Any]) -> bool:
    """True where the first of `tokens` is the one that begins every text of the model (`bos_token_id`).

    Without it many models compute something else: its keys are what heads with nothing to attend to look at.
    """
    return len(tokens) > 0 and int(tokens[0]) == top_setting(config, "bos_token_id")


def text_windows(tokens: Tokens, length: int, *, begins: bool, overlap: int = 0) -> list[Tokens]:
    """`tokens`, [T], in windows of `length` at most, of which the last may be shorter.

    `begins`: the first token stands before each of the others too. Else the last `overlap` tokens of a window begin the
    next one.
    """
    text = cast(Any, tokens)
    if not begins or length < 2:
        last = max(1, len(text) - overlap)
        return [text[start : start + length] for start in range(0, last, length - overlap)]
    windows = [text[:length]]
    for start in range(length, len(text), length - 1):
        piece = text[start : start + length - 1]
        windows.append(text[:1] + piece if isinstance(text, list) else text.new_tensor([*text[:1], *piece]))
    return windows
