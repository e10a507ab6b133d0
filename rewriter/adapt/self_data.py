"""`--data self:N`: which data a run reads where the original writes them itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rewriter.adapt.budget import OWN_TEXT
from rewriter.adapt.evaluate import HELD_OUT
from rewriter.adapt.options import MOST_TOKENS
from rewriter.adapt.run_ranks import RunRanks
from rewriter.adapt.self_written import self_written
from rewriter.common.errors import RewriterError
from rewriter.common.scratch import scratch_folder
from rewriter.convert.rewritten_source import Opened, write_source

PREFIX = "self:"


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


def own_text(opened: Opened, known: bool, tokens: int | None) -> str:
    """What is read where no data are given: as many tokens of the original's own as the run sees, and those to hold
    out. Raises RewriterError where the original is not known."""
    if not known:
        raise RewriterError(
            f"{opened.root} has been trained since it was rewritten, so the original is not known that would write the "
            "data. Give --data, or the original model as --teacher"
        )
    return f"{PREFIX}{math.ceil((tokens or OWN_TEXT) / (1 - 2 * HELD_OUT))}"


def source_of(
    opened: Opened,
    data: Any,
    teacher: str | os.PathLike[str] | None,
    known: bool,
    ranks: RunRanks,
    device: torch.device,
    progress: Callable[..., None],
    held_out: bool = False,
    trust_remote_code: bool = False,
) -> str | None:
    """The file or id that `data` names; of `self:N`, the file that rank 0 writes, or has written before. Text that is
    `held_out` shares no seed with what is trained on."""
    tokens = None if data is None else asked_tokens(os.fspath(data))
    if tokens is None:
        return None if data is None else os.fspath(data)
    if not known:
        raise RewriterError(
            f"{data}: {opened.root} has been trained since it was rewritten, so the original is not known. Give the "
            "original model as --teacher"
        )

    def write() -> str:
        if teacher is not None:
            return str(self_written(Path(teacher), tokens, device, progress, held_out, None, trust_remote_code))
        with scratch_folder("self") as place:
            source = write_source(opened, place / "source")
            files = opened.manifest.source.files
            return str(self_written(source, tokens, device, progress, held_out, files, trust_remote_code))

    written: str = ranks.on_first(write)
    return written
