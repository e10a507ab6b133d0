"""`rewrite export DIR --onnx FILE`: the single-device model for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options
from rewriter.common.run_context import RunContext


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
