"""`rewrite bisect DIR`: the place where an output parts from its recipe: in files, in passes, in what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rewriter.check.comparison import REAL_WEIGHTS
from rewriter.check.saved_output import check_weights
from rewriter.check.shrunken_check import MOST_RANKS
from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of, scratch_folder
from rewriter.convert.reopened import Reopened, find_source, reopen
from rewriter.emit.files.output_directory import sha256_of
from rewriter.explain.bisect.files import WEIGHTS, compare_text, compare_weights, generated_files, not_finite
from rewriter.explain.bisect.finding import Bisection, Fault, Step
from rewriter.explain.bisect.locate import layer_of_path
from rewriter.explain.bisect.passes import COPIES, EXACT_SUMS, Weights, bisect_on
from rewriter.explain.bisect.recording import record
from rewriter.explain.bisect.values import LOGITS, Values, difference, first_parting
from rewriter.explain.bisect.watching import run_output
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.measure.drift import golden_tokens, too_large
from rewriter.output.manifest import read_manifest
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import exact, is_quantized


def bisect_output(
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    weights: Weights = "real",
    trust_remote_code: bool = False,
    progress: Callable[..., None] = lambda *_: None,
) -> Bisection:
    """The first place at which an output parts from what its recipe makes of its source.

    In this order, up to the first that differs: files whose hash is not the manifest's, tensor by tensor and line by
    line; every pass, applied again; all tensors; the adapted checkpoint and the sharded module, module by module, on as
    many processes as the manifest names. Generated files whose hash differs are read and never run. `source` is the
    model that was rewritten, found by its name otherwise; without it weights are compared with nothing. Raises
    RewriterError for bad input, VerificationError for weights that are not finite: with them nothing parts.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    found = Bisection(f"{name_of(root)}, {manifest.recipe.get('name', 'passes')} on {mesh_name(manifest.mesh)}")
    progress("hashing")
    changed = [n for n, sha in manifest.files.items() if not (root / n).is_file() or sha256_of(root / n) != sha]
    found.steps.append(Step("files", not changed, note=", ".join(changed[:3])))
    original = find_source(root, manifest, source)
    if original is None:
        found.notes.append(f"its source, {manifest.source.name}, is not here (--source DIR): weights were compared "
                           "with nothing")  # fmt: skip
    compared = original is not None and manifest.adaptation is None
    with scratch_folder("bisect") as scratch:
        progress("tracing")
        opened = reopen(root, manifest, original, scratch, trust_remote_code)
        _files(opened, changed, compared, found)
        if found.fault is None:
            check_weights(root, manifest)
            _passes(opened, weights, scratch, found, progress)
        if found.fault is None and compared:
            progress("comparing tensors")
            found.fault = compare_weights(opened)
            found.steps.append(Step(WEIGHTS, found.fault is None))
        if found.fault is None and not any(name.endswith(".py") for name in changed):
            _written(opened, found, progress)
    return found


def _files(opened: Reopened, changed: list[str], compared: bool, found: Bisection) -> None:
    """The first fault in files that are not as they were written."""
    if any(name.endswith((".safetensors", ".tensors")) and not name.startswith("verification/") for name in changed):
        found.fault = compare_weights(opened) if compared else not_finite(opened)
        found.steps.append(Step(WEIGHTS, found.fault is None, note="" if compared else "compared with nothing"))
    for name in changed:
        if found.fault is None and name in generated_files(opened.manifest):
            found.fault = compare_text(opened, name)
            found.steps.append(Step(name, found.fault is None))
            code = any(other.endswith(".py") for other in changed)
            if found.fault is not None and name == "config.json" and not code:
                found.fault = _where_it_shows(opened, found.fault)


