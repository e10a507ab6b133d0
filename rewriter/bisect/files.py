"""Files of an output that are not as they were written: which tensor, which line, which rank's range."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rewriter.bisect.finding import Fault
from rewriter.bisect.statements import layer_of_path
from rewriter.bisect.values import relation
from rewriter.common.errors import RewriterError
from rewriter.common.expressions import Expression, Tensor
from rewriter.common.files import read_json
from rewriter.convert.reopened import Reopened
from rewriter.emit.files.output_directory import sha256_of
from rewriter.emit.manifest import Manifest
from rewriter.ir import Leaf, Program, walk_modules
from rewriter.verify.comparison import relative_error
from rewriter.weights import Checkpoint
from rewriter.weights.references import references_text

WEIGHTS = "weights"


def changed_files(root: Path, manifest: Manifest) -> list[str]:
    """The files that are missing or have another sha256 than the manifest says."""
    return [
        name
        for name, sha256 in manifest.files.items()
        if not (root / name).is_file() or sha256_of(root / name) != sha256
    ]


# --- tensors ---------------------------------------------------------------------------------------------------------


def in_order_of_use(program: Program, names: set[str]) -> list[str]:
    """Tensors of a checkpoint in the order in which the model uses them; others last."""
    used = [t for p in program.parameters.values() if p.expression is not None for t in p.expression.tensors()]
    order = {name: place for place, name in reversed(list(enumerate(used)))}
    return sorted(names, key=lambda name: (order.get(name, len(used)), name))


def module_of(program: Program, tensor: str) -> tuple[str, str]:
    """(path, kind) of the module that uses a tensor; the tensor's own path where none is known."""
    path = next(
        (
            n
            for n, p in program.parameters.items()
            if p.expression is not None and tensor in set(p.expression.tensors())
        ),
        tensor,
    ).rpartition(".")[0]
    kinds = {
        p: m.kind if isinstance(m, Leaf) else getattr(m, "class_name", "") for p, m in walk_modules(program.modules)
    }
    return path, kinds.get(path, "")


def compare_tensors(opened: Reopened) -> Fault | None:
    """The first tensor of the output, in the order of use, that is not what the source gives; None: all are.

    Raises RewriterError where a file's header cannot be read.
    """
    layout = opened.planned()
    source, out = layout.checkpoint, Checkpoint.open(opened.root)
    expected: dict[str, tuple[Expression, torch.dtype | None]] = {
        name: entry
        for file, tensors in layout.shards.items()
        if not file.startswith("runtime/")
        for name, entry in tensors.items()
    }
    copied = {name for _, name in layout.copies}
    for file in source.files:
        if file.relative_to(source.directory).as_posix() in copied:
            expected |= {name: (Tensor(name), None) for name in source.headers[file].tensors}
    program = opened.origin
    for name in in_order_of_use(program, set(expected)):
        path, kind = module_of(program, name)
        where = (WEIGHTS, layer_of_path(program, path), f"{path.rpartition('.')[2]} ({kind})" if kind else name, path)
        if name not in out.tensors:
            return Fault(*where, f"the tensor {name} is missing", name)
        expression, dtype = expected[name]
        right, actual = source.evaluate(expression), out.evaluate(Tensor(name))
        fault = tensors_part(where, name, actual, right if dtype is None else right.to(dtype), "the source's")
        if fault is not None:
            return fault
    return None


def tensors_part(
    where: tuple[str, int | None, str, str], name: str, actual: torch.Tensor, right: torch.Tensor, whose: str
) -> Fault | None:
    """How a tensor differs from `whose`; None: in no bit. `where`: stage, layer, operator and module of a fault."""
    if actual.shape != right.shape or actual.dtype != right.dtype:
        return Fault(*where, f"the tensor {name} has another shape or dtype", name, _kind(actual), _kind(right))
    if _same_bits(actual, right):
        return None
    cause = f"the tensor {name} differs from {whose} in {_damage(actual, right)}"
    return Fault(*where, cause, name, _norm(actual), _norm(right), _error(actual, right))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _damage(actual: torch.Tensor, right: torch.Tensor) -> str:
    different = actual.contiguous() != right.contiguous()
    count = int(different.sum())
    first = [int(i) for i in different.nonzero()[0]] if count else []
    how = relation((actual.float(),), (right.float(),), 1e-3) if count > 1 else ""
    differs = f"{count:,} of {actual.numel():,} elements, first at {first}"
    return f"{differs}; {how}" if how else differs


def _error(actual: torch.Tensor, right: torch.Tensor) -> float:
    return relative_error(actual.float(), right.float())


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _norm(tensor: torch.Tensor) -> str:
    return f"{_kind(tensor)}, norm {float(tensor.double().norm()):.6g}" if tensor.is_floating_point() else _kind(tensor)


