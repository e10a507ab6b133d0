"""`rewrite search MODEL --fabric F --tp N`: the fastest mix of rewrites that a model bears."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rewriter.cli import options
from rewriter.cli.convert import read_text
from rewriter.common.errors import RewriterError, shortened
from rewriter.common.numbers import json_text
from rewriter.common.run_context import RunContext
from rewriter.predict.workload import Cluster, Workload

if TYPE_CHECKING:
    from rewriter.predict.search.run import SearchResult


def search(
    context: typer.Context,
    model: options.Model,
    fabric: options.FabricName = "h100-nvlink",
    tp: options.AllRanks = 8,
    loss: options.LossBudget = "1%",
    calibration: options.SearchText = None,
    out: options.SearchedRecipe = None,
    state: options.SearchState = None,
    nodes: options.Nodes = None,
    sp: options.TokenRanks = None,
    batch: options.Batch = 1,
    prompt: options.Prompt = 1024,
    generate: options.Generate = 512,
    what_if: options.WhatIf = None,
    library: options.Library = None,
    engine: options.PredictedEngine = "vllm",
    graphed: options.Graphed = True,
    seed: options.SearchSeed = 0,
    html: options.Html = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Search the fastest mix of rewrites within a rise in loss: measured on MODEL's weights, predicted on a fabric.

    Writes the recipe, for `rewrite MODEL --recipe FILE`. The measurements are kept in --state: an interrupted search
    continues from them, and a search for another fabric or another --loss starts with them.
    """
    from rewriter.common.files import require_place, write_text

    budget = parse_share(loss)
    recipe = out if out is not None else Path(f"{_name(model)}-{Path(fabric).stem}-tp{tp}.yaml")
    require_place(recipe, "--out", more_beside=True)
    if html is not None:
        require_place(html, "--html")
    text = None if calibration is None else read_text(calibration)
    kept = state if state is not None else recipe.with_name(f"{recipe.stem}.search")

    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        from rewriter import api

        result = api.search(
            model, Workload(batch, prompt, generate, graphed, tp, sp, nodes),
            Cluster(fabric, tuple(what_if or ()), library), loss=budget, engine=engine, text=text, seed=seed,
            state=kept, context=RunContext(progress, trust_remote_code),
        )  # fmt: skip
    write_text(recipe, result.recipe, "--out")
    if html is not None:
        from rewriter.show.search import search_page

        write_text(html, search_page(result, shlex.join(["rewrite", *(context.obj or [])])), "--html")
    if json:
        from rewriter.show.search import verdict

        found = verdict(result, model, str(recipe))._asdict()
        typer.echo(json_text({**result.to_json(), "file": str(recipe)} | found, indent=2))
        return
    _print(result, model, recipe, html)


def parse_share(text: str) -> float:
    """`"1%"` or `"0.01"` as 0.01. Raises RewriterError for what is no number."""
    matched = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,18})?|\.[0-9]{1,18})\s*(%?)\s*", text)
    if not matched:
        raise RewriterError(f"--loss {shortened(text)}: expected a share of the loss, such as 1% or 0.01.")
    return float(matched[1]) / (100 if matched[2] else 1)


def _name(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rsplit("/", 1)[-1]


def _print(result: SearchResult, model: str, recipe: Path, html: Path | None) -> None:
    from rich.console import Console

    from rewriter.cli.rendering import print_verdict
    from rewriter.show.search import SearchReport, verdict

    console = Console(highlight=False)
    console.print(SearchReport(result))
    if html is not None:
        typer.echo(f"\nwrote {html}")
    typer.echo(f"\nwrote {recipe}")
    print_verdict(console, verdict(result, model, str(recipe))._asdict())
