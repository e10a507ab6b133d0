"""Tokens to text while they come: no half characters, nothing after the first stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """The text that follows one prompt.

    `text`: without special tokens, up to the first stop string, or all. `tokens`: their ids, with the one that ended
    the text: an end of sequence, or the last of a stop string. `seconds_to_first_token`: from the start of the prefill;
    of the first prompt from where ranks begin to load the model. `seconds_per_token`: from then on, on average; None
    for a single token. Both leave out `seconds_compiling`, in which a compilation of the decode step was waited for.
    """

    text: str
    tokens: list[int]
    seconds_to_first_token: float
    seconds_per_token: float | None
    seconds_compiling: float = 0.0


class TextStream:
    """The text of one prompt's new tokens, piece by piece.

    A piece is given out once the tokens after it can no longer change it. A character may take several tokens, and a
    token may read otherwise at the start of a text (as " the" and "the"), so that each is decoded after those of the
    piece before it, at first the prompt. What may be the start of a stop string waits for the next token.

    It ends (`done`) with a token of `ends`, with `limit` tokens, or with the first of the strings `stop`.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], *, limit: int, ends: Collection[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._limit, self._ends, self._stop = tokenizer, limit, ends, stop
        self._window, self._old = list(prompt), len(prompt)  # tokens to decode; how many of them are given out
        self._waiting, self._text = "", ""
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        self._compiling = 0.0
        self.done = False

    def add(self, token: int, seconds: float, compiling: float = 0.0) -> str:
        """The text that the next token adds for sure. It was made `seconds` after the start, without the `compiling`
        ones in which a compilation was waited for."""
        self._tokens.append(token)
        self._compiling = compiling
        self._seconds.append(seconds)
        self._window.append(token)
        last = token in self._ends or len(self._tokens) == self._limit
        self._waiting += self._decoded(last)
        starts = [self._waiting.find(word) for word in self._stop if word in self._waiting]
        self.done = last or bool(starts)
        end = min(starts) if starts else len(self._waiting) - (0 if last else self._possible_stop())
        piece, self._waiting = self._waiting[:end], self._waiting[end:]
        self._text += piece
        return piece

    def result(self) -> Generation:
        """All of it, once `done`."""
        first, count = self._seconds[0], len(self._tokens)
        pace = (self._seconds[-1] - first) / (count - 1) if count > 1 else None
        return Generation(self._text, self._tokens, first, pace, self._compiling)

    def _decoded(self, last: bool) -> str:
        before, after = (
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (self._window[: self._old], self._window)
        )
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self._window, self._old = self._window[self._old :], len(self._window) - self._old
        return str(after[len(before) :])

    def _possible_stop(self) -> int:
        """Number of characters at the end of the waiting text that begin a stop string."""
        lengths = (n for word in self._stop for n in range(1, len(word)) if self._waiting.endswith(word[:n]))
        return max(lengths, default=0)
