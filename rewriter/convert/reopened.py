"""An output directory, opened to be looked at: its source, if that is here, and its program made again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.convert.rewritten_source import applied_recipe, open_output, rewritten, write_source
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import sha256_of
from rewriter.ir import Program
from rewriter.output.manifest import Manifest, SourceEntry
from rewriter.output.names import MANIFEST
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace

_NEARBY = 500  # models that are looked at, where a source is not where it was


@dataclass(frozen=True)
class Reopened:
    """`program` is the recipe applied again: to the `source`, or where that is None to the output's own weights."""

    root: Path
    manifest: Manifest
    program: Program
    source: Path | None

    @property
    def origin(self) -> Program:
        """The program as traced."""
        return self.program.origin or self.program

    def planned(self) -> output_files.PlannedFiles:
        """The files that the source gives, with the options of the run that wrote the output."""
        job: Mapping[str, Any] = self.manifest.job or {}
        chosen = [bool(job.get(option)) for option in ("materialize", "dequantize", "drop_unused")]
        return output_files.plan(self.program, job.get("dtype"), *chosen)


def find_source(root: Path, manifest: Manifest, given: str | os.PathLike[str] | None = None) -> Path | None:
    """The directory of the model that was rewritten: `given`, or the first of where it was, where its name leads, the
    Hub's cache and the folders nearby that has its weights; None where none has.

    Raises RewriterError where `given` is no directory, or its weights are not those that the manifest names.
    """
    name = manifest.source.name
    if given is not None:
        source = Path(given)
        if not source.is_dir():
            raise RewriterError(f"--source {given}: no such directory. Give the model that was rewritten ({name})")
        if (other := _other_file(source, manifest)) is not None:
            raise RewriterError(
                f"--source {given}: {other} is not the one that was rewritten. Give the model that {root} was made of"
            )
        return source
    for place in _places(Path(os.path.abspath(root)), manifest.source):
        if place.is_dir() and place.resolve() != root.resolve() and _other_file(place, manifest) is None:
            return place
    return None


def recorded_path(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """The `path` of a manifest. It is published with the output, so it does not name the user's home folder."""
    there, here, home = (Path(os.path.realpath(place)) for place in (source, out, Path.home()))
    if there.is_relative_to(home) and not here.is_relative_to(home):
        return (Path("~") / there.relative_to(home)).as_posix()
    return Path(os.path.relpath(there, here)).as_posix()


def taken_over(entry: SourceEntry, root: Path, out: Path) -> SourceEntry:
    """The entry of the output in `root`, for one in `out` that is made of it."""
    if entry.path is None:
        return entry
    place = root.resolve() / os.path.expanduser(entry.path)
    return entry.model_copy(update={"path": recorded_path(place, out)})


def _places(root: Path, entry: SourceEntry) -> Iterator[Path]:
    """The places where a source may be, the likeliest first."""
    roots = dict.fromkeys((root, root.resolve()))
    if entry.path is not None:
        yield from (place / os.path.expanduser(entry.path) for place in roots)
    yield Path(entry.name)
    yield from (place.parent / name for place in roots for name in dict.fromkeys((entry.name, Path(entry.name).name)))
    with suppress(Exception):  # no such id, none in the cache
        from huggingface_hub import snapshot_download

        yield Path(snapshot_download(entry.name, local_files_only=True))
    around = dict.fromkeys(place.resolve() for place in (*(place.parent for place in roots), Path()))
    configs = (file for place in around for depth in ("*", "*/*") for file in place.glob(f"{depth}/config.json"))
    for config in islice(configs, _NEARBY):
        if not (config.parent / MANIFEST).exists() and all((config.parent / name).is_file() for name in entry.files):
            yield config.parent


def _other_file(directory: Path, manifest: Manifest) -> str | None:
    """The first weight file of a directory that is not the source's."""
    for name, sha256 in manifest.source.files.items():
        path = directory / name
        if not path.is_file() or sha256_of(path) != sha256:
            return name
    return None


def reopen(
    root: Path, manifest: Manifest, source: Path | None, scratch: Path, trust_remote_code: bool = False
) -> Reopened:
    """The recipe applied again to `source`, or where there is none to the output's weights, linked into `scratch`.

    Raises RewriterError as tracing and passes do, and without source for an output that `open_output` refuses.
    """
    if source is None or manifest.adaptation is not None:
        opened = open_output(root)
        return Reopened(root, manifest, rewritten(opened, write_source(opened, scratch / "source")), source)
    recipe = applied_recipe(manifest)
    skipped = {entry.name for entry in manifest.skipped}
    kept = [spec.to_dict() for spec in recipe.passes if spec.pass_name not in skipped]
    recipe = Recipe.model_validate({**recipe.to_dict(), "passes": kept})
    mesh = manifest.mesh
    traced = trace(source, trust_remote_code=trust_remote_code)
    program, _ = apply_recipe(traced, recipe, mesh.get("tp", 1), sp=mesh.get("sp", 1))
    return Reopened(root, manifest, program, source)
