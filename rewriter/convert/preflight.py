"""Refusals before the first byte is written: of the place, for lack of room, and of what a shrunken copy computes."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.check import drift
from rewriter.check.asked_passes import asked_passes
from rewriter.check.comparison import Verification
from rewriter.check.shrunken_check import MOST_RANKS, check_shrunken
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall
from rewriter.convert.output_manifest import manifest_of
from rewriter.convert.save_options import SaveOptions
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import OutputDirectory, taken
from rewriter.emit.files.output_files import PlannedFiles
from rewriter.emit.manifest import mesh_of
from rewriter.ir import Program
from rewriter.output.names import ranks_of
from rewriter.passes.phases import single_device
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.weights.early_copies import EarlyCopies, reflinks
from rewriter.weights.streaming import KEPT

BESIDE = 1 << 23  # bytes of what is made last: card, manifest, golden logits, what ranks hold as ranges
RANK_BYTES = 350_000_000  # of a rank that verifies, without its weights


def require_room(
    program: Program, layout: PlannedFiles, output: OutputDirectory, options: SaveOptions, early: EarlyCopies | None
) -> None:
    """Raise RewriterError unless the output fits on the disk, and its verification in memory.

    What an interrupted run finished, what `early` has copied and what is shared with the source needs no room.
    """
    shared = options.link or (bool(layout.copies) and reflinks(layout.copies[0][0], output.final.parent))
    begun = early.nbytes() if early is not None else 0
    output.require_space(layout.nbytes(output.files, shared) + BESIDE - begun)
    if options.verify == "none":
        return
    needed, free = memory_to_verify(program), drift.available_memory()
    if needed > free:
        ranks = ranks_of(mesh_of(program))
        raise RewriterError(
            f"verification on {ranks} ranks needs {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free. "
            "End other programs, convert for fewer ranks and add more with `rewrite reshard`, or leave it out with "
            "--verify none"
        )


def memory_to_verify(program: Program) -> int:
    """Bytes that verification takes, about: its ranks, with all weights in fp32 or, where these are read layer by
    layer, the largest of them while it is converted."""
    single = single_device(program)
    ranks = ranks_of(mesh_of(program))
    started = ranks if 1 < ranks <= MOST_RANKS else 0
    if drift.too_large(single) is None:
        return started * RANK_BYTES + 4 * drift.parameter_count(single)
    return started * (RANK_BYTES + KEPT) + 12 * drift.largest_parameter(single)


def check_place(out: Path, source: str | os.PathLike[str] | None) -> None:
    """Raise RewriterError for a place that cannot be made, and for one within the model's directory `source`."""
    above = out.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        raise RewriterError(f"{out}: {above} is not a directory. Choose another --out.")
    if source is not None and Path(source).is_dir() and above.resolve().is_relative_to(Path(source).resolve()):
        raise RewriterError(
            f"{out}: it lies within the model that is read, {source}, which stays as it is. Choose another --out."
        )


def check_free(out: Path, source: str | os.PathLike[str] | None = None) -> None:
    """Raise RewriterError as `check_place` does, and for a place that is taken.

    `OutputDirectory` decides; this only asks early.
    """
    check_place(out, source)
    if (reason := taken(out)) is not None:
        raise RewriterError(reason)


def check_shrunken_copy(program: Program, progress: ProgressCall) -> Verification:
    """Compare `program` and its files with their reference on a small copy. Raises VerificationError."""
    from rewriter.tracing.meta_model import load_config

    assert program.source.path is not None
    config = load_config(program.source.path, program.source.remote_code)

    def write(small: Program, out: Path) -> None:
        layout = output_files.plan(small)
        with OutputDirectory(out, job={"shrunken check": True}) as output:
            hashes = output_files.write(layout, output)
            manifest = manifest_of(small, layout, output_files.public_name(None), hashes)
            manifest.files = output.hashes()
            output.manifest(manifest.table())

    return check_shrunken(
        config,
        asked_passes(program),
        program.mesh.get("tp", 1),
        plan=sequence_plan(program),
        write=write,
        trust_remote_code=program.source.remote_code,
        progress=progress,
    )
