"""`rewrite fabrics`: list, show, validate, import, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli import options

app = typer.Typer(
    help="List the fabrics that ship, show one, check a file, or measure one of your own.", rich_markup_mode=None
)

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The fabric's file, ending in .yaml.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context, as_json: options.JsonList = False) -> None:
    """List the fabrics that ship, show one, check a file, or measure one of your own."""
    options.list_by_default(context, as_json, listing)


@app.command("list")
def listing(as_json: options.JsonList = False) -> None:
    """List the fabrics that ship."""
    from rewriter.cli.fabric_tables import print_fabrics
    from rewriter.fabric import fabrics, load_fabric

    print_fabrics([load_fabric(name) for name in fabrics()], as_json)


@app.command()
def show(
    fabric: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a fabric's figures with their sources, and how well its tables predict points left out of them."""
    from rewriter.cli.fabric_tables import print_fabric
    from rewriter.fabric import load_fabric

    print_fabric(load_fabric(fabric), as_json)


@app.command()
def validate(file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Check a fabric's file: every fault at once, each with its line."""
    from rewriter.fabric import load_fabric

    typer.echo(f"{file}: a valid fabric: {load_fabric(file).summary}")


@app.command("import")
def import_logs(
    logs: Annotated[list[Path], typer.Argument(metavar="NCCL-TESTS-LOG...")],
    out: Out,
    device_of: Annotated[
        str, typer.Option("--device-of", metavar="FABRIC", help="The shipped fabric whose devices and links these are.")
    ] = "h100-nvlink",
    op: Annotated[
        str | None, typer.Option("--op", metavar="KIND", help="The collective, where a log does not say it.")
    ] = None,
) -> None:
    """Make a fabric of what nccl-tests printed; other commands take it with --fabric FILE."""
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
    typer.echo(f"wrote {out}: {count} measurements of {', '.join(sorted({log.kind for log in read}))}")


@app.command()
def calibrate(
    context: typer.Context,
    out: Out,
    ranks: Annotated[
        int, typer.Option("--ranks", min=2, max=64, metavar="N", help="Processes to start, where no launcher did.")
    ] = 2,
    largest: Annotated[
        int, typer.Option("--largest", min=1 << 12, max=1 << 30, metavar="BYTES", help="The largest message.")
    ] = 64 << 20,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=3, max=1000, metavar="N", help="Times that each is measured, at most.")
    ] = 200,
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
    typer.echo(f"wrote {out}. `rewrite fabrics show {out}` shows it.")
    if taken > BUSY:
        busy = f"something else had each rank's core for {100 * taken:.0f} % of the time: this machine is busy, or has"
        typer.echo(f"warning: {busy} fewer cores than ranks. Calibrate again when nothing else runs.", err=True)
