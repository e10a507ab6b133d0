"""`rewrite verify`, `reshard`, `refresh` and `export`: commands on an output directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli import options
from rewriter.common.numbers import json_text
from rewriter.common.processes import start_early
from rewriter.common.run_context import RunContext


def verify(
    directory: options.Output,
    images: Annotated[
        bool, typer.Option("--images", help="Also a random picture, where the model takes them.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Check a written output again: file hashes, golden logits, and equality on every rank.

    Exit code 3 if the output computes anything but its recipe.
    """
    _print_verification(lambda api, context: api.verify(directory, context=context, images=images), json)


def reshard(
    directory: options.Output,
    tp: options.Ranks,
    verify: options.ReshardVerify = "shrunken",
    json: options.Json = False,
) -> None:
    """Add the runtime module of --tp ranks to an output whose recipe is not bound to its ranks.

    The checkpoint stays as it is: ranks read ranges of it. Exit code 3, and no change, if the module computes
    something else than the checkpoint.
    """
    _print_verification(lambda api, context: api.reshard(directory, tp, verify=verify, context=context), json)


def refresh(directory: options.Output, verify: options.RefreshVerify = "shrunken", json: options.Json = False) -> None:
    """Write the generated code of an output again, for the installed versions of rewriter and transformers.

    The weights stay as they are, also those of a fine-tuned output. Exit code 3, and no change, if the new code
    computes something else than the old code.
    """
    _print_verification(lambda api, context: api.refresh(directory, verify=verify, context=context), json)


def export(
    directory: options.Output,
    onnx: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the ONNX model.")],
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Write the single-device model as ONNX, with positions and without cache, checked against onnxruntime.

    Code that was changed since `rewrite` wrote it runs only with --trust-remote-code.
    """
    from rewriter import api

    api.export_onnx(directory, onnx, context=RunContext(trust_remote_code=trust_remote_code))
    typer.echo(json_text({"file": str(onnx)}) if json else f"wrote {onnx}")


def _print_verification(run: Callable[[Any, RunContext], dict[str, Any]], json: bool) -> None:
    """Print the checks that `run(api, context)` returns, as JSON if `json`."""
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        verification = run(api, RunContext(progress))
    if json:
        typer.echo(json_text(verification, indent=2))
        return
    if not verification:
        typer.echo("written; nothing was compared")
        return
    from rewriter.cli.rendering import print_verification

    print_verification(verification)
