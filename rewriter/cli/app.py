"""The commands put together, the rule that a first word that is no command is MODEL, and how failures are reported."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli import (
    adapt,
    convert,
    coverage,
    doctor,
    explain,
    fabrics,
    generate,
    outputs,
    predict,
    recipes,
    search,
    serve,
)
from rewriter.common.errors import RewriterError, nearest, shortened
from rewriter.common.packages import VERSION
from rewriter.common.processes import end_with_job, leaving_on_signals, report

HELP = """Rewrite a language model so that it communicates less when it is sharded.

\b
  rewrite MODEL --recipe NAME    converts a checkpoint; its options: rewrite MODEL --help
  rewrite recipes                lists the recipes

MODEL is a Hugging Face directory or a hub id. A first word that is none of the commands below is MODEL;
write ./inspect for a directory that is called like a command.
"""

EPILOG = "REWRITER_DEBUG=1 shows the traceback of a failure, and the IR between passes with the time of each."

# Plain help: typer's panels cost more than 0.1 s of imports, and everything `rewrite` prints on failure is one line.
_PLAIN: dict[str, Any] = dict(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Of an OSError: what is wrong with a path that was given, and not with the machine.
_OF_PATHS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
_USAGE = "MODEL --recipe NAME | COMMAND ..."
commands = typer.Typer(
    name="rewrite", help=HELP, epilog=EPILOG, subcommand_metavar=_USAGE, options_metavar="", **_PLAIN
)
conversion = typer.Typer(**_PLAIN)

conversion.command(options_metavar="--recipe NAME [OPTIONS]")(convert.convert)
commands.command(short_help="Show what a model or a recipe communicates.")(explain.inspect)
commands.command(short_help="Predict what recipes gain on a cluster.")(predict.predict)
commands.command(short_help="Search the fastest mix of rewrites that a model bears.")(search.search)
commands.add_typer(recipes.app, name="recipes", short_help="List, show or check recipes.")
commands.add_typer(fabrics.app, name="fabrics", short_help="List, show or measure fabrics.")
commands.command(short_help="Fine-tune a written output.")(adapt.adapt)
commands.command(short_help="Try every rewrite on every model type.")(coverage.coverage)
commands.command(short_help="Check a written output again.")(outputs.verify)
commands.command(short_help="Compare an output with its source, or two.")(explain.diff)
commands.command(short_help="Find where a computation goes wrong.")(explain.bisect)
commands.command(short_help="Add a module for another number of ranks.")(outputs.reshard)
commands.command(short_help="Write an output's code anew.")(outputs.refresh)
commands.command(short_help="Continue a text on real ranks.")(generate.generate)
commands.command(short_help="Serve an output by vLLM or transformers.", options_metavar="[OPTIONS]")(serve.serve)
commands.command(short_help="Write an output as ONNX.")(outputs.export)
commands.command(short_help="Show what works on this machine.")(doctor.doctor)

COMMANDS = tuple(typer.main.get_command(commands).commands)  # type: ignore[attr-defined]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewriter {VERSION}")
        raise typer.Exit


@commands.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `rewrite` and returns its exit code: 0, 1 unexpected, 2 refused, 3 verification failed, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # transformers' advice is about its own API; what concerns this command is in its own messages
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars, too
    is_rank = end_with_job()
    try:
        _refuse_other_bytes(words)
        with nullcontext() if is_rank else leaving_on_signals():  # a rank ends at once
            return _dispatch(words)
    except RewriterError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        hint = f"`rewrite {words[0] if words and words[0] in COMMANDS else 'MODEL'} --help` lists the options."
        return _fail(f"{error.format_message().rstrip('.')}. {hint}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted.", 130)
    except SystemExit as end:
        if end.code not in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            raise
        return _fail(f"ended by {signal.Signals(int(end.code) - 128).name}.", int(end.code))
    except OSError as error:
        if error.filename is not None and error.errno in _OF_PATHS:
            return _fail(f"{shortened(os.fsdecode(error.filename))}: {error.strerror}. Check the path.", 2)
        named = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        place = f"{named}: " if named else ""
        return _fail(f"{place}{error.strerror or error}. REWRITER_DEBUG=1 shows the traceback.", 1)
    except Exception as error:
        if (advice := _missing_package(error)) is not None:
            return _fail(advice, 2)
        hint = "This is a fault of rewriter. REWRITER_DEBUG=1 shows the traceback."
        return _fail(f"{type(error).__name__}: {' '.join(str(error).split()):.400}. {hint}", 1)


def _missing_package(error: Exception) -> str | None:
    """The package to install, if an error says that one is missing; transformers has a text for its own."""
    if not isinstance(error, ImportError):
        return None
    name, text = (error.name or "").partition(".")[0], " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and name not in ("", "rewriter"):
        return f"this needs the package {name}, which is not installed. Install it: pip install {name}."
    return f"{text:.400}" if "pip install" in text or "not found in your environment" in text else None


def _refuse_other_bytes(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            name = shortened(ascii(word)[1:-1])
            raise RewriterError(f"{name}: it is not UTF-8 text. Write it, and name files, in UTF-8.") from None


def _dispatch(words: list[str]) -> int:
    if not words:
        words = ["--help"]
    if words[0] in COMMANDS or words[0] in ("-h", "--help", "--version"):
        code = commands(words, prog_name="rewrite", standalone_mode=False, obj=words)
    else:
        _refuse_misspelt_command(words[0])
        code = conversion(words, prog_name="rewrite", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _refuse_misspelt_command(word: str) -> None:
    if word.startswith("-") or "/" in word or Path(word).exists():
        return
    guess = nearest(word, COMMANDS)
    if guess:
        raise RewriterError(f"{word}: neither a command nor a model directory. Did you mean `rewrite {guess}`?")


def _fail(message: str, code: int) -> int:
    if os.environ.get("REWRITER_DEBUG", "0") not in ("", "0") and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    if not report(message, message):
        typer.echo(f"error: {message}", err=True)
    return code
