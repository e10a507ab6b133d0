"""New files of an output that is complete: tried in a folder of links to the old ones, then put in their place."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.emit.files.output_directory import sha256_of, sync_directory, write_to_disk
from rewriter.output.manifest import Manifest
from rewriter.output.names import MANIFEST

SCRATCH = ".reshard"


@contextmanager
def scratch_in(root: Path) -> Iterator[Path]:
    """An empty directory in `root` that one process at a time has. Raises RewriterError while another one has it."""
    scratch = root / SCRATCH
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RewriterError(f"{root}: another run is adding a module there. Wait for it") from error
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os.close(lock)


def remove_interrupted(root: Path) -> None:
    """Delete what a killed run left. Raises RewriterError while another one is under way."""
    if (root / SCRATCH).is_dir():
        with scratch_in(root):
            pass


def linked_view(
    root: Path, view: Path, texts: Mapping[str, str], manifest: Manifest, without: Collection[str] = ()
) -> Path:
    """Make `view` the output in `root` by links, but for the files `without`, with `texts` as `add_files` adds them."""
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if path.is_file() and not name.parts[0].startswith(".") and str(name) not in (MANIFEST, *texts, *without):
            (view / name).parent.mkdir(parents=True, exist_ok=True)
            (view / name).symlink_to(path.resolve())
    add_files(view, texts, manifest)
    return view


def add_files(view: Path, texts: Mapping[str, str], manifest: Manifest) -> None:
    """Write the files `texts` in `view`, their hashes in `manifest`, and that there too."""
    for name, text in texts.items():
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        write_to_disk(view / name, text.encode())
        manifest.files[name] = sha256_of(view / name)
    _write_manifest(view, manifest)


def put_in_place(root: Path, view: Path, names: Collection[str], manifest: Manifest, stale: str | None = None) -> None:
    """Move the files `names` from `view` to `root`, each at once, delete the `stale` one there, and the manifest
    last."""
    _write_manifest(view, manifest)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(view / name, root / name)
    if stale is not None:
        (root / stale).unlink(missing_ok=True)
    os.replace(view / MANIFEST, root / MANIFEST)
    sync_directory(root)


def _write_manifest(view: Path, manifest: Manifest) -> None:
    text = json.dumps({**manifest.table(), "job": manifest.job}, indent=2, ensure_ascii=False) + "\n"
    write_to_disk(view / MANIFEST, text.encode())
