"""Files of an output that are not as they were written: the tensor, the line of code, the rank's range."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

import torch

from rewriter.convert.reopened import Reopened
from rewriter.explain.bisect.finding import Fault
from rewriter.explain.bisect.locate import changed_lines, layer_of_path
from rewriter.explain.diff.compare import lines_of
from rewriter.explain.diff.differences import norm_text
from rewriter.explain.diff.tensors import tensor_difference
from rewriter.ir import Program, walk_modules
from rewriter.output.manifest import Manifest
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Tensor
from rewriter.weights.references import references_text

WEIGHTS = "weights"


def compare_weights(opened: Reopened) -> Fault | None:
    """The first tensor of the output, in the order in which the model uses them, that is not as the source gives it.

    None: all are. Raises RewriterError where a file's header cannot be read.
    """
    layout = opened.planned()
    source, out = layout.checkpoint, Checkpoint.open(opened.root)
    expected: dict[str, tuple[Expression, torch.dtype | None]] = {}
    for file, tensors in layout.shards.items():
        if not file.startswith("runtime/"):
            expected |= tensors
    copied = {name for _, name in layout.copies}
    for path in source.files:
        if path.relative_to(source.directory).as_posix() in copied:
            expected |= {name: (Tensor(name), None) for name in source.headers[path].tensors}
    for name in _in_order_of_use(opened.origin, expected):
        if name not in out.tensors:
            return _tensor_fault(opened.origin, name, "it is missing")
        expression, dtype = expected[name]
        right = source.evaluate(expression)
        changed = tensor_difference(name, right if dtype is None else right.to(dtype), out.evaluate(Tensor(name)))
        if changed is not None:
            before, after, norm = map(norm_text, (changed.norm_before, changed.norm_after, changed.norm_difference))
            lines = [f"-{changed.before}, norm {before}", f"+{changed.after}, norm {after}"]
            return _tensor_fault(opened.origin, name, f"it differs: {changed.what}, ‖difference‖ {norm}", lines)
    return None


def not_finite(opened: Reopened) -> Fault | None:
    """Without the source: the first tensor that holds a number that is not finite."""
    out = Checkpoint.open(opened.root)
    for name in _in_order_of_use(opened.origin, out.tensors):
        tensor = out.evaluate(Tensor(name))
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            return _tensor_fault(opened.origin, name, "it has elements that are not finite")
    return None


def _in_order_of_use(program: Program, names: Collection[str]) -> list[str]:
    """Tensors of a checkpoint in the order in which the model uses them; others last."""
    used = [t for p in program.parameters.values() if p.expression is not None for t in p.expression.tensors()]
    order = {name: place for place, name in reversed(list(enumerate(used)))}
    return sorted(names, key=lambda name: (order.get(name, len(used)), name))


def _tensor_fault(program: Program, name: str, cause: str, difference: Sequence[str] = ()) -> Fault:
    """A fault of a tensor of a checkpoint, with the module that uses it."""
    parameters = ((n, p.expression) for n, p in program.parameters.items() if p.expression is not None)
    path = next((n for n, e in parameters if name in set(e.tensors())), name).rpartition(".")[0]
    return Fault(WEIGHTS, layer_of_path(program, path), path, name, cause, difference)


# --- generated files -------------------------------------------------------------------------------------------------


def generated_files(manifest: Manifest) -> set[str]:
    """The configuration, the modeling file, and every runtime module with its list of ranges."""
    runtime = {file for entry in manifest.runtime.values() for file in (entry.module, entry.weights)}
    return {file for file in ("config.json", manifest.adapted.modeling, *runtime) if file}


def compare_text(opened: Reopened, name: str) -> Fault | None:
    """The first line of a generated file that is not as it would be generated now; None: it is."""
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
