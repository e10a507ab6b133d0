"""`rewrite reshard DIR --tp N`: a runtime module for another number of ranks, in seconds."""

from __future__ import annotations

from rewriter.cli import options
from rewriter.common.processes import start_early


def reshard(directory: options.Output, tp: options.Ranks, verify: options.ReshardVerify = "shrunken") -> None:
    """Add the runtime module of --tp ranks to an output whose recipe is not bound to its ranks.

    The checkpoint stays as it is: ranks read ranges of it. Exit code 3, and no change, where the module does not
    compute what the checkpoint does.
    """
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        verification = api.reshard(directory, tp, verify=verify, progress=progress)
    from rewriter.cli.rendering import print_verification

    print_verification(verification)
