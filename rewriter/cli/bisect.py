"""`rewrite bisect DIR`: the first pass, layer and statement at which a computation goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rewriter.cli import options
from rewriter.common.processes import start_early


def bisect(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="An output that does not verify; with --recipe, a model.")
    ],
    recipe: Annotated[
        str | None, typer.Option(help="DIR is a model: find the pass of this recipe that goes wrong on it.")
    ] = None,
    source: options.SourceModel = None,
    weights: Annotated[
        Literal["shrunken", "real"] | None,
        typer.Option(help="What passes are run on. Without it: shrunken with --recipe, else real."),
    ] = None,
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Find the first pass, layer and statement at which an output parts from what it should compute.

    Exit code 3 where they part, 0 where they do not.
    """
    from rewriter.cli.convert import parse_overrides
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        found = api.bisect(
            directory, recipe=recipe, source=source, weights=weights, tp=tp, sp=sp, set=parse_overrides(set or []),
            trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
    if json:
        typer.echo(found.to_json())
    else:
        from rich.console import Console

        Console(highlight=False).print(found)
    if found.fault is not None:
        raise typer.Exit(3)
