"""The rows of a run: read, held out for measuring, and described for what is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from rewriter.adapt.budget import LONGEST_ROW, Budget, tokens_of_run
from rewriter.adapt.evaluate import hold_out
from rewriter.adapt.options import Options
from rewriter.adapt.token_rows import load_rows
from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import context_length, vocabulary_size
from rewriter.convert.rewritten_source import Opened, complete_config
from rewriter.verify.drift import load_tokenizer


@dataclass(frozen=True)
class RunData:
    """Rows of `length` tokens to train on, and rows to evaluate on; both in words, and what was counted in reading."""

    rows: Dataset
    held_out: Dataset
    length: int
    data: str
    evaluation: str
    counts: dict[str, int]


def read_data(
    opened: Opened, options: Options, data: str, evaluation: Any, seed: int, progress: Callable[..., None]
) -> RunData:
    """Read `data`, and `evaluation` or some rows of the data in its place (drawn by `seed`).

    Without --length, rows are as long as the tokens of the run make them.

    Raises RewriterError for a directory without a tokenizer, a length beyond the model's positions, and faults of the
    data, with their places.
    """
    tokenizer = load_tokenizer(str(opened.root), options.trust_remote_code)
    if tokenizer is None:
        raise RewriterError(
            f"{opened.root}: it has no tokenizer, so text cannot become tokens. Copy the source's tokenizer files into "
            "it"
        )
    config = complete_config(opened.config, opened.manifest)
    positions = context_length(config)
    length = options.length or min(positions, LONGEST_ROW)
    follows = options.length is None and options.budgeted  # the length, from the tokens of the run
    if follows and options.tokens:
        length = Budget(options.tokens).length(positions)
    if length > positions:
        raise RewriterError(f"--length {length}: the model has {positions} positions. Give fewer")
    progress("reading the data")
    how: dict[str, Any] = {"length": length, "packing": options.packing, "too_long": options.too_long}
    how["vocabulary"] = vocabulary_size(config)
    read = load_rows(data, tokenizer, **how)
    if follows and not options.tokens:
        shorter = Budget(tokens_of_run(options, read.counts.tokens)).length(positions)
        if shorter != length:  # how many tokens the data have is known only now
            length = how["length"] = shorter
            read = load_rows(data, tokenizer, **how)
    rows: Dataset = read
    held: Dataset
    if evaluation is not None:
        held = other = load_rows(os.fspath(evaluation), tokenizer, **how)
        words = f"{_public(evaluation)}, {other.counts.targets:,} targets"
    else:
        if len(read) < 2:
            raise RewriterError(
                f"{data}: {len(read)} row of {length} tokens; at least 2 are needed, of which one is held out. "
                "Give more data, a smaller --length, or --eval"
            )
        rows, held = hold_out(read, seed)
        words = f"{len(held)} of {len(read)} rows of the data, which were not trained on"
    return RunData(rows, held, length, _public(data), words, asdict(read.counts))


def _public(name: Any) -> str:
    """How data are named in what is published: a hub id, or the bare name of a file."""
    return Path(name).name if Path(name).exists() else os.fspath(name)
