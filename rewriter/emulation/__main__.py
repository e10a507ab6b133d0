"""`python -m rewriter.emulation`: torchrun for a job of which only some ranks are real."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from rewriter.common.errors import RewriterError
from rewriter.emulation.config import UNPACED, EmulationConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
def run(
    script: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENT]...")] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks of the job.")] = None,
    real: Annotated[
        list[int] | None, typer.Option(help="A rank that runs as a process; may be repeated. Rank 0 if not given.")
    ] = None,
    fabric: Annotated[
        str, typer.Option(help=f"A fabric's name or YAML file; `{UNPACED}`: the wire alone sets the time.")
    ] = "h100-nvlink",
    library: Annotated[str | None, typer.Option(help="Whose collectives: nccl, vllm, …")] = None,
    graphed: Annotated[bool, typer.Option("--graphed", help="Collectives are replayed from CUDA graphs.")] = False,
    mode: Annotated[str, typer.Option(help="delay: time passes; wire: real messages over TCP, for CPUs.")] = "delay",
    what_if: Annotated[list[str] | None, typer.Option(help="A change, as all_reduce=+5us; may be repeated.")] = None,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="Real ranks run one after another, each with all others emulated.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds, where a script names none.")] = 1800.0,
    environment: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Wire mode: an environment process started elsewhere.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Be that process, until it is stopped.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run an unmodified script on some real ranks of a world whose other ranks are emulated."""
    values: dict[str, Any] = {
        "real": real or [0], "fabric": fabric, "graphed": graphed, "mode": "wire" if serve else mode,
        "what_if": what_if or [], "timeout": timeout, "environment": environment, "library": library,
    }  # fmt: skip
    if serve is not None:
        if script:
            raise RewriterError(f"--serve runs no script, and was given {script[0]}. Start the script without --serve")
        config = EmulationConfig.of(world_size=world_size or max(values["real"]) + 1, **values)
        from rewriter.emulation import environment as process

        listener = process.listen(serve)
        typer.echo(f"environment process at {serve}, fabric {config.fabric}", err=True)
        process.serve(listener, config)
        return
    if not script:
        raise RewriterError("no script. Write: python -m rewriter.emulation --world-size N SCRIPT [ARGUMENT]...")
    if world_size is None:
        raise RewriterError("--world-size is missing: the number of ranks that the script is to see")
    if environment is not None and mode != "wire":
        raise RewriterError(f"--environment {environment}: only --mode wire has an environment process")
    config = EmulationConfig.of(world_size=world_size, **values)
    from rewriter.emulation.launcher import launch, launch_in_turn

    if config.fabric != UNPACED or config.mode == "delay" or config.what_if:
        config.delay_model()  # a fabric that cannot be loaded is reported once, not by every rank
    raise typer.Exit((launch_in_turn if in_turn else launch)(config, script, as_module=module))


def main() -> int:
    """Run the command; the exit code. Failures are reported in one line, with REWRITER_DEBUG as tracebacks."""
    try:
        return int(app(standalone_mode=False, prog_name="python -m rewriter.emulation") or 0)
    except RewriterError as error:
        if os.environ.get("REWRITER_DEBUG"):
            raise
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except typer.Abort:
        return 130
    except typer.TyperException as error:  # a complaint about options
        typer.echo(f"error: {error.format_message()}", err=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
