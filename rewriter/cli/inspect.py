"""`rewrite inspect MODEL`: what a model reads, writes and communicates, from config.json alone."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli import options
from rewriter.common.run_context import RunContext


def inspect(
    model: options.Model,
    recipe: Annotated[str | None, typer.Option(help="Show what this recipe would change.")] = None,
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a sequence, to plan for with --sp."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show the plan of every layer: reads, sums, and how ranks hold each tensor."),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Show a model's residual stream, collectives, bytes per token and memory per rank. Reads no weights.

    With --recipe: before and after, and for every rule that did not fire, why.
    """
    from rewriter import api

    context = RunContext(trust_remote_code=trust_remote_code)
    inspection = api.inspect(model, recipe=recipe, tp=tp, sp=sp, tokens=tokens, context=context)
    if json:
        typer.echo(inspection.to_json())
        return
    if plan:
        typer.echo(inspection.plan, nl=False)
        return
    from rich.console import Console

    Console().print(inspection)
