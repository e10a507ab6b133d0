"""`rewrite reshard DIR --tp N`: the runtime module of another number of ranks, beside a checkpoint that stays."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.garbage import collector_paused
from rewriter.convert.output_manifest import verified
from rewriter.convert.rewritten_source import open_output, rewritten, write_source
from rewriter.convert.shrunken_copy import check_shrunken_copy
from rewriter.emit.files.output_directory import sha256_of
from rewriter.emit.files.output_files import runtime_module
from rewriter.emit.files.weights import cast_dtypes, weight_references
from rewriter.emit.manifest import MANIFEST, Manifest, mesh_name, mesh_of
from rewriter.ir import Program
from rewriter.verify.comparison import Verification
from rewriter.verify.real_ranks import compare_ranks
from rewriter.weights import Checkpoint
from rewriter.weights.references import references_text

SCRATCH = ".reshard"


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
    with _scratch(root) as scratch:
        source = write_source(opened, scratch / "source")
        progress("tracing")
        with collector_paused():
            program = rewritten(opened, source, tp=tp)
        found = Verification() if verify == "none" else check_shrunken_copy(program, progress)
        view = _write(program, manifest, root, scratch / "view")
        if verify != "none":
            compare_ranks(program, mesh_of(program), view, found, progress=progress)
        manifest.verification.checks += verified(found, verify).checks
        if (root / "runtime" / name).exists():  # put there by a run that was killed before the manifest knew of it
            shutil.rmtree(root / "runtime" / name)
        os.rename(view / "runtime" / name, root / "runtime" / name)
        os.replace(manifest_file(view, manifest), root / MANIFEST)
    return found.figures()


def remove_interrupted(root: Path) -> None:
    """Delete what a killed `reshard` left. Raises RewriterError while another one is under way."""
    if (root / SCRATCH).is_dir():
        with _scratch(root):
            pass


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """An empty directory in `root` that one process at a time has."""
    scratch = root / SCRATCH
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except BlockingIOError as error:
        raise RewriterError(f"{root}: another run is adding a module there. Wait for it") from error
    finally:
        os.close(lock)


def _write(program: Program, manifest: Manifest, root: Path, view: Path) -> Path:
    """`root` by links, with the files of the new mesh, which are added to `manifest`."""
    name, entry, module = runtime_module(program)
    assert entry.weights is not None
    view.mkdir()
    for path in root.iterdir():
        if path.is_file() and path.name != MANIFEST:
            (view / path.name).symlink_to(path.resolve())
    checkpoint = Checkpoint.open(view)
    casts = cast_dtypes(program, checkpoint, checkpoint.dtypes, program.source.config)
    references = weight_references(program, {}, checkpoint.shapes, casts)
    to_disk(view / entry.module, module)
    to_disk(view / entry.weights, references_text(references, checkpoint))
    manifest.runtime[name] = entry
    manifest.files |= {file: sha256_of(view / file) for file in (entry.module, entry.weights)}
    manifest_file(view, manifest)
    return view


def manifest_file(view: Path, manifest: Manifest) -> Path:
    text = json.dumps({**manifest.table(), "job": manifest.job}, indent=2, ensure_ascii=False) + "\n"
    to_disk(view / MANIFEST, text)
    return view / MANIFEST


def to_disk(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
