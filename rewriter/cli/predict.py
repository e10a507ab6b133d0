"""`rewrite predict MODEL --recipe R --fabric F`: what recipes gain on a cluster, before anyone rents it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError


def predict(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory, a bare config.json or a hub id.", show_default=False
        ),
    ],
    recipe: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="A recipe. Repeatable: the first is what others are compared with."),
    ],
    fabric: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The cluster: `rewrite fabrics` lists those known.")
    ] = "h100-nvlink",
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks in all.")] = 8,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Nodes that the ranks lie on. Without it: as few as hold them."),
    ] = None,
    sp: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of them, those that share tokens, in recipes that do. Without it: all."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences at a time.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of a prompt.")] = 1024,
    generate: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens to generate for each.")] = 512,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE", help="Another fabric: all_reduce=+5us, all_reduce=x1.5, bandwidth=x0.5. Repeatable."
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose collectives: nccl, vllm, … Without it: the fabric's first."),
    ] = None,
    graphed: Annotated[
        bool, typer.Option("--graphed/--eager", help="Launch a pass as one CUDA graph, or kernel by kernel.")
    ] = True,
    pareto: Annotated[bool, typer.Option("--pareto", help="Try other numbers of ranks and many batches too.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run one rank for real on this machine, its peers emulated."),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Run all ranks for real on this machine, and compare with what is predicted."),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.", show_default=False)
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Predict prefill, time per token and exposed communication of recipes on a cluster. Needs no GPU and no weights.

    --measure takes the computing from one rank that really runs, on this machine's GPU or CPU; only delays are the
    fabric's. --validate runs the same on a fabric that it calibrates here, and all ranks for real beside it.
    """
    if measure and pareto:
        raise RewriterError("--pareto: with --measure one job runs, so there are no points. Leave out one of the two.")
    if html is not None:
        from rewriter.predict.page import require_place

        require_place(html)
    from rewriter import api

    job: dict[str, Any] = dict(
        fabric=fabric, library=library, tp=tp, sp=sp, batch=batch, prompt=prompt, generate=generate,
        graphed=graphed, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    changes = tuple(what_if or ())
    if measure:
        found = api.measure(model, recipe, nodes=nodes, what_if=changes, **job)
    else:
        found = api.predict(model, recipe, nodes=nodes, what_if=changes, pareto=pareto, **job)
    if validate and (changes or nodes is not None):
        typer.echo(
            "note: --validate leaves out --nodes and --what-if: real ranks run on this machine as it is", err=True
        )
    validation = api.validate(model, recipe, **job) if validate else None
    if html is not None:
        from rewriter.cli.fabric_tables import figures_of
        from rewriter.fabric import load_fabric
        from rewriter.predict.page import page, write_page

        command = shlex.join(["rewrite", *(context.obj or [])])
        figures = [(row["figure"], row["text"], row["source"]) for row in figures_of(load_fabric(fabric))]
        write_page(html, page(found, command, figures, validation))
    if json:
        from json import dumps

        from rewriter.predict.results import to_json

        objects = to_json(found)
        if validation is not None:
            objects = [{**one, "validation": validation.of(one["recipe"])} for one in objects]
        typer.echo(dumps(objects, indent=2, ensure_ascii=False, allow_nan=False))
        for entry in found.skipped:
            typer.echo(f"warning: {entry.recipe}: not predicted. {entry.reason}", err=True)
        return
    from rich.console import Console

    from rewriter.predict.comparison_tables import ComparisonReport

    console = Console(highlight=False)
    console.print(ComparisonReport(found, pareto))
    if validation is not None:
        console.print()
        console.print(validation)
    if html is not None:
        typer.echo(f"\nwrote {html}")
