"""`rewrite bisect DIR`: the place where an output parts from its recipe: in files, in passes, in what was written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rewriter.check.comparison import REAL_WEIGHTS
from rewriter.check.drift import golden_tokens, too_large
from rewriter.check.saved_output import check_weights
from rewriter.check.shrunken_check import MOST_RANKS
from rewriter.check.subprocess_logits import huggingface_logits, rank_logits
from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of, scratch_folder
from rewriter.common.run_context import ProgressCall, RunContext
from rewriter.convert.reopened import Reopened, find_source, reopen
from rewriter.emit.files.output_directory import sha256_of
from rewriter.explain.bisect.finding import Bisection, Fault, Step
from rewriter.explain.bisect.locate import changed_lines, layer_of_path
from rewriter.explain.bisect.passes import COPIES, EXACT_SUMS, Weights, bisect_passes, material_of
from rewriter.explain.bisect.recording import record
from rewriter.explain.bisect.values import LOGITS, Values, difference, first_parting
from rewriter.explain.diff.compare import lines_of
from rewriter.explain.diff.tensors import tensor_difference
from rewriter.ir import Program, walk_modules
from rewriter.ir.simulate import load_weights
from rewriter.output.manifest import read_manifest
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.phases import single_device
from rewriter.passes.quantize_collectives import is_quantized
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Tensor
from rewriter.weights.references import references_text


def bisect_output(
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    weights: Weights = "real",
    context: RunContext = RunContext(),
) -> Bisection:
    """The first place at which an output parts from what its recipe makes of its source.

    In this order, up to the first that differs: files whose hash is not the manifest's, tensor by tensor and line by
    line; every pass, applied again; all tensors; logits of the adapted checkpoint, and of the sharded module on as many
    processes as the manifest names. Generated files whose hash differs are read and never run. `source` is the model
    that was rewritten, found by its name otherwise; without it weights are compared with nothing. Raises RewriterError
    for bad input, VerificationError for weights that are not finite: with them nothing parts.
    """
    root, progress = Path(directory), context.progress
    manifest = read_manifest(root)
    report = Bisection(f"{name_of(root)}, {manifest.recipe.get('name', 'passes')} on {mesh_name(manifest.mesh)}")
    progress("hashing")
    changed = [n for n, sha in manifest.files.items() if not (root / n).is_file() or sha256_of(root / n) != sha]
    report.steps.append(Step("files", not changed, note=", ".join(changed[:3])))
    original = find_source(root, manifest, source)
    if original is None:
        report.notes.append(
            f"its source, {manifest.source.name}, is not here (--source DIR): weights were compared with nothing"
        )
    with scratch_folder("bisect") as scratch:
        progress("tracing")
        opened = reopen(root, manifest, original, scratch, context.trust_remote_code)
        out = _BisectedOutput(opened, original is not None and manifest.adaptation is None, changed, report, progress)
        out.files()
        if report.fault is None:
            check_weights(root, manifest)
            out.passes(weights, scratch)
        if report.fault is None and out.compared:
            out.weights()
        if report.fault is None and not any(name.endswith(".py") for name in changed):
            out.written()
    return report


@dataclass(frozen=True)
class _BisectedOutput:
    """An output that is bisected; faults and steps are added to its `report`. `compared`: its weights have a
    counterpart in the source. `changed`: the files whose hash is not the manifest's."""

    opened: Reopened
    compared: bool
    changed: list[str]
    report: Bisection
    progress: ProgressCall

    def add(self, name: str, fault: Fault | None, error: float | None = None, note: str = "") -> None:
        self.report.steps.append(Step(name, fault is None, error, note))
        self.report.fault = fault

    def files(self) -> None:
        """The first fault in files that are not as they were written."""
        weights = [n for n in self.changed if n.endswith((".safetensors", ".tensors"))]
        if self.compared and any(not name.startswith("verification/") for name in weights):
            self.weights()
        manifest = self.opened.manifest
        runtime = {file for entry in manifest.runtime.values() for file in (entry.module, entry.weights)}
        for name in self.changed:
            if self.report.fault is None and name in {"config.json", manifest.adapted.modeling, *runtime}:
                fault = compare_text(self.opened, name)
                if fault is not None and name == "config.json" and not too_large(self.opened.origin, COPIES):
                    fault = self._where_it_shows(fault)
                self.add(name, fault)

    def _where_it_shows(self, fault: Fault) -> Fault:
        """A changed value of the config, at the first module that computes something else by it, if it can be run."""
        opened = self.opened
        weights = load_weights(opened.origin, torch.float32)
        try:
            with scratch_folder("bisect") as scratch:
                changed = reopen(opened.root, opened.manifest, None, scratch).origin
                parting = first_parting(_values(changed, weights), _values(opened.origin, weights), REAL_WEIGHTS)
        except RewriterError as refusal:
            return replace(fault, cause=f"{fault.cause}; {refusal}")
        if parting is None:
            return replace(fault, cause=f"{fault.cause}; the logits are the same")
        (side, path), error = parting
        cause = f"{fault.cause}; {path or side} is another"
        return replace(fault, layer=layer_of_path(opened.origin, path), module=path, cause=cause, error=error)

    def passes(self, weights: Weights, scratch: Path) -> None:
        """The recipe's passes, one by one."""
        opened, report = self.opened, self.report
        if weights == "real" and too_large(opened.origin, COPIES):
            report.notes.append("its weights do not fit into memory: passes were compared on a shrunken copy")
            weights = "shrunken"
        try:
            asked, mesh = list(opened.program.asked or ()), opened.manifest.mesh
            material, passes = material_of(weights, opened.origin, asked, mesh, scratch, self.progress)
            bisect_passes(material, passes, mesh, report, self.progress)
        except RewriterError as error:
            report.notes.append(f"passes were not compared: {error}")

    def weights(self) -> None:
        """The first tensor, in the order in which the model uses them, that is not as the source gives it."""
        self.progress("comparing tensors")
        program, layout, out = self.opened.origin, self.opened.planned(), Checkpoint.open(self.opened.root)
        source, copied = layout.checkpoint, {name for _, name in layout.copies}
        expected: dict[str, tuple[Expression, torch.dtype | None]] = {}
        for file, tensors in layout.shards.items():
            if not file.startswith("runtime/"):
                expected |= tensors
        for path in source.files:
            if path.relative_to(source.directory).as_posix() in copied:
                expected |= {name: (Tensor(name), None) for name in source.headers[path].tensors}
        used = [(n, name) for n, p in program.parameters.items() if p.expression for name in p.expression.tensors()]
        users = {name: parameter.rpartition(".")[0] for parameter, name in reversed(used)}
        order = {name: place for place, (_, name) in enumerate(used)}
        for name in sorted(expected, key=lambda name: (order.get(name, len(used)), name)):
            if (wrong := _wrong(name, *expected[name], source, out)) is not None:
                module = users.get(name, "")
                self.add("weights", Fault("weights", layer_of_path(program, module), module, name, *wrong))
                return
        self.add("weights", None)

    def written(self) -> None:
        """The files that were written, run as their users run them."""
        opened, report, manifest = self.opened, self.report, self.opened.manifest
        if too_large(opened.origin, COPIES):
            report.notes.append("what was written was not run: its weights do not fit into memory")
            return
        ids, ranks = [golden_tokens(opened.program)], ranks_of(manifest.mesh)
        forms = [("adapted checkpoint", manifest.adapted.modeling, lambda: huggingface_logits(opened.root, ids))]
        if manifest.runtime and is_quantized(opened.program):
            report.notes.append(f"{EXACT_SUMS}; the sharded module, which quantizes them, was not run")
        elif manifest.runtime and ranks <= MOST_RANKS:
            module = manifest.runtime[mesh_name(manifest.mesh)].module
            forms.append(("sharded module", module, lambda: rank_logits(opened.root, ranks, ids)))
        program = single_device(opened.program)
        right = _values(program, self._held(program))[LOGITS]
        for name, file, run in forms:
            self.progress(f"running the {name}")
            error = difference((run()[0],), right, partial=False)
            line = None if file is None or error <= REAL_WEIGHTS else compare_text(opened, file)
            fault = line or Fault(name, cause="its logits differ, and its code is as it would be generated now")
            self.add(name, None if error <= REAL_WEIGHTS else replace(fault, error=error), error)
            if self.report.fault is not None:
                return

    def _held(self, program: Program) -> Mapping[str, torch.Tensor]:
        """Weights of a program in fp32, as precise as the output holds them."""
        job: Mapping[str, Any] = self.opened.manifest.job or {}
        if not self.compared or not (job.get("dtype") or job.get("dequantize")):
            return load_weights(program, torch.float32)
        layout, known = self.opened.planned(), program.parameters.items()
        return {name: layout.held(p.expression) for name, p in known if p.expression is not None}


