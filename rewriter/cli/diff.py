"""`rewrite diff A [B]`: what a recipe changed, or what two outputs differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options
from rewriter.common.run_context import RunContext


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="An output, or a model.")],
    second: Annotated[
        str | None, typer.Argument(metavar="[B]", help="What A is compared with. Without it: A's source.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A is a model: compare it with what this recipe makes of it. Writes nothing.")
    ] = None,
    source: options.SourceModel = None,
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    code: Annotated[bool, typer.Option("--code", help="Print the generated code side by side too.")] = False,
    ir: Annotated[bool, typer.Option("--ir", help="Print what each pass changed in the IR too.")] = False,
    tensors: Annotated[bool, typer.Option(help="Compare tensors, which reads all weights.")] = True,
    html: options.Html = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Compare an output with its source, or two outputs: passes, layers, generated code, tensors.

    With --html also as one page with drawings of the layers.
    """
    from rewriter.cli.convert import parse_overrides
    from rewriter.cli.progress import ProgressLine

    if html is not None:
        from rewriter.common.files import require_place

        require_place(html, "--html")
    with ProgressLine() as progress:
        from rewriter import api

        found = api.diff(
            first, second, recipe=recipe, source=source, tp=tp, sp=sp, set=parse_overrides(set or []), tensors=tensors,
            context=RunContext(progress, trust_remote_code),
        )  # fmt: skip
    if html is not None:
        from rewriter.common.files import write_text

        write_text(Path(html), found.to_html(), "--html")
    if json:
        typer.echo(found.to_json())
        return
    from rich.console import Console

    from rewriter.explain.diff.terminal import ir_difference, side_by_side

    console = Console(highlight=False)
    console.print(found)
    if ir:
        console.print("\n", ir_difference(found.passes), sep="")
    if code:
        console.print("\n", side_by_side(found.code, console.width), sep="")
    if html is not None:
        console.print(f"\nwrote [bold]{html}[/]")
