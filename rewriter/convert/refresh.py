"""`rewrite refresh DIR`: an output's code written anew for the installed versions; its weights stay as they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.check.comparison import Verification
from rewriter.check.real_weights import compare_ranks
from rewriter.check.saved_output import check_files, config_of, golden_figures
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import read_json
from rewriter.common.garbage import collector_paused
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.convert.conversion import CARD
from rewriter.convert.output_manifest import verified
from rewriter.convert.preflight import check_shrunken_copy
from rewriter.convert.replaced_files import add_files, linked_view, put_in_place, scratch_in
from rewriter.convert.rewritten_source import Opened, rewritten, write_source
from rewriter.emit.card import model_card
from rewriter.emit.files import output_files
from rewriter.emit.files.output_directory import sha256_of
from rewriter.emit.manifest import versions
from rewriter.ir import Program
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import mesh_name
from rewriter.passes import installed
from rewriter.weights import Checkpoint
from rewriter.weights.header import encode_header, read_header
from rewriter.weights.references import references_text

# Of config.json: names of kinds and modes may be others, but not which of them are equal.
_NAMED = ("rewriter_layers", "rewriter_pattern")
_EXACT = ("rewriter_delays", "rewriter_norms", "rewriter_ranks", "rewriter_modes", "rewriter_phase")


def refresh(
    directory: str | os.PathLike[str],
    *,
    verify: str = "shrunken",
    context: RunContext = RunContext(),
) -> dict[str, Any]:
    """Write the code of an output anew, as this version writes it for the installed ones; returns what was compared.

    The generated files, config.json, rewrite.json and the card are replaced; no file of weights is opened for writing.
    The recipe is applied again to the output's own weights, which are also those of a fine-tuned model. What the new
    code computes is verified first, unless `verify` is "none": a shrunken copy, and the golden logits, or where there
    are none a few tokens on real ranks. A run that was interrupted is repaired by the next one.

    Raises RewriterError for a directory that `rewrite` did not write, where the recipe is now wired in another way, and
    where ranks would read other ranges of weights; VerificationError where the new code computes something else.
    Nothing is changed then.
    """
    progress = context.progress
    root = Path(os.path.realpath(directory))
    manifest = read_manifest(root)
    opened, before = Opened(root, manifest, config_of(root)), dict(manifest.versions)
    if manifest.golden is not None and verify != "none":
        check_files(root, manifest, [manifest.golden.file])
    with scratch_in(root) as scratch:
        progress("tracing")
        with collector_paused():
            layouts = _layouts(opened, scratch / "source")
        program = layouts[mesh_name(manifest.mesh)][0]
        texts = _texts(opened, layouts)
        verification = Verification() if verify == "none" else check_shrunken_copy(program, progress)
        stale = _renew(manifest, {name: layout for name, (_, layout) in layouts.items()}, texts)
        code = [path.name for path in root.glob("*.py")]
        view = linked_view(root, scratch / "view", texts, manifest, without=[CARD, *code])
        figures: dict[str, Any] = {}
        if verify != "none":
            figures = _compare(root, view, program, manifest, before, verification, progress)
            checks = {
                check.name: check for check in (*manifest.verification.checks, *verified(verification, verify).checks)
            }
            manifest.verification.checks = [*checks.values()]
        if edited := _edited(root, read_manifest(root), texts, stale):
            figures["not as rewrite.json had them"] = ", ".join(edited)
        if manifest.adaptation is not None:
            figures["note"] = "it was fine-tuned: its weights are kept, its code is new"
        if not (root / CARD).is_file() or manifest.files.get(CARD) == sha256_of(root / CARD):
            texts[CARD] = model_card(manifest, root)
            add_files(view, {CARD: texts[CARD]}, manifest)
        put_in_place(root, view, texts, manifest, stale)
    made = ", ".join(f"{name} {version}" for name, version in before.items())
    return {"written": len(texts) + 1, "code before was of": made, **verification.figures(), **figures}


def _layouts(opened: Opened, place: Path) -> dict[str, tuple[Program, output_files.PlannedFiles]]:
    """By mesh, the recipe applied again to the output's weights, and the files that it gives."""
    manifest = opened.manifest
    source = write_source(opened, place)
    if manifest.per_rank is not None and manifest.per_rank.untied:
        _tie_norms(opened, source)
    layouts = {}
    for name, entry in manifest.runtime.items() or {mesh_name(manifest.mesh): None}.items():
        degrees = {part[:2]: int(part[2:]) for part in name.split("-")}
        program = rewritten(opened, source, tp=degrees.get("tp", 1), sp=degrees.get("sp", 1))
        layouts[name] = program, output_files.plan(program, materialize=bool(entry and entry.ranks))
    return layouts


