"""`rewrite coverage [TYPE ...]`: what works on every causal LM that the installed transformers registers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.numbers import json_text
from rewriter.common.scratch import scratch_folder

if TYPE_CHECKING:
    from rewriter.check.coverage.coverage_row import Coverage


def coverage(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TYPE ...]", help="Model types. Without any: all."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Types at a time.")] = 1,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time for one type.")] = 120.0,
    variants: Annotated[
        bool, typer.Option("--variants", help="Also throw each switch of a config that changes what a model computes.")
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write coverage.md and coverage_reasons.md there.", exists=True, file_okay=False
        ),
    ] = None,
    rows_of: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE", help="Show the rows that an earlier run printed with --json.", exists=True
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="With --markdown: add totals of a --json run with other versions.", exists=True
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Try every rewrite on a small model of each causal-LM type of transformers, and say what does not work and why.

    Per type: builds, traces, ladder, tensor parallelism on 2 and 4 ranks, desync, and the emitted checkpoint, each
    compared with the unmodified model or an independent reference. With --variants, raise --limit to 900: each switch
    is traced, made a ladder and split on 2 ranks, too. Exit code 3 where a result is wrong.
    """
    rows = _read(rows_of) if rows_of is not None else _run(types or [], jobs, limit, variants)
    if json:
        typer.echo(json_text([row.to_dict() for row in rows], indent=2))
    elif markdown is not None:
        from rewriter.check.coverage import coverage_table

        for name, text in coverage_table.pages(rows, [_read(path) for path in compare or ()]).items():
            (markdown / name).write_text(text, encoding="utf-8")
    else:
        from rich.console import Console

        from rewriter.check.coverage import coverage_table

        Console(highlight=False).print(coverage_table.table(rows))
    if wrong := [row.type for row in rows if row.wrong]:
        raise VerificationError(f"{len(wrong)} of {len(rows)} types are wrong: {', '.join(wrong)}")


def _run(types: list[str], jobs: int, limit: float, variants: bool) -> list[Coverage]:
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress, scratch_folder("coverage") as scratch:
        progress("importing")
        # For the processes that check; torch and transformers read these when they are imported. Code of emitted
        # checkpoints is imported from here, not from the user's cache, and `jobs` says how many cores to use.
        os.environ |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        from rewriter.check.coverage.check import check, check_with_variants
        from rewriter.check.coverage.configs import require_registered
        from rewriter.check.coverage.pool import run

        chosen = require_registered(types)
        rows = []
        for row in run(chosen, check_with_variants if variants else check, jobs=jobs, limit=limit):
            rows.append(row)
            progress("coverage", len(rows), len(chosen))
    return sorted(rows, key=lambda row: chosen.index(row.type))


def _read(path: Path) -> list[Coverage]:
    from json import loads

    from rewriter.check.coverage.coverage_row import Coverage

    try:
        return [Coverage.from_dict(row) for row in loads(path.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise RewriterError(f"{path}: not the output of `rewrite coverage --json` ({type(error).__name__})") from error
