"""`rewrite MODEL --recipe NAME`: from a checkpoint to a verified, rewritten one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError, shortened
from rewriter.common.files import read_given
from rewriter.common.processes import start_early
from rewriter.common.run_context import RunContext
from rewriter.convert.save_options import SaveOptions


def convert(
    model: options.Model,
    recipe: options.Recipe,
    out: options.ConvertedTo = None,
    tp: options.Degrees = "1",
    tp_also: options.AlsoRanks = None,
    sp: options.SequenceRanks = 1,
    set: options.Overrides = None,
    dtype: options.Dtype = None,
    verify: options.Verify = "shrunken",
    calibration: options.Calibration = None,
    dry_run: options.DryRun = False,
    resume: options.Resume = False,
    link: options.Link = False,
    materialize: options.Materialize = False,
    dequantize: options.Dequantize = False,
    drop_unused: options.DropUnused = False,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Convert MODEL by a recipe: an adapted Hugging Face checkpoint and a runtime module for --sp × --tp ranks.

    MODEL is a directory with config.json and safetensors, or a hub id. The result is verified before it is kept:
    exit code 3, and no output, if it computes anything but the recipe.
    """
    overrides, degrees = with_also(parse_overrides(set or []), tp_also), parse_degrees(tp)
    ranks = degrees if len(degrees) > 1 else degrees[0]
    text = None if calibration is None else read_text(calibration)
    destination = out if out is not None else default_output(model, recipe, ranks, sp)

    from rewriter.cli.progress import ProgressLine

    with ProgressLine() as progress:
        start_early()
        from rewriter import api

        chosen = SaveOptions(
            dtype=dtype, verify=verify, dry_run=dry_run, resume=resume, link=link, materialize=materialize,
            dequantize=dequantize, drop_unused=drop_unused, text=text,
        )  # fmt: skip
        context = RunContext(progress, trust_remote_code)
        report = api.convert(
            model, recipe, out=destination, tp=ranks, sp=sp, set=overrides, options=chosen, context=context
        )  # fmt: skip
    if json:
        typer.echo(report.to_json())
        return
    from rewriter.cli.rendering import print_report

    print_report(report.to_json(), verbose=verbose)


def parse_overrides(assignments: list[str]) -> dict[str, str]:
    """`["ladder.layers=last:20"]` as `{"ladder.layers": "last:20"}`. Raises RewriterError for what is no assignment."""
    overrides: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not re.fullmatch(r"\w+\.\w+", key.strip()):
            raise RewriterError(
                f"--set {shortened(assignment)}: expected PASS.OPTION=VALUE, such as ladder.layers=last:20."
            )
        if key.strip() in overrides:
            raise RewriterError(f"--set {shortened(assignment)}: {key.strip()} is set twice.")
        overrides[key.strip()] = value.strip()
    return overrides


def with_also(overrides: dict[str, str], tp_also: str | None) -> dict[str, str]:
    """`overrides` with the numbers of ranks that `--tp-also` names, of recipes that pad sizes."""
    if tp_also is None:
        return overrides
    return {**overrides, "fit_ranks.also": str(parse_degrees(tp_also, "--tp-also"))}


def read_text(file: Path) -> str:
    """The text of a calibration file. Raises RewriterError where it cannot be read as UTF-8 or holds nothing."""
    return read_given("--calibration", file, "Give a text file to measure on.")


def parse_degrees(text: str, option: str = "--tp") -> list[int]:
    """`"2,4"` as [2, 4]. Raises RewriterError for anything but different numbers from 1 up."""
    numbers = [int(part) if re.fullmatch(r"\s*[0-9]{1,9}\s*", part) else 0 for part in text.split(",")]
    if min(numbers) < 1 or len({*numbers}) < len(numbers):
        raise RewriterError(
            f"{option} {shortened(text)}: expected a number of ranks, or several different ones, such as 2,4,8."
        )
    return numbers


def default_output(model: str, recipe: str, tp: int | Sequence[int], sp: int = 1) -> Path:
    """The place of a result without --out: `tiny-llama-long-context-sp4-tp2` in the current directory."""
    tp = tp if isinstance(tp, int) else 1
    name = Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rsplit("/", 1)[-1]
    return Path(f"{name}-{Path(recipe).stem}" + f"-sp{sp}" * (sp > 1) + f"-tp{tp}" * (tp > 1))
