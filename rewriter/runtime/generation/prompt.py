"""The calls that compute a prompt: which tokens of it each takes, and by which of a model's wirings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewriter.ir.phases import PromptPhase


@dataclass(frozen=True)
class Call:
    """A call on the tokens from `start` to `end` of all rows. `rewired` is for `Context`: None where all tokens are
    computed alike, else which of these are rewired: all, none, or bool [B, end − start]."""

    start: int
    end: int
    rewired: Tensor | bool | None = None


def prompt_calls(
    length: int,
    chunk: int | None,
    phase: PromptPhase | None = None,
    first_valid: Tensor | None = None,
    prompt: int | None = None,
    whole: bool = False,
) -> list[Call]:
    """The calls that compute `length` tokens in order, `chunk` at a time (None: no limit).

    With a `phase`, rows begin with `first_valid` (int64 [B]) tokens of padding, and their prompts are the first
    `prompt` tokens (default all), padding counted. A call ends where a row's phase changes; calls have tokens of both
    where rows are in different places. What is computed on padding does not matter: nothing sees it. `whole`: what
    precedes the exact end is one call, since the first one decides on which rank a token stays.
    """
    if phase is None:
        return _cut(0, length, chunk, None)
    padding = torch.zeros(1, dtype=torch.int64) if first_valid is None else first_valid.cpu()
    mask_BS = phase.rewired(length, padding, prompt)
    valid_BS = torch.arange(length) >= padding[:, None]
    kinds_S2 = torch.stack([(mask_BS & valid_BS).any(0), (~mask_BS & valid_BS).any(0)], dim=1)
    ends = [i for i in range(1, length) if not torch.equal(kinds_S2[i], kinds_S2[i - 1])] + [length]
    begins = [0, *ends[:-1]]
    if whole and len(ends) > 1:
        begins, ends = [0, begins[-1]], [ends[-2], length]
    calls = []
    for begin, end in zip(begins, ends, strict=True):
        some_rewired, some_exact = kinds_S2[begin:end].any(0).tolist()
        rewired = mask_BS if some_rewired and some_exact else some_rewired
        calls += _cut(begin, end, chunk, rewired)
    return calls


def _cut(begin: int, end: int, chunk: int | None, rewired: Tensor | bool | None) -> list[Call]:
    """Calls of at most `chunk` tokens from `begin` to `end`; `rewired` is of all tokens."""
    step = chunk or end - begin
    calls = []
    for start in range(begin, end, step):
        stop = min(start + step, end)
        calls.append(Call(start, stop, rewired[:, start:stop] if isinstance(rewired, Tensor) else rewired))
    return calls
