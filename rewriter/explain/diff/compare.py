"""`rewrite diff`: an output beside its source, two outputs, an output and a model, or a model and what a recipe makes
of it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of, scratch_folder
from rewriter.convert.pass_measurements import calibrate
from rewriter.convert.reopened import find_source, reopen
from rewriter.emit.files.output_files import runtime_module
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.manifest import mesh_of
from rewriter.explain.diff.differences import CodeDifference, Differences, Row, TensorDifferences
from rewriter.explain.diff.page import page
from rewriter.explain.diff.programs import layers_between, passes_between, passes_of
from rewriter.explain.diff.tensors import tensors_between
from rewriter.explain.diff.terminal import tables
from rewriter.ir import Program
from rewriter.ir.communication import collectives, summary
from rewriter.ir.layer_drawing import layers_drawing
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import MANIFEST, mesh_name
from rewriter.passes.base import single_device
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.tracing import trace
from rewriter.weights import Checkpoint

ProgressCall = Callable[..., None]
_CONTEXT = 3  # lines around a change of code


class DiffReport(Differences):
    """Differences that can be printed with rich and written as a page."""

    def to_html(self) -> str:
        """The report as one page that needs no network, no script and no other file."""
        return page(self)

    def __rich__(self) -> RenderableType:
        return tables(self)


@dataclass(frozen=True)
class Side:
    """One of the two: a directory (None: not written, or not here), its manifest where `rewrite` wrote it, its program,
    the text of its runtime module and of its modeling file."""

    name: str
    root: Path | None
    manifest: Manifest | None
    program: Program
    module: str
    modeling: str
    ranges: str = ""

    @property
    def recipe(self) -> str:
        return str((self.program.recipe or {}).get("name", "as it is")) if self.program.history else "as it is"


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    source: str | os.PathLike[str] | None = None,
    tp: int = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    tensors: bool = True,
    trust_remote_code: bool = False,
    progress: ProgressCall = lambda *_: None,
) -> DiffReport:
    """What differs between `first` and `second`: passes, layers, generated code, tensors.

    `first` alone, an output of rewriter, is compared with its source: what the recipe changed. The source is found by
    the manifest, or is `source`; where it is not here, tensors are not compared. With `recipe`, `first` is
    a model, and is compared with what the recipe makes of it on `tp` × `sp` ranks, with nothing written. Otherwise both
    are outputs or models. A model without recipe is shown on the ranks of the other side, under plain tensor
    parallelism. Raises RewriterError for bad input.
    """
    with ExitStack() as inside:
        scratch = inside.enter_context(scratch_folder("diff"))
        progress("tracing")
        notes: list[str] = []
        if recipe is not None:
            if second is not None:
                raise RewriterError("--recipe makes the second side of one model: leave out B, or --recipe")
            before, after = _by_recipe(first, recipe, tp, sp, set, trust_remote_code, progress)
        elif second is None:
            before, after = _with_source(Path(first), source, scratch, trust_remote_code, notes)
        else:
            before, after = _two(Path(first), Path(second), scratch, trust_remote_code)
        progress("comparing")
        return _compare(before, after, tensors and recipe is None, notes, progress)


def _by_recipe(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    tp: int,
    sp: int,
    options: Mapping[str, Any] | None,
    trust_remote_code: bool,
    progress: ProgressCall,
) -> tuple[Side, Side]:
    traced = trace(model, trust_remote_code=trust_remote_code)
    loaded = calibrate(load_recipe(recipe, options), traced, tp, None, progress)
    program, _ = apply_recipe(traced, loaded, tp, sp=sp)
    name = name_of(model)
    modeling = emit_huggingface(single_device(program)).modeling or ""
    after = Side(f"{name} by {loaded.name}", None, None, program, runtime_module(program)[2], modeling)
    return _model(name, None, traced, mesh_of(program)), after


def _with_source(
    root: Path, source: str | os.PathLike[str] | None, scratch: Path, trust_remote_code: bool, notes: list[str]
) -> tuple[Side, Side]:
    manifest = read_manifest(root)
    found = find_source(root, manifest, source)
    if found is None:
        place = manifest.source.path or manifest.source.name
        notes.append(f"the source, {place}, is not here: tensors were not compared. Give --source DIR")
    opened = reopen(root, manifest, found, scratch / "a", trust_remote_code)
    before = _model(manifest.source.name, found, opened.origin, manifest.mesh)
    return before, _output(root, manifest, opened.program)


def _two(first: Path, second: Path, scratch: Path, trust_remote_code: bool) -> tuple[Side, Side]:
    manifests = [read_manifest(root) if (root / MANIFEST).is_file() else None for root in (first, second)]
    mesh = next((m.mesh for m in manifests if m is not None), {"tp": 1})
    sides = []
    for place, (root, manifest) in enumerate(zip((first, second), manifests, strict=True)):
        if manifest is not None:
            program = reopen(root, manifest, None, scratch / str(place), trust_remote_code).program
            sides.append(_output(root, manifest, program))
        elif (root / "config.json").is_file():
            sides.append(_model(name_of(root), root, trace(root, trust_remote_code=trust_remote_code), mesh))
        else:
            raise RewriterError(f"{root}: no model and no output of `rewrite`. Give a directory with a config.json")
    a, b = sides
    counts = [side.program.source.num_layers for side in sides]
    if counts[0] != counts[1]:
        raise RewriterError(f"{first} has {counts[0]} layers, {second} has {counts[1]}: give two of one model")
    return a, b


def _model(name: str, root: Path | None, traced: Program, mesh: Mapping[str, int]) -> Side:
    """A model as it is, on ranks under plain tensor parallelism."""
    tp = mesh.get("tp", 1)
    program = TensorParallel().apply(traced.with_(mesh={"tp": tp}, origin=traced)) if tp > 1 else traced
    return Side(name, root, None, program, runtime_module(program)[2], "")


def _output(root: Path, manifest: Manifest, program: Program) -> Side:
    """An output, with its files as they are."""

    def read(file: str | None) -> str:
        path = root / file if file else None
        return path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else ""

    entry = manifest.runtime.get(mesh_name(manifest.mesh))
    module, ranges = (read(entry.module), read(entry.weights)) if entry else ("", "")
    held = "\n".join(lines_of(ranges))
    return Side(name_of(root), root, manifest, program, module, read(manifest.adapted.modeling), held)


def lines_of(text: str) -> list[str]:
    """The lines of a text; of a JSON object one for each entry, of the ranges of ranks one for each parameter."""
    try:
        table = json.loads(text)
        return [f"{name}: {json.dumps(entry)}" for name, entry in table.get("parameters", table).items()]
    except (ValueError, AttributeError):
        return text.splitlines()


def _compare(before: Side, after: Side, tensors: bool, notes: list[str], progress: ProgressCall) -> DiffReport:
    names = before.name, after.name if after.name != before.name else f"{after.name} (second)"
    programs = before.program, after.program
    passes = passes_of(after.program) if before.manifest is None else passes_between(*programs, names)
    on_mesh = [f"{name}, {_mesh(side)}" for name, side in zip(names, (before, after), strict=True)]
    code = [code_difference("runtime module", on_mesh[0], before.module, on_mesh[1], after.module)]
    if before.modeling or after.modeling:
        own = names[0] if before.modeling else f"{names[0]}: transformers' own"
        code.append(code_difference("modeling file", own, before.modeling, names[1], after.modeling))
    if before.ranges and after.ranges:
        code.append(code_difference("ranges of the ranks", names[0], before.ranges, names[1], after.ranges))
    layers = layers_between(*programs)
    compared: TensorDifferences | None = None
    if tensors and before.root is not None and after.root is not None:
        compared = tensors_between(Checkpoint.open(before.root), Checkpoint.open(after.root), progress)
    drawings = "", ""
    if layers:
        drawings = (
            layers_drawing([x.before for x in layers], f"{names[0]}: {before.recipe}, {_mesh(before)}"),
            layers_drawing([x.after for x in layers], f"{names[1]}: {after.recipe}, {_mesh(after)}"),
        )
    return DiffReport(*names, _facts(before, after), passes, layers, code, compared, notes, drawings)


def code_difference(title: str, name_before: str, before: str, name_after: str, after: str) -> CodeDifference:
    """Two texts line by line, with some lines around each change; without rows where they are the same."""
    a, b = before.splitlines(), after.splitlines()
    rows: list[Row] = []
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT) if a != b else ():
        if rows:
            rows.append(("gap", None, None))
        for tag, i1, i2, j1, j2 in group:
            for i, j in zip_longest(range(i1, i2), range(j1, j2)):
                left, right = None if i is None else (i + 1, a[i]), None if j is None else (j + 1, b[j])
                kind = "same" if tag == "equal" else "changed" if left and right else "removed" if left else "added"
                rows.append((kind, left, right))
    added = sum(kind in ("changed", "added") for kind, *_ in rows)
    removed = sum(kind in ("changed", "removed") for kind, *_ in rows)
    return CodeDifference(title, name_before, name_after, rows, added, removed)


def _mesh(side: Side) -> str:
    return ", ".join(f"{axis}={n}" for axis, n in side.program.mesh.items()) or "one device"


def _facts(before: Side, after: Side) -> dict[str, tuple[str, str]]:
    """Facts of each side, by name."""

    def of(side: Side) -> dict[str, str]:
        traffic = summary(collectives(side.program))
        drift = None if side.manifest is None else side.manifest.verification.drift
        return {
            "recipe": side.recipe,
            "mesh": _mesh(side),
            "collectives": str(traffic.collectives),
            "of them overlapped with computation": str(traffic.hidden),
            "bytes per token": f"{traffic.bytes_per_token:,}",
            "drift (KL, nats)": "–" if drift is None else f"{drift.kl:.3g}",
        }

    ours, theirs = of(before), of(after)
    return {name: (value, theirs[name]) for name, value in ours.items()}
