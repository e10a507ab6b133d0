"""`rewrite coverage [TYPE...]`: what works on every causal LM that the installed transformers registers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from rewriter.cli import options
from rewriter.common.errors import VerificationError
from rewriter.common.files import scratch_folder
from rewriter.common.numbers import json_text

if TYPE_CHECKING:
    from rewriter.check.coverage.report import Coverage


def coverage(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="TYPE", help="Model types.", show_default="all"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Types at a time.")] = 1,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time for one type.")] = 300.0,
    images: Annotated[bool, typer.Option("--images", help="Image-text types, each with a picture.")] = False,
    json: options.Json = False,
) -> None:
    """Try every rewrite on a small model of each causal-LM type of transformers; name the failures and their reasons.

    Per type: the main job, `rewrite MODEL --recipe tensor-parallel --tp 2` and the same with ladder, each with text
    from two ranks that has to equal transformers' own; the share of the layers' parameters that the ranks split; then
    the parts of the job: builds, traces, ladder, tensor parallelism on 2 and 4 ranks, desync, and the emitted
    checkpoint, compared with the unmodified model or an independent reference. With --images, for types that take
    images: builds, traces, ladder, 2 ranks and the emitted checkpoint by text, then the checkpoint with a picture.

    Exit code 3 if a result is wrong.
    """
    rows, checks = _run(types or [], jobs, limit, images)
    if json:
        typer.echo(json_text([row.to_dict() for row in rows], indent=2))
    else:
        from rich.console import Console

        from rewriter.check.coverage.report import table

        Console(highlight=False).print(table(rows, checks))
    if wrong := [row.type for row in rows if row.wrong]:
        raise VerificationError(f"{len(wrong)} of {len(rows)} types are wrong: {', '.join(wrong)}")


def _run(types: list[str], jobs: int, limit: float, images: bool) -> tuple[list[Coverage], tuple[str, ...]]:
    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress, scratch_folder("coverage") as scratch:
        progress("importing")
        # For the processes that check; torch and transformers read these when they are imported. Code of emitted
        # checkpoints is imported from here, not from the user's cache, and `jobs` says how many cores to use.
        os.environ |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        from rewriter.check.coverage import images as with_images
        from rewriter.check.coverage.configs import require_registered
        from rewriter.check.coverage.pool import run
        from rewriter.check.coverage.report import CHECKS, Coverage
        from rewriter.convert.main_job import check

        chosen = require_registered(types, images)
        tried, kind = (with_images.check_images, with_images.ImageCoverage) if images else (check, Coverage)
        rows = []
        for row in run(chosen, tried, jobs=jobs, limit=limit, kind=kind):
            rows.append(row)
            progress("coverage", len(rows), len(chosen))
    return sorted(rows, key=lambda row: chosen.index(row.type)), with_images.CHECKS if images else CHECKS
