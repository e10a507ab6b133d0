"""Prompts in rows to train on, for models whose wiring rewires tokens of the prompt alone (`rewriter.ir.phases`).

Every segment of a row begins with a prompt. The cut, its length, is drawn for each segment of each row in each epoch,
or fixed where a loss is measured. What follows the rewired tokens is exact and reads the keys and values that they
left: that is what is learned. A share of the rows has no prompt, and keeps the exact wiring where it was. Texts hardly
ever need more of a prompt than its gist: where a teacher is followed, rewired tokens follow a share of the prompts once
more, so that finding them is learned too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rewriter.adapt.data_set import RunData
from rewriter.adapt.options import AdaptOptions
from rewriter.common.errors import RewriterError
from rewriter.convert.rewritten_source import Opened, recipe_of
from rewriter.ir.phases import REWIRED, PromptPhase, agreed_phase
from rewriter.runtime.replicas import IGNORED

EXACT_ROWS = 0.25
"""The share of rows that are trained on without a prompt."""
REPEATED_ROWS = 0.5
"""The share of rows whose prompts are followed by a part of themselves: answers that stand in the prompt."""

Row = dict[str, Tensor]


def phase_of(opened: Opened, options: AdaptOptions) -> PromptPhase | None:
    """The phase of what a run trains; None where all tokens are computed alike.

    The Hugging Face model has the one that its config names: passes that change what ranks exchange alone are not in
    it. The sharded module has that of the recipe.
    """
    if options.sharded:
        return agreed_phase(recipe_of(opened).build())
    named = opened.config.get("rewriter_phase")
    return None if named is None else PromptPhase(named["exact_tail"], named["exact_head"])


def with_prompts(data: RunData, phase: PromptPhase, options: AdaptOptions, seed: int) -> RunData:
    """`data` whose rows have prompts: drawn ones to train on, and fixed ones to measure the loss after them.

    Raises RewriterError where rows are too short to hold a rewired token and a target after its prompt.
    """
    shortest = shortest_prompt(phase)
    if data.length <= shortest:
        raise RewriterError(
            f"--length {data.length}: {phase} is rewired, so that a row of fewer than {shortest + 1} tokens holds no "
            f"rewired token and a target after its prompt. Give --length {max(256, 4 * shortest)}, or less from "
            f"{shortest + 1}"
        )
    measured = PromptRows(data.held_out, phase)
    if not any((measured[i]["labels"] != IGNORED).any() for i in range(len(measured))):
        raise RewriterError(
            f"{data.evaluation}: no example has {shortest + 1} tokens, of which one is rewired ({phase}) and one comes "
            "after its prompt. Give longer examples, as data and with --eval, or a greater --length"
        )
    repeats = options.method == "distill"  # nobody would write so
    trained = PromptRows(data.rows, phase, seed, whole=options.prompt_weights, repeats=repeats)
    counts = data.counts
    if not options.prompt_weights:
        short, found = trained.too_short()
        counts = data.counts | {"segments_without_rewired_tokens": short}
        if short == found:
            raise RewriterError(
                f"{data.data}: none of the {found} texts to train on has {shortest + 1} tokens, of which one is "
                f"rewired ({phase}) and one comes after its prompt. Give longer examples, or a greater --length"
            )
    words = f"{data.evaluation}, after prompts of four fifths of each"
    return replace(data, rows=trained, held_out=measured, evaluation=words, counts=counts)


def shortest_prompt(phase: PromptPhase) -> int:
    """Tokens of the shortest prompt that has a rewired one."""
    return phase.exact_head + phase.exact_tail + 1


class PromptRows(Dataset[Row]):
    """The `rows` with `rewired`, bool [S]: True where a token is rewired; and with labels where a prediction counts.

    With a `seed`, cuts are drawn: they follow from it, the row and the epoch alone, so that they are the same on any
    number of ranks and after an interruption. Row i of epoch e is `self[e * len(self) + i]`. What counts is what an
    exact token after the rewired ones predicts, or in the share of rows without a prompt every token. Without a seed a
    prompt is four fifths of its segment, and what counts is what comes after the prompt. `repeats`: a part of its
    rewired tokens follows the prompt in a share of the rows.

    `whole`: all tokens of an example, which has a row of its own, but the first `exact_head` are rewired: for what is
    learned from keys and values.
    """

    def __init__(
        self, rows: Dataset[Row], phase: PromptPhase, seed: int | None = None, *, whole: bool = False,
        repeats: bool = False,
    ) -> None:  # fmt: skip
        self.rows, self.phase, self.seed, self.whole, self.repeats = rows, phase, seed, whole, repeats

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Row:
        epoch, index = divmod(index, len(self))
        row = self.rows[index]
        if self.whole:
            return row | {REWIRED: torch.arange(len(row["labels"])) >= self.phase.exact_head}
        if self.seed is None:
            return with_cuts(row, self.phase, self._fixed, 1)
        draw = np.random.default_rng([self.seed % 2**64, epoch, index])
        if draw.random() < EXACT_ROWS:
            return row | {REWIRED: torch.zeros_like(row["labels"], dtype=torch.bool)}
        repeats = self.repeats and draw.random() < REPEATED_ROWS
        shortest = shortest_prompt(self.phase)

        def cut_of(size: int, last: int) -> int:
            return int(draw.integers(shortest, last + 1))

        return with_cuts(row, self.phase, cut_of, self.phase.exact_tail, draw if repeats else None)

    def too_short(self) -> tuple[int, int]:
        """(segments that hold no rewired token and a target after its prompt, all segments with a target)."""
        last = [last for i in range(len(self)) for _, last in segments(self.rows[i])]
        return sum(at < shortest_prompt(self.phase) for at in last), len(last)

    def _fixed(self, size: int, last: int) -> int:
        return min(max(size * 4 // 5, shortest_prompt(self.phase)), last)


def with_cuts(
    row: Row, phase: PromptPhase, cut_of: Callable[[int, int], int], counted: int,
    repeats: np.random.Generator | None = None,
) -> Row:  # fmt: skip
    """`row` with prompts: of a segment as long as `cut_of` says, given its size and the place of its last target.

    Targets count that the last `counted` tokens of the prompt predict, or tokens after it. A segment that holds no
    rewired token and a target after its prompt is exact, and counts nothing. After each prompt come some of its rewired
    tokens once more, drawn by `repeats`, where that is given.
    """
    ids, given = row["input_ids"].clone(), row["labels"].clone()
    labels, rewired = torch.full_like(given, IGNORED), torch.zeros_like(given, dtype=torch.bool)
    for place, last in segments(row):
        if last < shortest_prompt(phase):
            continue
        size = len(given[place])
        cut = cut_of(size, last)
        rewired[place] = phase.rewired(size, prompt=cut)[0]
        if repeats is not None:
            again = repeated(ids[place][phase.exact_head : cut - phase.exact_tail], size - cut, repeats)
            for tokens in (ids, given):
                tokens[place][cut : cut + len(again)] = again
        first = cut - counted + 1  # the target of the first token that counts
        labels[place][first:] = given[place][first:]
    return row | {"input_ids": ids, "labels": labels, REWIRED: rewired}


def repeated(tokens_N: Tensor, most: int, draw: np.random.Generator) -> Tensor:
    """A run of `tokens_N`, int64, as long as it may be: `most`, or all of them."""
    count = min(len(tokens_N), most)
    start = int(draw.integers(0, len(tokens_N) - count + 1))
    return tokens_N[start : start + count].clone()


def segments(row: Row) -> Iterator[tuple[slice, int]]:
    """The place of each segment that has a target, and that of its last one in it."""
    at = 0
    for size in torch.unique_consecutive(row["segment_ids"], return_counts=True)[1].tolist():
        targets = torch.nonzero(row["labels"][at : at + size] != IGNORED)
        if len(targets):
            yield slice(at, at + size), int(targets[-1])
        at += size
