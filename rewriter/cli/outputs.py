"""`rewrite verify`, `reshard`, `refresh` and `export`: commands on an output directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli import options
from rewriter.common.processes import start_early
from rewriter.common.run_context import RunContext


def verify(
    directory: options.Output,
    images: Annotated[
        bool, typer.Option("--images", help="Also a random picture, where the model takes them.")
    ] = False,
) -> None:
    """Check a written output again: file hashes, golden logits, and equality on every rank.

    Exit code 3 where it does not compute what its recipe says.
    """
    _print_verification(lambda api, context: api.verify(directory, context=context, images=images))


def reshard(directory: options.Output, tp: options.Ranks, verify: options.ReshardVerify = "shrunken") -> None:
    """Add the runtime module of --tp ranks to an output whose recipe is not bound to its ranks.

    The checkpoint stays as it is: ranks read ranges of it. Exit code 3, and no change, where the module does not
    compute what the checkpoint does.
    """
    _print_verification(lambda api, context: api.reshard(directory, tp, verify=verify, context=context))


def refresh(directory: options.Output, verify: options.RefreshVerify = "shrunken") -> None:
    """Write the generated code of an output anew, for the installed versions of rewriter and transformers.

    Its weights stay as they are, also those of a fine-tuned output. Exit code 3, and no change, where the new code does
    not compute what the old one did.
    """
    _print_verification(lambda api, context: api.refresh(directory, verify=verify, context=context))


def export(
    directory: options.Output,
    onnx: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the ONNX model.")],
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Write the single-device model as ONNX, with positions and without cache, checked against onnxruntime.

    Code that is not as `rewrite` wrote it runs only with --trust-remote-code.
    """
    from rewriter import api

    api.export_onnx(directory, onnx, context=RunContext(trust_remote_code=trust_remote_code))
    typer.echo(f"wrote {onnx}")


def _print_verification(run: Callable[[Any, RunContext], dict[str, Any]]) -> None:
    """Print the checks that `run(api, context)` returns."""
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        verification = run(api, RunContext(progress))
    if not verification:
        typer.echo("written; nothing was compared")
        return
    from rewriter.cli.rendering import print_verification

    print_verification(verification)
