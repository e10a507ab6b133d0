"""`rewrite reshard DIR --tp N`: the runtime module of another number of ranks, beside a checkpoint that stays."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.convert.output_manifest import verified
from rewriter.convert.rewritten_source import open_output, rewritten, write_source
from rewriter.convert.shrunken_copy import check_shrunken_copy
from rewriter.emit.manifest import MANIFEST, Manifest, mesh_name, mesh_of
from rewriter.emit.output_directory import sha256_of
from rewriter.emit.output_files import runtime_module
from rewriter.emit.weight_references import weight_references
from rewriter.ir import Program
from rewriter.verify.comparison import Verification
from rewriter.verify.real_ranks import compare_ranks
from rewriter.weights import Checkpoint
from rewriter.weights.references import references_text


def reshard(
    directory: str | os.PathLike[str],
    tp: int,
    *,
    verify: str = "shrunken",
    progress: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """Add the module of `tp` ranks to a directory that `rewrite` wrote; returns what was compared, by name.

    Ranks read ranges of the checkpoint, which is not touched: two small files are written. The result is verified
    first, unless `verify` is "none". Raises RewriterError for an output that is bound to its ranks, or has the module
    already, and for a number of ranks that the model does not divide into; VerificationError as `convert` does.
    """
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
    with tempfile.TemporaryDirectory(dir=root, prefix=".reshard-") as scratch:
        source = write_source(opened, Path(scratch) / "source")
        progress("tracing")
        with collector_paused():
            program = rewritten(opened, source, tp=tp)
        found = Verification() if verify == "none" else check_shrunken_copy(program, progress)
        view = _write(program, manifest, root, Path(scratch) / "view")
        if verify != "none":
            compare_ranks(program, mesh_of(program), view, found, progress=progress)
        manifest.verification.checks += verified(found, verify).checks
        os.rename(view / "runtime" / name, root / "runtime" / name)
        _replace_manifest(root, manifest)
    return found.figures()


def _write(program: Program, manifest: Manifest, root: Path, view: Path) -> Path:
    """`root` by links, with the files of the new mesh, which are added to `manifest`."""
    name, entry, module = runtime_module(program)
    assert entry.weights is not None
    (view / entry.module).parent.mkdir(parents=True)
    for path in root.iterdir():
        if path.is_file() and path.name != MANIFEST:
            (view / path.name).symlink_to(path)
    checkpoint = Checkpoint.open(view)
    references = weight_references(program, {}, checkpoint.shapes)
    (view / entry.module).write_text(module, encoding="utf-8")
    (view / entry.weights).write_text(references_text(references, checkpoint), encoding="utf-8")
    manifest.runtime[name] = entry
    manifest.files |= {file: sha256_of(view / file) for file in (entry.module, entry.weights)}
    _replace_manifest(view, manifest)
    return view


def _replace_manifest(root: Path, manifest: Manifest) -> None:
    text = json.dumps({**manifest.table(), "job": manifest.job}, indent=2, ensure_ascii=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=root, delete=False, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, root / MANIFEST)
