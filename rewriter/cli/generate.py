"""`rewrite generate DIR --prompt TEXT`: text from the sharded module, on real ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from rewriter.cli import options


def generate(
    directory: options.Output,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="How many tokens to add at most.")] = 64,
) -> None:
    """Continue a text greedily, on as many ranks as the manifest names. Prints the prompt and what follows it."""
    from rewriter import api

    typer.echo(api.generate(directory, prompt, max_new_tokens=max_new_tokens))
