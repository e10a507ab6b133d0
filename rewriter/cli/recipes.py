"""`rewrite recipes`: list, show, validate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewriter.cli import options
from rewriter.cli.command_help import command_with, group_with

if TYPE_CHECKING:
    from rewriter.recipes.catalogue import Entry

app = typer.Typer(
    help="List the recipes that ship, show one, or check a file of your own.",
    rich_markup_mode=None,
    subcommand_metavar="[COMMAND] [OPTIONS]",
    cls=group_with(
        "rewrite recipes",
        "rewrite recipes --verbose",
        "rewrite recipes show ladder-upper-half > mine.yaml",
    ),
)

Verbose = Annotated[bool, typer.Option("--verbose", help="Print whole summaries and the passes of each recipe.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context, verbose: Verbose = False, as_json: options.JsonList = False) -> None:
    """List the recipes that ship, show one, or check a file of your own."""
    options.list_by_default(context, listing, verbose=verbose, as_json=as_json)


@app.command(
    "list",
    cls=command_with("rewrite recipes list", "rewrite recipes list --verbose", "rewrite recipes list --json"),
)
def listing(verbose: Verbose = False, as_json: options.JsonList = False) -> None:
    """List the recipes that ship by kind, the recommended ones marked."""
    from rewriter.recipes.catalogue import KINDS, entries

    if as_json:
        from rewriter.common.numbers import json_text

        typer.echo(json_text([entry._asdict() for entry in entries()], indent=2))
        return
    from rich.console import Console
    from rich.padding import Padding

    from rewriter.common.tables import plain_table

    console, known = Console(highlight=False), entries()
    for kind, title in KINDS.items():
        name, _, rest = title.partition(": ")
        console.print(f"[bold]{name}[/]: {rest}")
        table = plain_table(None, "recipe", "what it does", whole=("recipe",), show_header=False)
        table.columns[0].min_width = max(len(entry.name) for entry in known)
        for entry in known:
            if entry.kind == kind:
                table.add_row(f"[bold]{entry.name}[/]", "\n".join(_lines(entry, verbose)))
        console.print(Padding(table, (0, 0, 0, 2), expand=False), "")
    console.print("bound: it runs on the number of ranks that it was converted for, no other.")
    console.print("from scratch: meant for models that are trained with it from the start.")
    console.print("Edit a copy: `rewrite recipes show NAME > mine.yaml`. Passes: --verbose.")


def _lines(entry: Entry, verbose: bool) -> Iterator[str]:
    yield entry.summary if verbose else entry.short
    if entry.recommended:
        yield f"[green]recommended for {entry.recommended}[/]"
    if verbose:
        yield f"[dim]{' → '.join(entry.passes)}[/]"


@app.command(
    cls=command_with(
        "rewrite recipes show ladder-upper-half",
        "rewrite recipes show ladder-upper-half > mine.yaml",
        "rewrite recipes show mine.yaml --json",
    )
)
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A name that `rewrite recipes` lists, or a YAML file.")
    ],
    json: options.Json = False,
) -> None:
    """Print a recipe's YAML file."""
    from rewriter.common.yaml_documents import read_file
    from rewriter.recipes.catalogue import find

    text = read_file(find(name))
    if json:
        from rewriter.common.numbers import json_text
        from rewriter.recipes import Recipe

        recipe = Recipe.load(name)
        typer.echo(json_text({**recipe.to_dict(), "kind": recipe.kind, "recommended": recipe.recommended}, indent=2))
        return
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "yaml", background_color="default"))


@app.command(
    cls=command_with(
        "rewrite recipes validate mine.yaml",
        "rewrite recipes validate mine.yaml --json",
        "rewrite recipes validate mine.yaml && rewrite models/mine --recipe mine.yaml",
    )
)
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe's YAML file.")], json: options.Json = False
) -> None:
    """Check a recipe file: every fault at once, each with its line."""
    from rewriter.common.numbers import json_text
    from rewriter.passes import installed
    from rewriter.recipes import Recipe

    recipe = Recipe.load(file)
    recipe.build()
    packages = {name: f"{name} ({package})" for name in installed.names() if (package := installed.requirement(name))}
    names = [packages.get(spec.pass_name, spec.pass_name) for spec in recipe.passes]
    found = {"file": str(file), "valid": True, "passes": names}
    typer.echo(json_text(found, indent=2) if json else f"{file}: a valid recipe: {' → '.join(names)}")
