"""`rewrite verify DIR`: does an output still compute what its manifest says?"""

from __future__ import annotations

from rewriter.cli import options
from rewriter.common.processes import start_early


def verify(directory: options.Output) -> None:
    """Check a written output again: file hashes, golden logits, and equality on every rank.

    Exit code 3 where it does not compute what its recipe says.
    """
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        verification = api.verify(directory, progress=progress)
    from rewriter.cli.rendering import print_verification

    print_verification(verification)
