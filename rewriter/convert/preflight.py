"""What a conversion needs of the machine, asked for before its first byte is written."""

from __future__ import annotations

from pathlib import PurePosixPath

from rewriter.common.errors import RewriterError
from rewriter.convert.save_options import SaveOptions
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.emit.files.output_files import PlannedFiles
from rewriter.emit.manifest import mesh_of, ranks_of
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.verify import drift
from rewriter.verify.shrunken_check import MOST_RANKS
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.sink import reflinks
from rewriter.weights.streaming import KEPT

BESIDE = 1 << 23  # bytes of what is made last: card, manifest, golden logits, what ranks hold as ranges
BESIDE_FILES = 8  # the same as files, and the journal, the output and its own directories
RANK_BYTES = 350_000_000  # of a rank that verifies, beside its weights


def require_room(
    program: Program, layout: PlannedFiles, output: OutputDirectory, options: SaveOptions, early: EarlyCopies | None
) -> None:
    """Raise RewriterError unless the output fits on the disk, in bytes and files, and its verification in memory.

    What an interrupted run finished, what `early` has copied and what is shared with the source needs no room.
    """
    shared = options.link or (bool(layout.copies) and reflinks(layout.copies[0][0], output.final.parent))
    begun = early.nbytes() if early is not None else 0
    names = {*layout.names()}.difference(output.files)
    folders = {parent for name in names for parent in PurePosixPath(name).parents}
    nbytes = layout.nbytes(output.files, shared) + BESIDE - begun
    output.require_space(nbytes, len(names) + len(folders) + BESIDE_FILES)
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