def suspicious_tensor(program: Program, out: Checkpoint) -> Fault | None:
    """Without the source: the first tensor that is not finite, or whose size is far from that of its like."""
    sizes: dict[str, dict[str, float]] = {}
    for name in in_order_of_use(program, set(out.tensors)):
        tensor = out.evaluate(Tensor(name))
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            continue
        size = float(tensor.double().pow(2).mean().sqrt())
        sizes.setdefault(re.sub(r"\.\d+\.", ".*.", name), {})[name] = size
        path, kind = module_of(program, name)
        if size != size or size == float("inf"):
            where = (WEIGHTS, layer_of_path(program, path), f"{path.rpartition('.')[2]} ({kind})", path)
            return Fault(*where, f"the tensor {name} has elements that are not finite", name)
    for alike in sizes.values():
        middle = sorted(alike.values())[len(alike) // 2]
        for name, size in alike.items():
            if len(alike) > 2 and middle > 0 and not 0.1 <= size / middle <= 10:
                path, kind = module_of(program, name)
                cause = f"the tensor {name} is {size / middle:.3g} times as large as its like in other layers"
                where = (WEIGHTS, layer_of_path(program, path), f"{path.rpartition('.')[2]} ({kind})", path)
                return Fault(*where, cause, name)
    return None


# --- generated files -------------------------------------------------------------------------------------------------


def compare_text(opened: Reopened, name: str, right: str) -> Fault | None:
    """The first line of a generated file that is not as `right` has it."""
    path = opened.root / name
    actual = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if actual == right:
        return None
    stage = "sharded module" if name.startswith("runtime/") else "adapted checkpoint"
    if not actual:
        return Fault(stage, None, name, "", f"{name} is missing")
    if name.endswith("weights.json"):
        return _references(opened, stage, name)
    if name == "config.json":
        return _config(opened, stage)
    a, b = actual.splitlines(), right.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, b, a, autojunk=False).get_opcodes():
        if tag != "equal":
            new, old = "\n".join(a[j1:j2]).strip(), "\n".join(b[i1:i2]).strip()
            cls, function = _place(b, i1)
            kinds = json.loads(opened.planned().texts["config.json"]).get("rewriter_layers") or []
            layer, module = _layer_of_class(opened.program, right, cls, kinds)
            cause = f"line {j1 + 1} of {name}, {cls + '.' if cls else ''}{function}: {_words(old, new)}"
            return Fault(stage, layer, old.splitlines()[0].strip() if old else new, module, cause, "", new, old)
    return None


def _place(lines: list[str], index: int) -> tuple[str, str]:
    """(class, function) that a line of code stands in."""
    cls = function = ""
    for line in lines[: index + 1]:
        if found := re.match(r"class (\w+)", line):
            cls, function = found[1], ""
        elif found := re.match(r"\s*def (\w+)", line):
            function = found[1]
    return cls, function or "at the top"


def _words(old: str, new: str) -> str:
    """What became of what, by the parts of the line that differ."""
    a, b = (re.findall(r"\w+(?:\.\w+)*|\S", text) for text in (old, new))
    parts = [
        f"`{' '.join(a[i1:i2])}` became `{' '.join(b[j1:j2])}`"
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    return ", ".join(parts[:3])


def _layer_of_class(program: Program, code: str, name: str, kinds: list[str]) -> tuple[int | None, str]:
    """(the first layer that uses a class of generated code, the path of the module there)."""
    for path, module in walk_modules(program.modules):
        if getattr(module, "class_name", None) == name:
            return layer_of_path(program, path), path
    kind = re.search(rf'"(\w+)": {name},', code)
    if kind is not None and kind[1] in kinds:
        return kinds.index(kind[1]), f"{program.source.layers}.{kinds.index(kind[1])}"
    found = re.search(rf"\b{name}\([^\n]*range\((\d+)", code) or re.search(rf"\b{name}\([^\n]*?slot=(\d+)", code)
    return (int(found[1]), f"{program.source.layers}.{found[1]}") if found else (None, "")


def _config(opened: Reopened, stage: str) -> Fault:
    right = json.loads(opened.planned().texts["config.json"])
    now = read_json(opened.root / "config.json", "Rewrite the model again.")
    for key in dict.fromkeys((*right, *now)):
        if now.get(key) != right.get(key):
            cause = f"config.json: {key} is {now.get(key)!r}, and was written as {right.get(key)!r}"
            return Fault(stage, None, key, "", cause, "", str(now.get(key)), str(right.get(key)))
    return Fault(stage, None, "config.json", "", "its bytes changed, but no value in it")


def _references(opened: Reopened, stage: str, name: str) -> Fault:
    """The first parameter of which ranks hold other ranges than were written."""
    references = next(iter(opened.planned().references.values()))
    right: Mapping[str, Any] = json.loads(references_text(references, Checkpoint.open(opened.root)))["parameters"]
    try:
        now = read_json(opened.root / name, "Rewrite the model again.").get("parameters", {})
    except RewriterError as error:
        return Fault(stage, None, name, "", str(error))
    for parameter, entry in _ordered(right, now):
        if now.get(parameter) != entry:
            path = parameter.rpartition(".")[0]
            cause = f"{name}: ranks read other elements of {parameter} than were written"
            kinds = dict(walk_modules(opened.program.modules))
            kind = getattr(kinds.get(path), "kind", "") or getattr(kinds.get(path), "class_name", "")
            operator = f"{path.rpartition('.')[2]} ({kind})" if kind else path
            return Fault(
                stage, layer_of_path(opened.program, path), operator, path, cause, parameter,
                json.dumps(now.get(parameter)), json.dumps(entry),
            )  # fmt: skip
    return Fault(stage, None, name, "", "its bytes changed, but no parameter in it")


def _ordered(right: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in dict.fromkeys((*right, *now)):
        yield name, right.get(name)