def _tie_norms(opened: Opened, source: Path) -> None:
    """Give `source` files whose headers have one vector where the output has one for each rank, and no data: what is
    traced and printed reads headers alone."""
    bound, checkpoint = opened.manifest.per_rank, Checkpoint.open(opened.root)
    assert bound is not None
    for path, header in checkpoint.headers.items():
        tensors = {
            name: (info.dtype, (info.shape[0] // bound.ranks, *info.shape[1:]), info.nbytes // bound.ranks)
            if name in bound.untied
            else (info.dtype, info.shape, info.nbytes)
            for name, info in header.tensors.items()
        }
        place, head = source / path.relative_to(checkpoint.directory), encode_header(tensors, header.metadata)
        place.unlink()  # a link
        with open(place, "wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(nbytes for _, _, nbytes in tensors.values()))


def _texts(opened: Opened, layouts: Mapping[str, tuple[Program, output_files.PlannedFiles]]) -> dict[str, str]:
    """The files to write by name. Raises RewriterError where their code is for other weights than the output has."""
    root, manifest, checkpoint = opened.root, opened.manifest, Checkpoint.open(opened.root)
    texts: dict[str, str] = {}
    for name, (program, layout) in layouts.items():
        entry = manifest.runtime.get(name)
        texts |= {file: text for file, text in layout.texts.items() if file.endswith(".py") or file == "config.json"}
        for file, references in layout.references.items():
            texts[file] = references_text(references, checkpoint)
            if entry is not None and entry.weights is not None:
                _require_same_ranges(root / entry.weights, texts[file])
        if entry is not None and entry.ranks:
            held = {tensor: info.shape for tensor, info in read_header(root / entry.ranks[0]).tensors.items()}
            if held != {parameter: spec.shape for parameter, spec in program.parameters.items()}:
                raise RewriterError(f"{root / entry.ranks[0]}: this version reads other tensors there. {_ADVICE}")
    _require_same_wiring(opened, json.loads(texts["config.json"]))
    return texts


_ADVICE = "Convert the model again, or use the version that wrote it"


def _require_same_wiring(opened: Opened, config: Mapping[str, Any]) -> None:
    """Raise RewriterError unless every layer is of the kind that it was of, under any name."""
    for name in (*_NAMED, *_EXACT):
        old, new = opened.config.get(name), config.get(name)
        if name in _NAMED and isinstance(old, list) and isinstance(new, list):
            old, new = _numbered(old), _numbered(new)
        if old != new and not (name in _EXACT and old is None):  # earlier versions did not write all of them
            place = opened.root / "config.json"
            if sha256_of(place) != opened.manifest.files.get(place.name):
                raise RewriterError(
                    f"{place} was changed since it was written: its {name} is {old!r}, by its recipe {new!r}. Put back "
                    "the file"
                )
            raise RewriterError(f"{opened.root}: its recipe would now be wired in another way ({name}). {_ADVICE}")


def _numbered(values: list[Any]) -> list[Any]:
    """The same list with every name replaced by the place where it first stands."""
    flat = [tuple(sorted(value.items())) if isinstance(value, dict) else value for value in values]
    return [flat.index(value) for value in flat]


def _require_same_ranges(path: Path, text: str) -> None:
    """Raise RewriterError where the ranks would read other ranges of the checkpoint than they did."""
    held = read_json(path, f"Without it the ranges of ranks cannot be compared. {_ADVICE}.")
    old, new = (table["parameters"].values() for table in (held, json.loads(text)))
    was, now = ({json.dumps(entry[:3]) for entry in entries} for entries in (old, new))
    if was != now:
        first = min(was ^ now, key=len)
        raise RewriterError(f"{path}: ranks would read other ranges of the checkpoint ({first:.120}). {_ADVICE}")


def _renew(
    manifest: Manifest, layouts: Mapping[str, output_files.PlannedFiles], texts: Mapping[str, str]
) -> str | None:
    """Say in the manifest what the new files are; returns the file of which there is no new one."""
    main = layouts[mesh_name(manifest.mesh)]
    stale = manifest.adapted.modeling
    manifest.refreshed.append(dict(manifest.versions))
    manifest.versions = versions()
    manifest.packages = {name: installed.requirement(name) or package for name, package in manifest.packages.items()}
    manifest.adapted.modeling, manifest.adapted.model_type = main.modeling, main.model_type
    for name, entry in manifest.runtime.items():
        new = layouts[name].runtime[name]
        entry.module, entry.class_name, entry.sequence = new.module, new.class_name, new.sequence
        entry.weights = entry.weights and new.weights
    if manifest.per_rank is not None and main.per_rank is not None:
        manifest.per_rank.pattern, manifest.per_rank.modes = main.per_rank.pattern, main.per_rank.modes
    if stale in texts:
        return None
    manifest.files.pop(stale or "", None)
    return stale


def _compare(
    root: Path,
    view: Path,
    program: Program,
    manifest: Manifest,
    before: Mapping[str, str],
    verification: Verification,
    progress: ProgressCall,
) -> dict[str, Any]:
    """Compare the new code with the golden logits, else its ranks with their reference."""
    try:
        if manifest.golden is not None:
            return golden_figures(view, manifest, progress)
        if manifest.runtime and not (manifest.per_rank and manifest.per_rank.untied):
            compare_ranks(program, manifest.mesh, view, verification, progress=progress)
    except VerificationError as error:
        now, was = manifest.versions, read_manifest(root)
        if (other := next((name for name in was.files if not _is_as_written(root, was, name)), None)) is not None:
            raise VerificationError(
                f"{root}: {other} is not as it was written, and with it the new code computes something else: {error}. "
                "Nothing was changed: put the file back"
            ) from error
        raise VerificationError(
            f"{root}: with transformers {now['transformers']} it would compute something else than with "
            f"{before.get('transformers')}, for which its code was written: {error}. Nothing was changed: use that one"
        ) from error
    return {}


def _is_as_written(root: Path, manifest: Manifest, name: str) -> bool:
    """Code does not count: it is written anew."""
    return name.endswith(".py") or ((root / name).is_file() and sha256_of(root / name) == manifest.files[name])


def _edited(root: Path, was: Manifest, texts: Mapping[str, str], stale: str | None) -> list[str]:
    """Files that somebody changed of those that are replaced. Code is kept next to the new one; what was changed in
    config.json stands in the new one, too."""
    edited = []
    for name in filter(None, (*texts, stale)):
        path = root / name
        if name not in was.files or not path.is_file() or sha256_of(path) == was.files[name]:
            continue
        code = name.endswith(".py")
        if code and path.read_bytes() == texts.get(name, "").encode():  # by a run that was interrupted
            continue
        edited.append(name)
        if code:
            shutil.copyfile(path, root / f"{name}.edited")
            edited[-1] += f" (kept as {name}.edited)"
    return edited