def _values(program: Program, weights: Mapping[str, torch.Tensor]) -> Values:
    """Values of a program."""
    return record(program, golden_tokens(program), weights).shown()


def _wrong(
    name: str, expression: Expression, dtype: torch.dtype | None, source: Checkpoint, out: Checkpoint
) -> tuple[str, Sequence[str]] | None:
    """(cause, difference) of a tensor of an output that is not the value of an expression over its source."""
    if name not in out.tensors:
        return "it is missing", ()
    right = source.evaluate(expression)
    changed = tensor_difference(name, right.to(dtype or right.dtype), out.evaluate(Tensor(name)))
    if changed is None:
        return None
    before, after, norm = changed.norms
    lines = [f"-{changed.before}, norm {before}", f"+{changed.after}, norm {after}"]
    return f"it differs: {changed.what}, ‖difference‖ {norm}", lines


def compare_text(opened: Reopened, name: str) -> Fault | None:
    """The first line of a generated file that is not as it would be generated now; None: it is."""
    folders = name.split("/")
    if folders[0] == "runtime" and folders[1] != mesh_name(opened.manifest.mesh):  # added later
        return Fault("sharded module", cause=f"{name} is not as it was written")
    planned = opened.planned()
    right = planned.texts.get(name, "")
    if not right and planned.references:
        right = references_text(next(iter(planned.references.values())), Checkpoint.open(opened.root))
    path = opened.root / name
    actual = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if actual == right:
        return None
    now, then = lines_of(actual), lines_of(right)
    place = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then)))
    line = (then[place] if place < len(then) else now[place] if place < len(now) else "").strip()
    module = _module_of_line(opened, then, place, json.loads(planned.texts["config.json"]).get("rewriter_layers") or [])
    stage = "sharded module" if name.startswith("runtime/") else "adapted checkpoint"
    cause = f"{name}, line {place + 1}, is not as it was written" if actual else f"{name} is missing"
    return Fault(stage, layer_of_path(opened.program, module), module, line, cause, changed_lines(then, now, "it"))


def _module_of_line(opened: Reopened, lines: list[str], place: int, kinds: list[str]) -> str:
    """The path of the module that a line is about: its parameter's, or the first of the class that it stands in."""
    program = opened.program
    parameter = lines[place].partition(":")[0] if place < len(lines) else ""
    if parameter in program.parameters:
        return parameter.rpartition(".")[0]
    classes = [match[1] for line in lines[: place + 1] if (match := re.match(r"class (\w+)", line))]
    name = classes[-1] if classes else ""
    for path, module in walk_modules(program.modules):
        if name and getattr(module, "class_name", None) == name:
            return path
    # a class of layers: named by its kind in the modeling file, made for a range of layers in a runtime module
    code = "\n".join(lines)
    if (kind := re.search(rf'"(\w+)": {name},', code)) is not None and kind[1] in kinds:
        return f"{program.source.layers}.{kinds.index(kind[1])}"
    layer = re.search(rf"\b{name}\([^\n]*(?:range\(|slot=)(\d+)", code) if name else None
    return f"{program.source.layers}.{layer[1]}" if layer else ""
