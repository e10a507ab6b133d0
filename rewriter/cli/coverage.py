"""`rewrite coverage [TYPE ...]`: what works on every causal LM that the installed transformers registers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options


def coverage(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TYPE ...]", help="Model types. Without any: all.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Types at a time.")] = 1,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time for one type.")] = 120.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/COVERAGE.md.")] = False,
    json: options.Json = False,
) -> None:
    """Try every rewrite on a small model of each causal-LM type of transformers, and say what does not work and why.

    Per type: builds, traces, ladder, tensor parallelism on 2 and 4 ranks, desync, and the emitted checkpoint, each
    compared with the unmodified model or an independent reference. Exit code 3 where a result is wrong.
    """
    from rewriter.cli.progress import Progress

    with Progress() as progress, tempfile.TemporaryDirectory(prefix="rewriter-coverage-") as scratch:
        progress("importing")
        # For the processes that check; torch and transformers read these when they are imported. Code of emitted
        # checkpoints is imported from here, not from the user's cache, and `jobs` says how many cores to use.
        os.environ |= {"HF_MODULES_CACHE": str(Path(scratch, "modules")), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        from rewriter.coverage import report
        from rewriter.coverage.check import check
        from rewriter.coverage.configs import require_registered
        from rewriter.coverage.pool import run

        chosen = require_registered(types or [])
        rows = []
        for row in run(chosen, check, jobs=jobs, limit=limit):
            rows.append(row)
            progress("coverage", len(rows), len(chosen))
    rows.sort(key=lambda row: chosen.index(row.type))
    if json:
        from json import dumps

        typer.echo(dumps([row.to_dict() for row in rows], indent=2, ensure_ascii=False))
    elif markdown:
        typer.echo(report.markdown(rows), nl=False)
    else:
        from rich.console import Console

        Console(highlight=False).print(report.table(rows))
    wrong = [row.type for row in rows if row.wrong]
    if wrong:
        from rewriter.errors import VerificationError

        raise VerificationError(f"{len(wrong)} of {len(rows)} types are wrong: {', '.join(wrong)}")
