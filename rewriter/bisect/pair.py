"""`rewrite bisect A B`: where two directories that should compute the same part: in weights, passes, or what was
written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewriter.bisect.files import WEIGHTS, in_order_of_use, module_of, tensors_part
from rewriter.bisect.finding import Bisection, Fault, Step
from rewriter.bisect.locate import locate, logits_error, result_of
from rewriter.bisect.recipe import COPIES
from rewriter.bisect.recording import record
from rewriter.bisect.references import Expected
from rewriter.bisect.stage import Stage
from rewriter.bisect.statements import layer_of_path
from rewriter.bisect.values import Ranks, difference, relation
from rewriter.bisect.written import UNSEEN, Seen, run_checkpoint, run_ranks
from rewriter.common.errors import RewriterError
from rewriter.common.expressions import Tensor
from rewriter.common.files import name_of
from rewriter.common.scratch import scratch_folder
from rewriter.convert.reopened import reopen
from rewriter.ir import Program
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import MANIFEST, mesh_name, ranks_of
from rewriter.passes.quantize_collectives import exact, is_quantized
from rewriter.tracing import trace
from rewriter.verify.comparison import RANKS, REAL_WEIGHTS
from rewriter.verify.drift import golden_tokens, too_large
from rewriter.verify.shrunken_check import MOST_RANKS
from rewriter.verify.simulate import load_weights
from rewriter.weights import Checkpoint

ProgressCall = Callable[..., None]


@dataclass(frozen=True)
class Side:
    """One of the two: an output of rewriter (with `manifest` and the program that its recipe gives), or a model."""

    root: Path
    manifest: Manifest | None
    program: Program

    @property
    def traced(self) -> Program:
        return self.program.origin or self.program


def bisect_pair(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    progress: ProgressCall = lambda *_: None,
) -> Bisection:
    """Where `first` parts from `second`: outputs of rewriter, or models, that should compute the same.

    In this order, up to the first that differs: tensors of the same name, in the order of use; where the recipes
    differ, the programs after each pass, on each side's weights; both checkpoints as transformers loads them, module
    by module; and, on the same mesh, both sharded modules. Raises RewriterError for bad input and for models of
    different layers.
    """
    roots = Path(first), Path(second)
    found = Bisection(f"{roots[0].name} | {roots[1].name}", on="the real weights")
    with scratch_folder("bisect") as scratch:
        progress("tracing")
        a, b = (_side(root, scratch / str(i), trust_remote_code) for i, root in enumerate(roots))
        if a.traced.source.num_layers != b.traced.source.num_layers:
            layers = [side.traced.source.num_layers for side in (a, b)]
            raise RewriterError(f"{first} has {layers[0]} layers, {second} has {layers[1]}: give two of one model")
        for compare in (_weights, _recipes, _checkpoints, _modules):
            compare(a, b, found, progress)
            if found.fault is not None:
                break
    return found


def _side(root: Path, scratch: Path, trust_remote_code: bool) -> Side:
    if not (root / MANIFEST).is_file():
        if not (root / "config.json").is_file():
            raise RewriterError(f"{root}: no model and no output of `rewrite`. Give a directory with a config.json")
        return Side(root, None, trace(root, trust_remote_code=trust_remote_code))
    manifest = read_manifest(root)
    return Side(root, manifest, reopen(root, manifest, None, scratch, trust_remote_code).program)


def _weights(a: Side, b: Side, found: Bisection, progress: ProgressCall) -> None:
    progress("comparing tensors")
    ours, theirs = Checkpoint.open(a.root), Checkpoint.open(b.root)
    program = a.traced
    for name in in_order_of_use(program, set(ours.tensors) | set(theirs.tensors)):
        path, kind = module_of(program, name)
        where = (WEIGHTS, layer_of_path(program, path), f"{path.rpartition('.')[2]} ({kind})" if kind else name, path)
        lacking = next((side.root for side, have in ((a, ours), (b, theirs)) if name not in have.tensors), None)
        if lacking is not None:
            found.fault = Fault(*where, f"{lacking} has no tensor {name}", name)
        else:
            values = ours.evaluate(Tensor(name)), theirs.evaluate(Tensor(name))
            found.fault = tensors_part(where, name, *values, f"that of {name_of(b.root)}")
        if found.fault is not None:
            break
    found.steps.append(Step(WEIGHTS, found.fault is None))


def _recipes(a: Side, b: Side, found: Bisection, progress: ProgressCall) -> None:
    """Where the recipes differ: the programs after the passes, one beside the other, on the same weights."""
    passes = [[entry.rewrite for entry in side.program.history] for side in (a, b)]
    meshes = [side.program.mesh for side in (a, b)]
    if passes[0] == passes[1] and meshes[0] == meshes[1]:
        return
    if too_large(a.traced, COPIES):
        found.notes.append("passes were not compared: the weights do not fit into memory")
        return
    # passes that both have are side by side; those of one side alone are compared with nothing new of the other
    ids = golden_tokens(a.traced)
    last = [side.traced.with_(mesh=side.program.mesh, origin=side.traced) for side in (a, b)]
    for ours, theirs in _aligned(*passes):
        progress(f"comparing after {(ours or theirs).name}")
        if ours is not None:
            last[0] = ours.apply(last[0])
        if theirs is not None:
            last[1] = theirs.apply(last[1])
        name = (ours or theirs).name
        stage = _stage(name, exact(last[0]), exact(last[1]), ids)
        error = logits_error(stage)
        only = "" if ours is not None and theirs is not None else f"only in {name_of((a if ours else b).root)}"
        found.steps.append(Step(name, error <= stage.limit, error, only))
        if error > stage.limit:
            found.fault = locate(stage)
            return


def _aligned(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The passes of two recipes side by side, by their names in order; None where one has no such pass."""
    found: list[tuple[Any, Any]] = []
    rest = list(b)
    for ours in a:
        names = [p.name for p in rest]
        if ours.name not in names:
            found.append((ours, None))
            continue
        place = names.index(ours.name)
        found += [(None, p) for p in rest[:place]]
        found.append((ours, rest[place]))
        rest = rest[place + 1 :]
    return found + [(None, p) for p in rest]


