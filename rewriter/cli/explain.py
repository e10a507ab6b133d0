"""`rewrite inspect`, `diff` and `bisect`: a model or an output explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rewriter.cli import options
from rewriter.cli.convert import parse_overrides, with_also
from rewriter.common.files import require_place, write_text
from rewriter.common.processes import start_early
from rewriter.common.run_context import RunContext


def inspect(
    model: options.Model,
    recipe: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Show what this recipe would change.")] = None,
    tp: options.Ranks = 1,
    tp_also: options.AlsoRanks = None,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a sequence, to plan for with --sp."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show the plan of every layer: reads, sums, and how ranks hold each tensor."),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Show a model's residual stream, collectives, bytes per token and memory per rank. Reads no weights.

    With --recipe: before and after, and the reason for every rule that did not fire.
    """
    from rewriter import api

    context = RunContext(trust_remote_code=trust_remote_code)
    overrides = with_also(parse_overrides(set or []), tp_also)
    inspection = api.inspect(model, recipe=recipe, tp=tp, sp=sp, tokens=tokens, context=context, set=overrides)
    if json:
        typer.echo(inspection.to_json())
        return
    if plan:
        typer.echo(inspection.plan, nl=False)
        return
    from rich.console import Console

    from rewriter.explain.inspection_tables import tables

    Console().print(tables(inspection.data, verbose=verbose))


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="An output, or a model.")],
    second: Annotated[
        str | None,
        typer.Argument(metavar="B", help="An output or a model to compare A with.", show_default="A's source"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A is a model: compare it with this recipe's result. Writes nothing."),
    ] = None,
    source: options.SourceModel = None,
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    code: Annotated[bool, typer.Option("--code", help="Also print the generated code side by side.")] = False,
    ir: Annotated[bool, typer.Option("--ir", help="Also print each pass's changes of the IR.")] = False,
    tensors: Annotated[bool, typer.Option(help="Compare tensors, which reads all weights.")] = True,
    html: options.Html = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Compare an output with its source, or two outputs: passes, layers, generated code, tensors.

    With --html also as one page with drawings of the layers.
    """
    from rewriter.cli.progress import ProgressLine

    if html is not None:
        require_place(html, "--html")
    with ProgressLine() as progress:
        from rewriter import api

        report = api.diff(
            first, second, recipe=recipe, source=source, tp=tp, sp=sp, set=parse_overrides(set or []), tensors=tensors,
            context=RunContext(progress, trust_remote_code),
        )  # fmt: skip
    if html is not None:
        write_text(Path(html), report.to_html(), "--html")
    if json:
        typer.echo(report.to_json())
        return
    from rich.console import Console

    from rewriter.explain.diff.terminal import ir_difference, side_by_side

    console = Console(highlight=False)
    console.print(report)
    if ir:
        console.print("\n", ir_difference(report.passes), sep="")
    if code:
        console.print("\n", side_by_side(report.code, console.width), sep="")
    if html is not None:
        console.print(f"\nwrote [bold]{html}[/]")


def bisect(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="An output that does not verify; with --recipe, a model.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="DIR is a model: find the pass of this recipe that goes wrong on it."),
    ] = None,
    source: options.SourceModel = None,
    weights: Annotated[
        Literal["shrunken", "real"] | None,
        typer.Option(help="Weights that the passes run on.", show_default="shrunken with --recipe, else real"),
    ] = None,
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Find the first pass, layer and statement whose result is wrong.

    Exit code 3 if a result is wrong, 0 if none is.
    """
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        bisection = api.bisect(
            directory, recipe=recipe, source=source, weights=weights, tp=tp, sp=sp, set=parse_overrides(set or []),
            context=RunContext(progress, trust_remote_code),
        )  # fmt: skip
    if json:
        typer.echo(bisection.to_json())
    else:
        from rich.console import Console

        Console(highlight=False).print(bisection)
    if bisection.fault is not None:
        raise typer.Exit(3)