def _where_it_shows(opened: Reopened, fault: Fault) -> Fault:
    """A changed value of the config, at the first module that computes something else by it, if it can be run."""
    if too_large(opened.origin, COPIES):
        return fault
    tried = Bisection("")
    try:
        _checkpoint(opened, tried)
    except RewriterError as error:
        return replace(fault, cause=f"{fault.cause}; {error}")
    shown = tried.fault or Fault(fault.stage, cause="the logits are the same")
    cause = f"{fault.cause}; {shown.cause}"
    return replace(shown, statement=fault.statement, cause=cause, difference=fault.difference)


def _passes(opened: Reopened, weights: Weights, scratch: Path, found: Bisection, progress: Callable[..., None]) -> None:
    """The recipe's passes, one by one."""
    if weights == "real" and too_large(opened.origin, COPIES):
        found.notes.append("its weights do not fit into memory: passes were compared on a shrunken copy")
        weights = "shrunken"
    try:
        passes = list(opened.program.asked or ())
        bisect_on(weights, opened.origin, passes, opened.manifest.mesh, scratch, found, progress)
    except RewriterError as error:
        found.notes.append(f"passes were not compared: {error}")


def _written(opened: Reopened, found: Bisection, progress: Callable[..., None]) -> None:
    """The files that were written, run as their users run them."""
    program, manifest, ids = opened.program, opened.manifest, golden_tokens(opened.program)
    if too_large(opened.origin, COPIES):
        found.notes.append("what was written was not run: its weights do not fit into memory")
        return
    progress("running the adapted checkpoint")
    logits = _checkpoint(opened, found)
    ranks = ranks_of(manifest.mesh)
    if found.fault is not None or not manifest.runtime or ranks > MOST_RANKS:
        return
    if is_quantized(program):
        found.notes.append(f"{EXACT_SUMS}; the sharded module, which quantizes them, was not run")
        return
    progress("running the sharded module")
    right = {**_values(opened, exact(program)), LOGITS: logits}
    module = manifest.runtime[mesh_name(manifest.mesh)].module
    _compare("sharded module", module, run_output(opened.root, ids, ranks), right, opened, found)


def _checkpoint(opened: Reopened, found: Bisection) -> tuple[Any, ...]:
    """Compare the adapted checkpoint with the program on one device; returns the program's logits."""
    right = _values(opened, single_device(opened.program))
    ours = run_output(opened.root, golden_tokens(opened.program))
    _compare("adapted checkpoint", opened.manifest.adapted.modeling, ours, right, opened, found)
    return right[LOGITS]


def _values(opened: Reopened, program: Program) -> Values:
    """Values of a form of the output's program, in fp32, from weights as precise as the output holds them."""
    job: Mapping[str, Any] = opened.manifest.job or {}
    own = opened.source is None or opened.manifest.adaptation is not None
    if own or not (job.get("dtype") or job.get("dequantize")):
        weights = load_weights(program, torch.float32)
    else:
        layout = opened.planned()
        expressions = {name: parameter.expression for name, parameter in program.parameters.items()}
        weights = {name: layout.held(e) for name, e in expressions.items() if e is not None}
    return record(program, golden_tokens(opened.program), weights).shown(nested=True)


def _compare(name: str, file: str | None, ours: Values, theirs: Values, opened: Reopened, found: Bisection) -> None:
    """Compare the values of a run with those of the program it was written from, up to the first module that differs.

    Adds a step, and the fault, with the line of `file` that is not as it would be generated now.
    """
    error = difference(ours[LOGITS], theirs[LOGITS], partial=False)
    found.steps.append(Step(name, error <= REAL_WEIGHTS, error))
    if error <= REAL_WEIGHTS:
        return
    (side, path), error = first_parting(ours, theirs, REAL_WEIGHTS) or (LOGITS, error)
    cause = {"given": "it is given something else", "returned": "it returns something else"}.get(side, "")
    line = None if file is None else compare_text(opened, file)
    found.fault = Fault(
        name, layer_of_path(opened.program, path), path, "" if line is None else line.statement,
        cause if line is None else f"{cause}; {line.cause}", () if line is None else line.difference, error,
    )  # fmt: skip
