"""`rewrite fabrics`: list, show, validate, import, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options
from rewriter.cli.command_help import command_with, group_with
from rewriter.common.numbers import json_text

app = typer.Typer(
    help="List the fabrics that ship, show one, check a file, or measure one of your own.",
    rich_markup_mode=None,
    subcommand_metavar="[COMMAND] [OPTIONS]",
    cls=group_with(
        "rewrite fabrics",
        "rewrite fabrics show h100-nvlink",
        "rewrite fabrics calibrate --ranks 2 --out here.yaml",
    ),
)

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The fabric's file, ending in .yaml.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context, as_json: options.JsonList = False) -> None:
    """List the fabrics that ship, show one, check a file, or measure one of your own."""
    options.list_by_default(context, listing, as_json=as_json)


@app.command(
    "list",
    cls=command_with("rewrite fabrics list", "rewrite fabrics list --json", "rewrite fabrics list > fabrics.txt"),
)
def listing(as_json: options.JsonList = False) -> None:
    """List the fabrics that ship."""
    from rewriter.cli.fabric_tables import print_fabrics
    from rewriter.fabric import fabrics, load_fabric

    print_fabrics([load_fabric(name) for name in fabrics()], as_json)


@app.command(
    short_help="Show a fabric's figures with their sources.",
    cls=command_with(
        "rewrite fabrics show h100-nvlink", "rewrite fabrics show pcie-gen5 --json", "rewrite fabrics show here.yaml"
    ),
)
def show(
    fabric: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A name that `rewrite fabrics` lists, or a YAML file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a fabric's figures with their sources, and how well its tables predict points left out of them."""
    from rewriter.cli.fabric_tables import print_fabric
    from rewriter.fabric import load_fabric

    print_fabric(load_fabric(fabric), as_json)


@app.command(
    cls=command_with(
        "rewrite fabrics validate here.yaml",
        "rewrite fabrics validate here.yaml --json",
        "rewrite fabrics validate here.yaml && rewrite fabrics show here.yaml",
    )
)
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A fabric's YAML file.")], json: options.Json = False
) -> None:
    """Check a fabric's file: every fault at once, each with its line."""
    from rewriter.fabric import load_fabric

    summary = load_fabric(file).summary
    found = {"file": str(file), "valid": True, "summary": summary}
    typer.echo(json_text(found, indent=2) if json else f"{file}: a valid fabric: {summary}")


@app.command(
    "import",
    short_help="Make a fabric from logs of nccl-tests.",
    cls=command_with(
        "rewrite fabrics import all_reduce.log --out mine.yaml",
        "rewrite fabrics import all_reduce.log --op all_reduce --out mine.yaml",
        "rewrite fabrics import *.log --device-of h200-nvlink --out mine.yaml",
    ),
)
def import_logs(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG", help="Output of programs of nccl-tests.")],
    out: Out,
    device_of: Annotated[
        str, typer.Option("--device-of", metavar="NAME", help="The shipped fabric whose devices and links these are.")
    ] = "h100-nvlink",
    op: Annotated[
        str | None, typer.Option("--op", metavar="NAME", help="The collective, if a log does not name it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Make a fabric from logs of nccl-tests; other commands take it with --fabric FILE."""
    from rewriter.common.errors import RewriterError
    from rewriter.common.files import write_text
    from rewriter.fabric.nccl_tests import op_named, read_log
    from rewriter.fabric.writing import check, imported

    kind = op_named(op) if op is not None else None
    read = []
    for path in logs:
        try:
            read.append(read_log(path, kind))
        except RewriterError as error:
            raise RewriterError(f"{error} Nothing was written.") from None
    text = imported(read, device_of, out)
    check(out)
    write_text(out, text, "--out")
    count = sum(len(log.rows) for log in read)
    kinds = sorted({log.kind for log in read})
    found = {"file": str(out), "measurements": count, "collectives": kinds}
    typer.echo(json_text(found, indent=2) if json else f"wrote {out}: {count} measurements of {', '.join(kinds)}")


@app.command(
    cls=command_with(
        "rewrite fabrics calibrate --out here.yaml",
        "rewrite fabrics calibrate --ranks 4 --out here.yaml",
        "rewrite fabrics calibrate --largest 1048576 --repetitions 20 --out here.yaml",
    )
)
def calibrate(
    context: typer.Context,
    out: Out,
    ranks: Annotated[
        int, typer.Option("--ranks", min=2, max=64, metavar="N", help="Processes to start without a launcher.")
    ] = 2,
    largest: Annotated[
        int, typer.Option("--largest", min=1 << 12, max=1 << 30, metavar="BYTES", help="The largest message.")
    ] = 64 << 20,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=3, max=1000, metavar="N", help="The most measurements of a size.")
    ] = 200,
    json: options.Json = False,
) -> None:
    """Measure this machine: collectives by size, its arithmetic and its memory."""
    from rewriter.cli import launching
    from rewriter.common.files import write_text
    from rewriter.fabric.writing import check

    check(out)
    if not launching.is_rank():
        launching.start_ranks(context.obj, ranks)
        return
    from rewriter.predict.calibration import calibrated
    from rewriter.predict.validation import BUSY

    text, taken = calibrated(out, largest, repetitions)
    if not launching.is_first():
        return
    write_text(out, text, "--out")
    shown = f"wrote {out}. `rewrite fabrics show {out}` shows it."
    typer.echo(json_text({"file": str(out), "busy": taken}, indent=2) if json else shown)
    if taken > BUSY:
        busy = f"something else had each rank's core for {100 * taken:.0f} % of the time: this machine is busy, or has"
        typer.echo(f"warning: {busy} fewer cores than ranks. Calibrate again when nothing else runs.", err=True)