def _stage(name: str, ours: Program, theirs: Program, ids: torch.Tensor) -> Stage:
    weights = [load_weights(program, torch.float32) for program in (ours, theirs)]
    right = record(theirs, ids, weights[1])
    given: dict[str, Ranks] = {}
    returned: dict[str, Ranks] = {}
    for node in theirs.graph.nodes:
        if node.op == "call_module" and node.args:
            path = str(node.target)
            for side, key in ((given, node.args[0].name), (returned, node.name)):
                value = right.values.get(("", key))
                if value is not None and (side is returned or len(value) == 1):
                    side[path] = value
    logits = right.values[("", result_of(theirs).name)][0]
    expected = Expected(given, returned, {}, logits)
    return Stage(name, ours, theirs, weights[0], weights[1], ids, expected, RANKS)


def _checkpoints(a: Side, b: Side, found: Bisection, progress: ProgressCall) -> None:
    if too_large(a.traced, COPIES):
        found.notes.append("checkpoints were not run: their weights do not fit into memory")
        return
    ids = golden_tokens(a.traced)
    progress("running the checkpoints")
    seen = [
        run_checkpoint(side.root, ids, side.manifest is not None or side.program.source.remote_code) for side in (a, b)
    ]
    _compare("adapted checkpoint", a, seen[0], seen[1], found)


def _modules(a: Side, b: Side, found: Bisection, progress: ProgressCall) -> None:
    if a.manifest is None or b.manifest is None or too_large(a.traced, COPIES):
        return
    mesh, ranks = mesh_name(a.manifest.mesh), ranks_of(a.manifest.mesh)
    if mesh != mesh_name(b.manifest.mesh) or ranks > MOST_RANKS:
        found.notes.append("their sharded modules have different meshes: `rewrite bisect DIR` compares each with its "
                           "program")  # fmt: skip
        return
    if is_quantized(a.program) or is_quantized(b.program):
        found.notes.append("their sharded modules quantize sums and were not run")
        return
    progress("running the sharded modules")
    ids = golden_tokens(a.traced)
    _compare("sharded module", a, run_ranks(a.root, ids, ranks), run_ranks(b.root, ids, ranks), found)


def _compare(name: str, a: Side, ours: Seen, theirs: Seen, found: Bisection) -> None:
    error = difference(ours.logits, theirs.logits, partial=False)
    found.steps.append(Step(name, error <= REAL_WEIGHTS, error))
    if error <= REAL_WEIGHTS:
        return
    for factor in (1.0, 0.1, 0.01):
        if (fault := _parting(name, a.program, ours, theirs, REAL_WEIGHTS * factor)) is not None:
            found.fault = fault
            return
    found.fault = Fault(name, None, "", "", UNSEEN, error=error)


def _parting(name: str, program: Program, ours: Seen, theirs: Seen, limit: float) -> Fault | None:
    before = ""
    for path, side in itertools.product(ours.order, ("given", "returned")):
        actual, expected = getattr(ours, side).get(path), getattr(theirs, side).get(path)
        if actual is None or expected is None or actual[0].numel() != expected[0].numel():
            continue
        error = difference(actual, expected)
        if error <= limit:
            before = path
            continue
        how = relation(actual, expected, limit)
        how = f"; {how}" if how else ""
        layer = layer_of_path(program, path)
        if side == "returned":
            cause = f"{path} is given the same and gives something else{how}"
            return Fault(name, layer, path.rpartition(".")[2], path, cause, error=error)
        cause = f"what {path} is given differs{how}; up to {before or 'the embedding'} all is the same"
        return Fault(name, layer, f"what {path} is given", path, cause, error=error)
    return None
