"""Phases of tokens: tokens of a prompt that a rewired wiring computes, and tokens that the original's computes.

The phase is a property of a token, by its place in its request: of a prompt of n tokens, those from `exact_head` to
n − `exact_tail` − 1 are *rewired*, all others are *exact*: the first ones, the last ones (at least one, whose logits
begin the answer), and everything generated. Exact tokens read the keys and values that rewired ones left. So neither
chunks nor padding nor the other rows of a batch change what a token computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rewriter.common.errors import RewriterError
from rewriter.ir.structure import ProgramData

Phase = Literal["all", "prompt"]
REWIRED = "rewired"  # the input of a wiring of both phases: bool [B, S], True where a token is rewired


@dataclass(frozen=True)
class PromptPhase:
    """Tokens at the two ends of a prompt that stay exact."""

    exact_tail: int = 1
    exact_head: int = 0

    def __str__(self) -> str:
        head = f"first {self.exact_head} and " if self.exact_head else ""
        tail = "last token" if self.exact_tail == 1 else f"last {self.exact_tail} tokens"
        return f"the prompt but its {head}{tail}"

    def rewired(self, length: int, padding: torch.Tensor | None = None, prompt: int | None = None) -> torch.Tensor:
        """bool [B, S], True for the rewired ones of S = `length` tokens: rows that begin with `padding` tokens (int64
        [B], default one row without) and whose prompt is the first `prompt` (default all) of them, padding included."""
        index = torch.arange(length, device=None if padding is None else padding.device)
        first = torch.zeros(1, 1, dtype=torch.int64, device=index.device) if padding is None else padding[:, None]
        end = (length if prompt is None else prompt) - self.exact_tail
        return (index >= first + self.exact_head) & (index < end)


def is_phased(rewrite: Any) -> bool:
    """True if a pass rewires tokens of the prompt alone."""
    return getattr(rewrite, "phase", "all") == "prompt"


def prompt_phase(program: ProgramData) -> PromptPhase | None:
    """The phase that the passes of `program` agree on; None where none rewires the prompt alone.

    Raises RewriterError where two of them leave different tokens exact.
    """
    return agreed_phase([entry.rewrite for entry in program.history])


def agreed_phase(passes: Sequence[Any]) -> PromptPhase | None:
    """`prompt_phase` of a list of passes."""
    found = {PromptPhase(p.exact_tail, p.exact_head): p for p in passes if is_phased(p)}
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise RewriterError(
            f"{one.name} rewires {first}, {other.name} {second}: a token has one of two wirings. Give all passes with "
            "phase: prompt the same exact_head and exact_tail"
        )
    return next(iter(found), None)


def has_both_phases(program: ProgramData) -> bool:
    """True if the wiring of `program` computes tokens of either phase, told by its input `rewired`."""
    return any(n.target == REWIRED for n in program.graph.find_nodes(op="placeholder"))
