"""The data of a run: a file, the Hub or the original's own text; as rows to train on and rows held out."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from rewriter.adapt.options import MOST_TOKENS, AdaptOptions
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import LONGEST_ROW, OWN_TEXT, Budget, tokens_of_run
from rewriter.adapt.self_written import self_written
from rewriter.adapt.token_rows import load_rows
from rewriter.check.drift import load_tokenizer
from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import context_length, vocabulary_size
from rewriter.convert.rewritten_source import Opened, complete_config, write_source

PREFIX = "self:"
HELD_OUT = 0.02  # of the rows, where no evaluation data are given
MOST_HELD_OUT = 256


@dataclass(frozen=True)
class RunData:
    """Rows of `length` tokens to train on, and rows to evaluate on; descriptions of both, and counts of the former."""

    rows: Dataset
    held_out: Dataset
    length: int
    data: str
    evaluation: str
    counts: dict[str, int]


def read_data(
    opened: Opened, options: AdaptOptions, data: str, evaluation: str | None, seed: int, context: RunContext
) -> RunData:
    """Read `data`, and `evaluation` or some rows of the data in its place (drawn by `seed`).

    Without --length, rows are as long as the tokens of the run make them.

    Raises RewriterError for a directory without a tokenizer, a length beyond the model's positions, and faults of the
    data, with their places.
    """
    tokenizer = load_tokenizer(str(opened.root), context.trust_remote_code)
    if tokenizer is None:
        raise RewriterError(
            f"{opened.root}: it has no tokenizer, so text cannot become tokens. Copy the source's tokenizer files into "
            "it"
        )
    config = complete_config(opened.config, opened.manifest)
    positions, vocabulary = context_length(config), vocabulary_size(config)

    def rows_of(source: str, length: int) -> Any:
        return load_rows(
            source, tokenizer, length=length, packing=options.packing, too_long=options.too_long, vocabulary=vocabulary
        )

    length = options.length or min(positions, LONGEST_ROW)
    follows = options.length is None and options.budgeted  # the length, from the tokens of the run
    if follows and options.tokens:
        length = Budget(options.tokens).length(positions)
    if length > positions:
        raise RewriterError(f"--length {length}: the model has {positions} positions. Give fewer")
    context.progress("reading the data")
    rows = rows_of(data, length)
    if follows and not options.tokens:
        shorter = Budget(tokens_of_run(options, rows.counts.tokens)).length(positions)
        if shorter != length:  # the tokens of the data are counted only now
            length, rows = shorter, rows_of(data, shorter)
    counts = asdict(rows.counts)
    if evaluation is not None:
        held = rows_of(evaluation, length)
        return RunData(
            rows, held, length, _public(data), f"{_public(evaluation)}, {held.counts.targets:,} targets", counts
        )
    if len(rows) < 2:
        raise RewriterError(
            f"{data}: {len(rows)} row of {length} tokens; at least 2 are needed, of which one is held out. "
            "Give more data, a smaller --length, or --eval"
        )
    trained, held = hold_out(rows, seed)
    words = f"{len(held)} of {len(rows)} rows of the data, which were not trained on"
    return RunData(trained, held, length, _public(data), words, counts)


def hold_out(rows: Dataset, seed: int) -> tuple[Subset, Subset]:
    """(rows to train on, rows to evaluate on): some of them, drawn by the seed."""
    count = len(rows)  # type: ignore[arg-type]
    held = min(max(1, int(count * HELD_OUT)), MOST_HELD_OUT, count - 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(rows, sorted(order[held:])), Subset(rows, sorted(order[:held]))


def _public(name: str) -> str:
    """The name of data in what is published: a hub id, or the bare name of a file."""
    return Path(name).name if Path(name).exists() else name


# --- text that the original writes itself: self:N


def asked_tokens(data: str) -> int | None:
    """N of `self:N`; None for other data. Raises RewriterError where N is no number of tokens."""
    if not data.startswith(PREFIX):
        return None
    number = data.removeprefix(PREFIX).replace("_", "").replace(",", "")
    tokens = int(number) if number.isdecimal() and len(number) <= len(str(MOST_TOKENS)) else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise RewriterError(
            f"--data {data[:60]}: expected {PREFIX}N, the number of tokens to write, such as {PREFIX}24576, at most "
            f"{MOST_TOKENS:,}"
        )
    return tokens


@dataclass(frozen=True)
class OwnText:
    """The writer of `self:N`. teacher: the directory of the original, where it is not the weights of `opened` under
    their original wiring; `known`: whether either is there."""

    opened: Opened
    options: AdaptOptions
    teacher: str | os.PathLike[str] | None
    known: bool
    ranks: RunRanks
    device: torch.device
    context: RunContext

    def file_of(self, data: str | os.PathLike[str] | None, held_out: bool = False) -> str:
        """The file or id that `data` names; of `self:N`, the file that rank 0 writes, or has written before. None: of
        the tokens of the run, and those to hold out. Text that is `held_out` shares no seed with the rest. Raises
        RewriterError where the original is not known."""
        own = math.ceil((self.options.tokens or OWN_TEXT) / (1 - 2 * HELD_OUT))
        name = f"{PREFIX}{own}" if data is None else os.fspath(data)
        tokens = asked_tokens(name)
        if tokens is None:
            return name
        if not self.known:
            raise RewriterError(
                f"--data {name}: {self.opened.root} has been trained since it was rewritten, so the original is not "
                "known that would write them. Give a file, or the original model as --teacher"
            )
        written: str = self.ranks.on_first(lambda: self._write(tokens, held_out))
        return written

    def _write(self, tokens: int, held_out: bool) -> str:
        if self.teacher is not None:
            return str(self_written(Path(self.teacher), tokens, self.device, self.context, held_out))
        with scratch_folder("self") as place:
            source, files = write_source(self.opened, place / "source"), self.opened.manifest.source.files
            return str(self_written(source, tokens, self.device, self.context, held_out, files))
