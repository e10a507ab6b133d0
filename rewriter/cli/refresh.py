"""`rewrite refresh DIR`: an output's code written anew for the installed versions, in seconds."""

from __future__ import annotations

from rewriter.cli import options
from rewriter.common.processes import start_early


def refresh(directory: options.Output, verify: options.RefreshVerify = "shrunken") -> None:
    """Write the generated code of an output anew, for the installed versions of rewriter and transformers.

    Its weights stay as they are, also those of a fine-tuned output. Exit code 3, and no change, where the new code does
    not compute what the old one did.
    """
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        verification = api.refresh(directory, verify=verify, progress=progress)
    from rewriter.cli.rendering import print_verification

    print_verification(verification)
