"""All commands with their examples, the rule that a first word that is no command is MODEL, and reports of failures."""

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
from rewriter.cli.command_help import WIDEST, command_with, group_with
from rewriter.common.errors import RewriterError, nearest, shortened
from rewriter.common.packages import VERSION
from rewriter.common.processes import end_with_job, leaving_on_signals, report

HELP = """Rewrite a language model so that it communicates less when it is sharded.

MODEL is a Hugging Face directory or a hub id; DIR is a directory that `rewrite MODEL` wrote. A first word that is no
command is MODEL: `rewrite MODEL --recipe NAME` is `rewrite convert MODEL --recipe NAME`. Write ./inspect for a
directory that is called like a command.
"""

EPILOG = "REWRITER_DEBUG=1 shows the traceback of a failure, and the IR between passes with the time of each."

# Plain help: typer's panels cost more than 0.1 s of imports, and everything `rewrite` prints on failure is one line.
_PLAIN: dict[str, Any] = dict(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
# Of an OSError: what is wrong with a path that was given, and not with the machine.
_OF_PATHS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
_USAGE = "MODEL --recipe NAME [OPTIONS] | COMMAND ..."
SECTIONS = {
    "Start": ("convert", "recipes"),
    "Decide": ("inspect", "predict", "search", "fabrics", "coverage"),
    "Heal": ("adapt",),
    "Run": ("generate", "serve", "reshard", "refresh", "export"),
    "Check": ("verify", "diff", "bisect", "doctor"),
}
"""The commands by the heading under which `rewrite --help` lists them."""

commands = typer.Typer(
    name="rewrite", help=HELP, epilog=EPILOG, subcommand_metavar=_USAGE, **_PLAIN,
    cls=group_with(
        "rewrite Qwen/Qwen3-8B --recipe ladder-upper-half --tp 8 --out ladder",
        "rewrite adapt ladder --out healed --tokens 100000",
        'rewrite generate healed --prompt "The sky is"',
        sections=SECTIONS,
    ),
)  # fmt: skip
conversion = typer.Typer(**_PLAIN)

_CONVERT = command_with(
    "rewrite Qwen/Qwen3-8B --recipe ladder-upper-half --tp 8 --out ladder",
    "rewrite Qwen/Qwen3-8B --recipe fit-tp --tp 3,6 --dtype bf16",
    "rewrite models/mine --recipe ladder --set ladder.layers=last:20 --dry-run",
)
conversion.command(cls=_CONVERT)(convert.convert)
commands.command(short_help="Convert MODEL by a recipe; `convert` may be left out.", cls=_CONVERT)(convert.convert)
commands.command(
    short_help="Show what a model or a recipe communicates.",
    cls=command_with(
        "rewrite inspect Qwen/Qwen3-8B --tp 8",
        "rewrite inspect Qwen/Qwen3-8B --recipe ladder-upper-half --tp 8",
        "rewrite inspect Qwen/Qwen3-8B --recipe fit-tp --tp 3 --plan",
    ),
)(explain.inspect)
commands.command(
    short_help="Predict what recipes gain on a cluster.",
    cls=command_with(
        "rewrite predict Qwen/Qwen3-8B --recipe ladder-upper-half --fabric pcie-gen5",
        "rewrite predict Qwen/Qwen3-8B --recipe ladder --recipe desync-2x --tp 4",
        "rewrite predict models/mine --recipe prefill-int8 --prompt 8192 --json",
    ),
)(predict.predict)
commands.command(
    short_help="Search the fastest mix of rewrites that a model bears.",
    cls=command_with(
        "rewrite search Qwen/Qwen3-8B --fabric h100-nvlink --tp 8 --loss 1%",
        "rewrite search models/mine --fabric pcie-gen5 --calibration text.txt",
        "rewrite search models/mine --batch 16 --out mine.yaml --html search.html",
    ),
)(search.search)
commands.add_typer(recipes.app, name="recipes", short_help="List, show or check recipes.")
commands.add_typer(fabrics.app, name="fabrics", short_help="List, show or measure fabrics.")
commands.command(
    short_help="Fine-tune a written output.",
    cls=command_with(
        "rewrite adapt ladder --out healed --tokens 100000",
        "rewrite adapt ladder --out healed --data chats.jsonl --method sft",
        "rewrite adapt ladder --out healed --tokens 100000 --tp 2 --resume",
    ),
)(adapt.adapt)
commands.command(
    short_help="Try every rewrite on every model type.",
    cls=command_with(
        "rewrite coverage llama qwen3",
        "rewrite coverage --jobs 8 --json",
        "rewrite coverage gemma3 --images",
    ),
)(coverage.coverage)
commands.command(
    short_help="Check a written output again.",
    cls=command_with("rewrite verify ladder", "rewrite verify ladder --json", "rewrite verify gemma-ladder --images"),
)(outputs.verify)
commands.command(
    short_help="Compare an output with its source, or two.",
    cls=command_with(
        "rewrite diff ladder --html diff.html",
        "rewrite diff ladder healed --no-tensors",
        "rewrite diff Qwen/Qwen3-8B --recipe ladder --tp 8 --ir",
    ),
)(explain.diff)
commands.command(
    short_help="Find where a computation goes wrong.",
    cls=command_with(
        "rewrite bisect ladder",
        "rewrite bisect ladder --source models/mine --weights shrunken",
        "rewrite bisect models/mine --recipe mine.yaml --tp 2",
    ),
)(explain.bisect)
commands.command(
    short_help="Add a module for another number of ranks.",
    cls=command_with(
        "rewrite reshard ladder --tp 4",
        "rewrite reshard ladder --tp 4 --verify none",
        "rewrite reshard healed --tp 2 --json",
    ),
)(outputs.reshard)
commands.command(
    short_help="Write an output's code again, for installed versions.",
    cls=command_with("rewrite refresh ladder", "rewrite refresh ladder --verify none", "rewrite refresh healed --json"),
)(outputs.refresh)
commands.command(
    short_help="Continue a text on real ranks.",
    cls=command_with(
        'rewrite generate healed --prompt "The sky is"',
        'rewrite generate healed --message "Why is the sky blue?" --temperature 0.7',
        "rewrite generate healed --prompts prompts.jsonl --max-new-tokens 256 --json",
    ),
)(generate.generate)
commands.command(
    short_help="Serve an output by vLLM or transformers.",
    cls=command_with(
        "rewrite serve healed --tp 8",
        "rewrite serve healed --engine vllm -- --port 8001",
        "rewrite serve healed --dry-run --json",
    ),
)(serve.serve)
commands.command(
    short_help="Write an output as ONNX.",
    cls=command_with(
        "rewrite export healed --onnx healed.onnx",
        "rewrite export healed --onnx healed.onnx --json",
        "rewrite export healed --onnx healed.onnx --trust-remote-code",
    ),
)(outputs.export)
commands.command(
    short_help="Show what works on this machine.",
    cls=command_with("rewrite doctor", "rewrite doctor --json", "rewrite doctor > machine.txt"),
)(doctor.doctor)

COMMANDS = tuple(name for names in SECTIONS.values() for name in names)


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
