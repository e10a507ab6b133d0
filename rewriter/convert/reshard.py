"""`rewrite reshard DIR --tp N`: the runtime module of another number of ranks, for a checkpoint that stays."""

from __future__ import annotations

import os
import shutil
from typing import Any

from rewriter.check.comparison import Verification
from rewriter.check.real_weights import compare_ranks
from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.common.run_context import RunContext
from rewriter.convert.output_manifest import verified
from rewriter.convert.preflight import check_shrunken_copy
from rewriter.convert.replaced_files import linked_view, put_in_place, scratch_in
from rewriter.convert.rewritten_source import open_output, rewritten, write_source
from rewriter.emit.files.output_files import runtime_module
from rewriter.emit.files.weights import cast_dtypes, weight_references
from rewriter.emit.manifest import mesh_of
from rewriter.output.names import mesh_name
from rewriter.weights import Checkpoint
from rewriter.weights.references import references_text


def reshard(
    directory: str | os.PathLike[str],
    tp: int,
    *,
    verify: str = "shrunken",
    context: RunContext = RunContext(),
) -> dict[str, Any]:
    """Add the module of `tp` ranks to a directory that `rewrite` wrote; returns what was compared, by name.

    Ranks read ranges of the checkpoint, which is not touched: two small files are written. The result is verified
    first, unless `verify` is "none". Raises RewriterError for an output that is bound to its ranks, or has the module
    already, and for a number of ranks that the model does not divide into; VerificationError as `convert` does.
    """
    progress = context.progress
    opened = open_output(directory)
    root, manifest = opened.root, opened.manifest
    if opened.bound:
        raise RewriterError(
            f"{root} is bound to tp={opened.tensor_parallel}: its function differs with the number of ranks. Rewrite "
            "the original model for another"
        )
    name = mesh_name({**manifest.mesh, "tp": tp})
    if name in manifest.runtime:
        raise RewriterError(f"{root}: it has the module of {name} already. Use it")
    with scratch_in(root) as scratch:
        # put there by a run that was killed before the manifest knew of it
        shutil.rmtree(root / "runtime" / name, ignore_errors=True)
        source = write_source(opened, scratch / "source")
        progress("tracing")
        with collector_paused():
            program = rewritten(opened, source, tp=tp)
        verification = Verification() if verify == "none" else check_shrunken_copy(program, progress)
        _, manifest.runtime[name], module = runtime_module(program)
        entry, checkpoint = manifest.runtime[name], Checkpoint.open(root)
        casts = cast_dtypes(program, checkpoint, checkpoint.dtypes, program.source.config)
        references = weight_references(program, {}, checkpoint.shapes, casts)
        assert entry.weights is not None
        texts = {entry.module: module, entry.weights: references_text(references, checkpoint)}
        view = linked_view(root, scratch / "view", texts, manifest)
        if verify != "none":
            compare_ranks(program, mesh_of(program), view, verification, progress=progress)
        manifest.verification.checks += verified(verification, verify).checks
        put_in_place(root, view, texts, manifest)
    return verification.figures()
