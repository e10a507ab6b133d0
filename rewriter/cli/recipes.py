"""`rewrite recipes`: list, show, validate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options

app = typer.Typer(help="List the recipes that ship, show one, or check a file of your own.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, as_json: options.JsonList = False) -> None:
    """List the recipes that ship, show one, or check a file of your own."""
    options.list_by_default(context, as_json, listing)


@app.command("list")
def listing(as_json: options.JsonList = False) -> None:
    """List the recipes that ship."""
    if as_json:
        from json import dumps

        from rewriter.recipes.catalogue import entries

        typer.echo(dumps([entry._asdict() for entry in entries()], indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    from rewriter.common.tables import WIDE, plain_table
    from rewriter.recipes.catalogue import entries

    look = WIDE | {"header_style": "table.header"}
    table = plain_table(None, "recipe", "what it does", whole=("recipe",), **look)
    for entry in entries():
        table.add_row(f"[bold]{entry.name}[/]", f"{entry.summary}\n[dim]{' → '.join(entry.passes)}[/]")
    console = Console()
    console.print(table)
    console.print("\nCopy one to edit it: `rewrite recipes show NAME > mine.yaml`", highlight=False)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME|FILE")]) -> None:
    """Print a recipe's YAML file."""
    from rewriter.common.yaml_documents import read_file
    from rewriter.recipes.catalogue import find

    text = read_file(find(name))
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "yaml", background_color="default"))


@app.command()
def validate(file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Check a recipe file: every fault at once, each with its line."""
    from rewriter.recipes import Recipe

    recipe = Recipe.load(file)
    recipe.build()
    typer.echo(f"{file}: a valid recipe: {' → '.join(spec.pass_name for spec in recipe.passes)}")
