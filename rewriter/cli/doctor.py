"""`rewrite doctor`: what this machine has, which commands will work on it, and what is missing."""

from __future__ import annotations

import typer

from rewriter.cli import options


def doctor(json: options.Json = False) -> None:
    """Show versions, devices and compilers, and which commands work here.

    Exit code 2 if something is missing that every command needs. Paste its output into a bug report.
    """
    from rewriter.cli.doctor_report import examine

    machine = examine()
    if json:
        typer.echo(machine.to_json())
    else:
        from rich.console import Console

        from rewriter.cli.rendering import print_verdict

        console = Console(highlight=False)
        console.print(machine)
        print_verdict(console, {"verdict": machine.verdict, "next": machine.next})
    if not machine.ok:
        raise typer.Exit(2)
