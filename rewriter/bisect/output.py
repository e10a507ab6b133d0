"""`rewrite bisect DIR`: where an output stops computing what its recipe says: files, passes, what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rewriter.bisect.files import changed_files, compare_tensors, compare_text, suspicious_tensor
from rewriter.bisect.finding import Bisection, Fault, Step
from rewriter.bisect.locate import result_of
from rewriter.bisect.passes import EXACT_SUMS, bisect_passes
from rewriter.bisect.recipe import COPIES, Weights, real_material, shrunken_material
from rewriter.bisect.recording import record
from rewriter.bisect.values import Ranks
from rewriter.bisect.written import compare_written, run_checkpoint, run_ranks
from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of
from rewriter.common.scratch import scratch_folder
from rewriter.convert.reopened import Reopened, find_source, reopen
from rewriter.ir import Program
from rewriter.output.manifest import Manifest, read_manifest
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import exact, is_quantized
from rewriter.verify.comparison import REAL_WEIGHTS
from rewriter.verify.drift import golden_tokens, too_large
from rewriter.verify.saved_output import check_weights
from rewriter.verify.shrunken_check import MOST_RANKS
from rewriter.verify.simulate import load_weights
from rewriter.weights import Checkpoint

ProgressCall = Callable[..., None]


def bisect_output(
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    weights: Weights = "real",
    trust_remote_code: bool = False,
    progress: ProgressCall = lambda *_: None,
) -> Bisection:
    """The first place at which an output parts from what its recipe makes of its source.

    In this order, up to the first that differs: files whose hash is not the manifest's, tensor by tensor and line by
    line; every pass, applied again; all tensors; the adapted checkpoint and the sharded module, module by module, on as
    many processes as the manifest names. Generated files whose hash differs are read and never run. `source` is the
    model that was rewritten, found by its name otherwise; without it weights can only be compared with each other.
    Raises RewriterError for bad input, VerificationError for weights that are not finite: with them nothing parts.
    """
    root = Path(directory)
    manifest = read_manifest(root)
    found = Bisection(f"{name_of(root)}, {manifest.recipe.get('name', 'passes')} on {mesh_name(manifest.mesh)}")
    progress("hashing")
    changed = changed_files(root, manifest)
    found.steps.append(Step("files", not changed, note=", ".join(changed[:3])))
    original = find_source(root, manifest, source)
    if original is None:
        found.notes.append(f"its source, {manifest.source.name}, is not here (--source DIR): weights were compared "
                           "with nothing")  # fmt: skip
    with scratch_folder("bisect") as scratch:
        progress("tracing")
        opened = reopen(root, manifest, original, scratch, trust_remote_code)
        _files(opened, changed, found)
        if found.fault is None:
            check_weights(root, manifest)
            _passes(opened, weights, scratch, found, progress)
        if found.fault is None and original is not None and manifest.adaptation is None:
            progress("comparing tensors")
            found.fault = compare_tensors(opened)
            found.steps.append(Step("weights", found.fault is None))
        if found.fault is None and not any(name.endswith(".py") for name in changed):
            _written(opened, found, progress)
    return found


def _files(opened: Reopened, changed: list[str], found: Bisection) -> None:
    """What is wrong in files that are not as they were written."""
    manifest: Manifest = opened.manifest
    if any(name.endswith((".safetensors", ".tensors")) and not name.startswith("verification/") for name in changed):
        compared = opened.source is not None and manifest.adaptation is None
        checkpoint = Checkpoint.open(opened.root)
        found.fault = compare_tensors(opened) if compared else suspicious_tensor(opened.origin, checkpoint)
        found.steps.append(Step("weights", found.fault is None, note="" if compared else "compared with their like"))
        if found.fault is not None:
            return
    texts = dict(opened.planned().texts) if set(changed) & _generated(manifest) else {}
    for name in changed:
        if name not in _generated(manifest):
            continue
        fault = compare_text(opened, name, texts.get(name, ""))
        found.steps.append(Step(name, fault is None))
        if fault is not None:
            found.fault = _where_it_shows(opened, fault, found) if name == "config.json" else fault
            return


def _where_it_shows(opened: Reopened, fault: Fault, found: Bisection) -> Fault:
    """A changed value of the config, with the first module that computes something else by it, if it can be run."""
    if any(name.endswith(".py") for name in found.steps[0].note.split(", ")) or too_large(opened.origin, COPIES):
        return fault
    tried = Bisection("")
    try:
        _checkpoint(opened, tried)
    except RewriterError as error:
        return replace(fault, cause=f"{fault.cause}. {error}")
    if tried.fault is None:
        return replace(fault, cause=f"{fault.cause}. The logits are the same")
    cause = f"{fault.cause}; it shows first there, where {tried.fault.cause}"
    return replace(tried.fault, cause=cause, actual=fault.actual, expected=fault.expected)


def _generated(manifest: Manifest) -> set[str]:
    names = {"config.json", *([manifest.adapted.modeling] if manifest.adapted.modeling else [])}
    for entry in manifest.runtime.values():
        names |= {entry.module, *([entry.weights] if entry.weights else [])}
    return names


def _passes(opened: Reopened, weights: Weights, scratch: Path, found: Bisection, progress: ProgressCall) -> None:
    """The recipe's passes, one by one."""
    passes = list(opened.program.asked or ())
    if weights == "real" and too_large(opened.origin, COPIES):
        found.notes.append("its weights do not fit into memory: passes were compared on a shrunken copy")
        weights = "shrunken"
    try:
        if weights == "real":
            material = real_material(opened.origin)
        else:
            material, passes = shrunken_material(opened.origin, passes, opened.manifest.mesh, scratch, progress)
        bisect_passes(material, passes, opened.manifest.mesh, found, progress)
        found.on = material.on
        found.notes.insert(0, f"on {found.on}")
    except RewriterError as error:
        found.notes.append(f"passes were not compared: {error}")


