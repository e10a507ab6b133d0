"""`rewrite predict MODEL --recipe R --fabric F`: what recipes gain on a cluster, before anyone rents it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError
from rewriter.common.numbers import json_text
from rewriter.common.run_context import RunContext
from rewriter.predict.workload import Cluster, Draft, Workload

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rewriter.predict.results import RecipeComparison
    from rewriter.predict.validation import Validation


def predict(
    command: typer.Context,
    model: options.ConfigModel,
    recipe: options.Recipes,
    fabric: options.FabricName = "h100-nvlink",
    tp: options.AllRanks = 8,
    nodes: options.Nodes = None,
    sp: options.TokenRanks = None,
    batch: options.Batch = 1,
    prompt: options.Prompt = 1024,
    generate: options.Generate = 512,
    what_if: options.WhatIf = None,
    library: options.Library = None,
    graphed: options.Graphed = True,
    compiled: options.Compiled = None,
    attention: options.AttentionKernels = "fused",
    all_logits: options.AllLogits = False,
    served: options.ServerIntervals = False,
    weights: options.WeightFormat = None,
    cache: options.CacheFormat = None,
    engine: options.PredictedEngine = "vllm",
    draft: options.DraftTokens = None,
    pareto: options.Pareto = False,
    measure: options.Measure = False,
    wire: options.Wire = False,
    validate: options.Validate = False,
    html: options.Html = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Predict prefill, time per token and exposed communication of recipes on a cluster. Needs no GPU and no weights.

    --measure runs one rank on this machine's GPU or CPU, with the fabric's delays in place of communication; with
    --wire its messages travel at the fabric's pace. --validate calibrates a fabric here, measures one rank on it, and
    compares that with all ranks run for real.
    """
    if measure and compiled is not None:
        raise RewriterError(
            "--compiled, --uncompiled: with --measure the module runs as it does. Leave out one of the two."
        )
    if measure and (attention != "fused" or all_logits or served or weights or cache or draft):
        raise RewriterError(
            "--attention, --all-logits, --served, --weights, --cache, --draft: with --measure the module runs as it "
            "does. Leave out one of the two."
        )
    if wire and not measure:
        raise RewriterError("--wire: only with --measure does a rank run whose messages could travel. Add --measure.")
    if measure and pareto:
        raise RewriterError("--pareto: with --measure one job runs, so there are no points. Leave out one of the two.")
    if html is not None:
        from rewriter.common.files import require_place

        require_place(html, "--html")
    from rewriter import api
    from rewriter.predict.engines import engine_named
    from rewriter.predict.next_command import next_words
    from rewriter.show.predict import ComparisonReport

    engine_named(engine)  # also where it is not used
    workload = Workload(
        batch, prompt, generate, graphed, tp, sp, nodes, compiled, attention, all_logits, served, weights, cache
    )  # fmt: skip
    cluster = Cluster(fabric, tuple(what_if or ()), library)
    context = RunContext(trust_remote_code=trust_remote_code)
    if measure:
        comparison = api.measure(model, recipe, workload, cluster, wire=wire, context=context)
    else:
        comparison = api.predict(
            model, recipe, workload, cluster, pareto=pareto, exact=True, engine=engine, draft=_draft(draft),
            context=context,
        )  # fmt: skip
    if validate and (what_if or nodes is not None):
        note = "--validate leaves out --nodes and --what-if: real ranks run on this machine as it is"
        typer.echo(f"note: {note}", err=True)
    here, alone = replace(workload, nodes=None), replace(cluster, what_if=())
    validation = api.validate(model, recipe, here, alone, context=context) if validate else None
    if html is not None:
        _write_page(html, comparison, validation, fabric, command.obj or [])
    words = next_words(comparison, command.obj or [], model if _has_weights(model) else "MODEL", recipe)
    if json:
        _print_json(comparison, validation, words)
    else:
        _print_tables(ComparisonReport(comparison, pareto, verbose), validation, html, words)


def _has_weights(model: str) -> bool:
    """False for a bare config.json, and for a directory without safetensors: no next command converts or serves it."""
    place = Path(model)
    return not place.exists() or (place.is_dir() and any(place.glob("*.safetensors")))


def _draft(text: str | None) -> Draft | None:
    """A draft of "3:0.7". Raises RewriterError for other text."""
    if text is None:
        return None
    tokens, _, acceptance = text.partition(":")
    try:
        return Draft(int(tokens), float(acceptance))
    except ValueError:
        raise RewriterError(
            f"--draft {text!r:.40}: expected TOKENS:RATE, such as 3:0.7 for three tokens, of which 70 % are accepted"
        ) from None


def _write_page(
    file: Path, comparison: RecipeComparison, validation: Validation | None, fabric: str, words: Sequence[str]
) -> None:
    from rewriter.cli.fabric_tables import figures_of
    from rewriter.common.files import write_text
    from rewriter.fabric import load_fabric
    from rewriter.show.predict import predict_page

    figures = [(row["figure"], row["text"], row["source"]) for row in figures_of(load_fabric(fabric))]
    write_text(file, predict_page(comparison, shlex.join(["rewrite", *words]), figures, validation), "--html")


def _print_json(comparison: RecipeComparison, validation: Validation | None, words: Sequence[str]) -> None:
    from rewriter.predict.as_json import to_json

    objects = to_json(comparison, words)
    if validation is not None:
        objects = [
            {**one, "validation": validation.of(one["recipe"])} if one.get("bound") is False else one
            for one in objects  # exact choices and the bound do not run
        ]
    typer.echo(json_text(objects, indent=2))
    for entry in comparison.skipped:
        typer.echo(f"warning: {entry.recipe}: not predicted. {entry.reason}", err=True)


def _print_tables(
    report: RenderableType, validation: Validation | None, html: Path | None, words: Sequence[str]
) -> None:
    from rich.console import Console

    from rewriter.cli.rendering import print_next

    console = Console(highlight=False)
    if validation is not None:
        console.print(validation)
        console.print()
    console.print(report)
    print_next(console, shlex.join(words))
    if html is not None:
        typer.echo(f"\nwrote {html}")
