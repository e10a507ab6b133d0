"""`rewrite serve DIR`: an output behind an HTTP API, by vLLM or the server of transformers."""

from __future__ import annotations

import os
import shlex
import sys

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError
from rewriter.common.numbers import json_text


def serve(
    directory: options.Served,
    arguments: options.EngineArguments = None,
    tp: options.ChosenRanks = None,
    engine: options.ServingEngine = None,
    check: options.Check = False,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: options.DryServe = False,
    json: options.ServeJson = False,
) -> None:
    """Check an output, print which of its all-reduces overlap, and become the serving engine.

    An output that is bound to its ranks is served on that number. Arguments after -- go to the engine unchanged.
    """
    if json and not dry_run:
        raise RewriterError("--json: it prints the command of a dry run. Add --dry-run")
    from rewriter.cli.serve_command import serve_command

    command = serve_command(
        directory, tp=tp, engine=engine, arguments=arguments or [], check=check, trust_remote_code=trust_remote_code
    )
    if json:
        typer.echo(json_text({"command": command.arguments, "notes": command.notes}, indent=2))
        return
    for note in command.notes:
        typer.echo(note, err=True)
    if dry_run:
        typer.echo(shlex.join(command.arguments))
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command.arguments[0], command.arguments)