@torch.no_grad()
def _written(opened: Reopened, found: Bisection, progress: ProgressCall) -> None:
    """The files that were written, run as their users run them."""
    program, root = opened.program, opened.root
    if too_large(opened.origin, COPIES):
        found.notes.append("what was written was not run: its weights do not fit into memory")
        return
    progress("running the adapted checkpoint")
    logits = _checkpoint(opened, found)
    ranks = ranks_of(opened.manifest.mesh)
    if found.fault is not None:
        _with_line(opened, found, opened.manifest.adapted.modeling)
    if found.fault is not None or not opened.manifest.runtime or ranks > MOST_RANKS:
        return
    progress("running the sharded module")
    if is_quantized(program):
        found.notes.append(f"{EXACT_SUMS}; the sharded module, which quantizes them, was not run")
        return
    ids = golden_tokens(program)
    right = record(exact(program), ids, _weights(opened, program))
    seen = run_ranks(root, ids, ranks)
    if not compare_written("sharded module", seen, program, right, logits, REAL_WEIGHTS, found):
        _with_line(opened, found, opened.manifest.runtime[mesh_name(opened.manifest.mesh)].module)


def _checkpoint(opened: Reopened, found: Bisection) -> Ranks:
    """Compare the adapted checkpoint with the program on one device; returns the program's logits."""
    ids, single = golden_tokens(opened.program), single_device(opened.program)
    right = record(single, ids, _weights(opened, single))
    logits = right.values[("", result_of(single).name)]
    compare_written("adapted checkpoint", run_checkpoint(opened.root, ids), single, right, logits, REAL_WEIGHTS, found)
    return logits


def _weights(opened: Reopened, program: Program) -> Mapping[str, torch.Tensor]:
    """The weights of a form of the output's program, fp32, with the precision in which the output holds them."""
    job: Mapping[str, Any] = opened.manifest.job or {}
    own = opened.source is None or opened.manifest.adaptation is not None
    if own or not (job.get("dtype") or job.get("dequantize")):
        return load_weights(program, torch.float32)
    layout = opened.planned()
    expressions = {name: parameter.expression for name, parameter in program.parameters.items()}
    return {name: layout.held(e) for name, e in expressions.items() if e is not None}


def _with_line(opened: Reopened, found: Bisection, name: str | None) -> None:
    """Add to the fault the line of the file that is not as it would be generated now."""
    line = None if name is None else compare_text(opened, name, opened.planned().texts.get(name, ""))
    if line is not None and found.fault is not None:
        cause = f"{found.fault.cause}. Not as it is generated now: {line.cause}"
        found.fault = replace(
            found.fault, cause=cause, operator=line.operator, actual=line.actual, expected=line.expected
        )
