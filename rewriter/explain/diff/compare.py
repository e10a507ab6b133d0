"""`rewrite diff`: an output with its source, two outputs or models, or a model with what a recipe makes of it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of, scratch_folder
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.convert.pass_measurements import calibrate
from rewriter.convert.reopened import find_source, reopen
from rewriter.emit.files.output_directory import sha256_of
from rewriter.emit.files.output_files import runtime_module
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.manifest import mesh_of
from rewriter.explain.diff.differences import CodeDifference, DiffReport, Row
from rewriter.explain.diff.programs import layers_between, passes_between
from rewriter.explain.diff.tensors import tensors_between
from rewriter.ir import Program
from rewriter.ir.communication import collectives, summary
from rewriter.ir.layer_drawing import layers_drawing
from rewriter.ir.phases import prompt_phase
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import MANIFEST, mesh_name
from rewriter.passes.phases import single_device
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.tracing import trace
from rewriter.weights import Checkpoint


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

    @property
    def mesh(self) -> str:
        return ", ".join(f"{axis}={n}" for axis, n in self.program.mesh.items()) or "one device"

    def facts(self) -> dict[str, str]:
        """Facts by name."""
        traffic = summary(collectives(self.program))
        drift = None if self.manifest is None else self.manifest.verification.drift
        phase = prompt_phase(self.program)
        of = "" if phase is None else f", computing {phase}"
        return {
            "recipe": self.recipe,
            "mesh": self.mesh,
            "collectives": f"{traffic.collectives}{of}",
            "of them overlapped with computation": str(traffic.hidden),
            "bytes per token": f"{traffic.bytes_per_token:,}",
            "drift (KL, nats)": "–" if drift is None else f"{drift.kl:.3g}",
        }


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
    context: RunContext = RunContext(),
) -> DiffReport:
    """Differences between `first` and `second`: passes, layers, generated code, tensors.

    `first` alone, an output of rewriter, is compared with its source: what the recipe changed. The source is found by
    the manifest, or is `source`; where it is not here, tensors are not compared. With `recipe`, `first` is
    a model, and is compared with what the recipe makes of it on `tp` × `sp` ranks, with nothing written. Otherwise both
    are outputs or models. A model without recipe is shown on the ranks of the other side, under plain tensor
    parallelism. Raises RewriterError for bad input.
    """
    if recipe is None and ((tp, sp) != (1, 1) or set):
        raise RewriterError("--tp, --sp and --set are for --recipe: an output has its own")
    with scratch_folder("diff") as scratch:
        context.progress("tracing")
        notes: list[str] = []
        if recipe is not None:
            if second is not None:
                raise RewriterError("--recipe makes the second side of one model: leave out B, or --recipe")
            traced, name = trace(first, trust_remote_code=context.trust_remote_code), name_of(first)
            loaded = calibrate(load_recipe(recipe, set), traced, tp, None, context.progress)
            program, _ = apply_recipe(traced, loaded, tp, sp=sp)
            modeling = emit_huggingface(single_device(program)).modeling or ""
            before = _model(name, None, traced, mesh_of(program))
            after = Side(f"{name} by {loaded.name}", None, None, program, runtime_module(program)[2], modeling)
        elif second is None:
            before, after = _with_source(Path(first), source, scratch, context.trust_remote_code, notes)
        else:
            before, after = _two(Path(first), Path(second), scratch, context.trust_remote_code)
        context.progress("comparing")
        return _compare(before, after, tensors and recipe is None, notes, context.progress)


def _with_source(
    root: Path, source: str | os.PathLike[str] | None, scratch: Path, trust_remote_code: bool, notes: list[str]
) -> tuple[Side, Side]:
    manifest = read_manifest(root)
    original = find_source(root, manifest, source)
    if original is None:
        place = manifest.source.path or manifest.source.name
        notes.append(f"the source, {place}, is not here: tensors were not compared. Give --source DIR")
    opened = reopen(root, manifest, original, scratch / "a", trust_remote_code)
    before = _model(manifest.source.name, original, opened.origin, manifest.mesh)
    return before, _output(root, manifest, opened.program)


def _two(first: Path, second: Path, scratch: Path, trust_remote_code: bool) -> tuple[Side, Side]:
    manifests = {root: read_manifest(root) for root in (first, second) if (root / MANIFEST).is_file()}
    mesh = next((manifest.mesh for manifest in manifests.values()), {"tp": 1})
    sides = []
    for place, root in enumerate((first, second)):
        if root in manifests:
            program = reopen(root, manifests[root], None, scratch / str(place), trust_remote_code).program
            sides.append(_output(root, manifests[root], program))
        elif (root / "config.json").is_file():
            sides.append(_model(name_of(root), root, trace(root, trust_remote_code=trust_remote_code), mesh))
        else:
            raise RewriterError(f"{root}: no model and no output of `rewrite`. Give a directory with a config.json")
    a, b = (side.program.source.num_layers for side in sides)
    if a != b:
        raise RewriterError(f"{first} has {a} layers, {second} has {b}: give two of one model")
    return sides[0], sides[1]


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
    modeling = read(manifest.adapted.modeling)
    return Side(name_of(root), root, manifest, program, module, modeling, "\n".join(lines_of(ranges)))


def _changed(*sides: Side) -> Iterator[Path]:
    """Code and configs of outputs that are not as the manifest has them."""
    for side in sides:
        if side.root is not None and side.manifest is not None:
            for name, digest in side.manifest.files.items():
                file = side.root / name
                if (name == "config.json" or file.suffix == ".py") and (
                    not file.is_file() or sha256_of(file) != digest
                ):
                    yield file


def lines_of(text: str) -> list[str]:
    """The lines of a text; of a JSON object one for each entry, of the ranges of ranks one for each parameter."""
    try:
        table = json.loads(text)
        return [f"{name}: {json.dumps(entry)}" for name, entry in table.get("parameters", table).items()]
    except (ValueError, AttributeError):
        return text.splitlines()


def _compare(before: Side, after: Side, tensors: bool, notes: list[str], progress: ProgressCall) -> DiffReport:
    names = before.name, after.name if after.name != before.name else f"{after.name} (second)"
    on_mesh = f"{names[0]}, {before.mesh}", f"{names[1]}, {after.mesh}"
    notes += [
        f"{file} was changed since it was written. `rewrite verify` says more" for file in _changed(before, after)
    ]
    code = [code_difference("runtime module", on_mesh, before.module, after.module)]
    if before.modeling or after.modeling:
        own = names[0] if before.modeling else f"{names[0]}: transformers' own"
        code.append(code_difference("modeling file", (own, names[1]), before.modeling, after.modeling))
    if before.ranges and after.ranges:
        code.append(code_difference("ranges of the ranks", names, before.ranges, after.ranges))
    theirs = after.facts()
    passes = passes_between(None if before.manifest is None else before.program, after.program, names)
    layers = layers_between(before.program, after.program)
    facts = {name: (value, theirs[name]) for name, value in before.facts().items()}
    report = DiffReport(*names, facts, passes, layers, code, None, notes)
    if tensors and before.root is not None and after.root is not None:
        report.tensors = tensors_between(Checkpoint.open(before.root), Checkpoint.open(after.root), progress)
    if layers:
        report.drawings = (
            layers_drawing([x.before for x in layers], f"{names[0]}: {before.recipe}, {before.mesh}"),
            layers_drawing([x.after for x in layers], f"{names[1]}: {after.recipe}, {after.mesh}"),
        )
    return report


def code_difference(title: str, names: tuple[str, str], before: str, after: str) -> CodeDifference:
    """Two texts line by line, with three lines around each change; without rows where they are the same."""
    a, b = before.splitlines(), after.splitlines()
    rows: list[Row] = []
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    for group in matcher.get_grouped_opcodes() if a != b else ():
        if rows:
            rows.append(("gap", None, None))
        for tag, i1, i2, j1, j2 in group:
            for i, j in zip_longest(range(i1, i2), range(j1, j2)):
                left, right = None if i is None else (i + 1, a[i]), None if j is None else (j + 1, b[j])
                kind = "same" if tag == "equal" else "changed" if left and right else "removed" if left else "added"
                rows.append((kind, left, right))
    added = sum(kind in ("changed", "added") for kind, *_ in rows)
    removed = sum(kind in ("changed", "removed") for kind, *_ in rows)
    return CodeDifference(title, *names, rows, added, removed)
