"""A command that needs several processes starts them itself, as torchrun does, and says why one failed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rewriter.common.errors import RewriterError


def is_rank() -> bool:
    """True if this process is one of several that a launcher started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def is_first() -> bool:
    """True if this process is the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(arguments: Sequence[str], ranks: int) -> None:
    """Run `rewrite ARGUMENTS` on several processes of this machine.

    Raises RewriterError with the message of the rank that failed first. The exit code of a failure is that rank's.
    """
    from rewriter.common.processes import Processes, placed

    with Processes(logged=False, grace=30.0) as job:
        variables = placed(ranks)
        for rank in range(ranks):
            job.start(f"rank {rank}", [sys.executable, "-m", "rewriter.cli", *arguments], variables(rank))
        failure = job.wait()
    if failure is not None:
        error = RewriterError(failure.message or f"{failure.name} {failure.how}. It gave no reason.")
        error.exit_code = failure.code if failure.code and failure.code > 0 else 1
        raise error
