"""The shrunken check of a program that is going to be written, with files as an output has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rewriter.check.asked_passes import asked_passes
from rewriter.check.comparison import Verification
from rewriter.convert.output_manifest import manifest_of
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.ir import Program
from rewriter.passes.sequence.sequence_plans import sequence_plan


def check_shrunken_copy(program: Program, progress: Callable[..., None]) -> Verification:
    """Compare `program` and its files with their reference on a small copy. Raises VerificationError."""
    from rewriter.check.shrunken_check import check_shrunken
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
