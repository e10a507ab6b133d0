"""`rewrite bisect MODEL --recipe NAME`: the first pass after which a program differs from its independent reference."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rewriter.check.comparison import RANKS, exact_limit, relative_error
from rewriter.check.drift import golden_tokens, too_large
from rewriter.check.padded_model import padded_model, real_tokens
from rewriter.check.random_model import random_ids
from rewriter.check.reference_modes import original_logits, reference_of
from rewriter.check.shrunken_check import apply_passes, on_ranks, telling_copy, test_lengths
from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of, scratch_folder
from rewriter.common.run_context import ProgressCall, RunContext, silent
from rewriter.convert.pass_measurements import calibrate
from rewriter.explain.bisect.finding import Bisection, Fault, Step
from rewriter.explain.bisect.locate import Stage, locate
from rewriter.explain.bisect.recording import expected_values
from rewriter.explain.bisect.values import LOGITS, Values, difference
from rewriter.ir import Program
from rewriter.ir.marks import marks
from rewriter.ir.simulate import load_weights
from rewriter.passes.base import Pass, bound_ranks
from rewriter.passes.phases import both_wirings, with_short_ends
from rewriter.passes.quantize_collectives import exact, is_quantized
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.recipes import Recipe
from rewriter.recipes.apply import check_bound, lint, load_recipe
from rewriter.tracing import trace
from rewriter.tracing.meta_model import load_config
from rewriter.tracing.shrink import depth, representatives, shrink
from rewriter.weights.finite import require_finite
from rewriter.weights.plain_model import plain_model

Weights = Literal["shrunken", "real"]
EXACT_SUMS = "sums that travel quantized were compared as exact sums"
COPIES = 5  # of the weights in fp32: the model, the programs before and after a pass, what ranks hold of them
_TOKENS = 21


@dataclass(frozen=True)
class Material:
    """A model to bisect on: unmodified and eager (fp32, eval mode), its trace, tokens [B, S] (int64).

    `kept` are the layers of the model that a shrunken copy has, in order; None for the model itself.
    """

    model: PreTrainedModel
    traced: Program
    ids: torch.Tensor
    on: str
    kept: tuple[int, ...] | None = None


def bisect_recipe(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    *,
    tp: int = 1,
    sp: int = 1,
    weights: Weights = "shrunken",
    set: Mapping[str, Any] | None = None,
    context: RunContext = RunContext(),
) -> Bisection:
    """The first pass of `recipe`, and in it the layer and statement, after which `model` computes something wrong.

    `weights`: of a shrunken copy with large random ones (the default), or the model's own, which have to fit into
    memory five times in fp32. Raises RewriterError for bad input, and where there is no independent reference.
    """
    loaded = load_recipe(recipe, set)
    check_bound(loaded, loaded.build(), tp, sp)
    mesh = {"tp": tp, **({"sp": sp} if sp > 1 else {})}
    progress = context.progress
    progress("tracing")
    traced = trace(model, trust_remote_code=context.trust_remote_code)
    asked = calibrate(loaded, traced, tp, None, progress).build()
    report = Bisection(f"{name_of(model)}, {loaded.name} on {on_ranks(mesh)}")
    with scratch_folder("bisect") as scratch:
        material, passes = material_of(weights, traced, asked, mesh, scratch, progress)
        bisect_passes(material, passes, mesh, report, progress)
    return report


def real_material(traced: Program) -> Material:
    """The model of the checkpoint that was traced. Raises RewriterError where it does not fit into memory."""
    source = traced.source
    assert source.path is not None
    if reason := too_large(traced, COPIES):
        raise RewriterError(f"{source.path}: {reason}. Use --weights shrunken")
    model = padded_model(traced) if source.padded else plain_model(source.path, source.remote_code)[0]
    require_finite(model.named_parameters(), source.path)
    return Material(model, traced, golden_tokens(traced), "the real weights")


def material_of(
    weights: Weights, traced: Program, passes: Sequence[Pass], mesh: Mapping[str, int], scratch: Path,
    progress: ProgressCall,
) -> tuple[Material, Sequence[Pass]]:  # fmt: skip
    """The real weights of a traced model, or a shrunken copy of it in `scratch`, with the passes for it."""
    if weights == "real":
        return real_material(traced), passes
    source = traced.source
    assert source.path is not None
    config = load_config(source.path, source.remote_code)
    count = depth(config)
    plan = sequence_plan(apply_passes(traced, passes, mesh)) if mesh.get("sp", 1) > 1 else None
    kept = representatives(config, [kind for p in passes for kind in p.kinds_of_layers(count)])
    mapped = [with_short_ends(small) for p in passes for small in p.shrunken(kept, count, plan)]
    small = shrink(config, kept, mesh["tp"], exchanged=1 if plan is None else plan.grid[0])
    model, copy, _ = telling_copy(small, mapped, mesh, scratch / "model", source.remote_code, progress)
    ids = random_ids(small, min(_TOKENS, test_lengths(small)[-1]))
    layers = f"layers {', '.join(map(str, kept))} of {count}" if len(kept) < count else f"all {count} layers"
    return Material(model, copy, ids, f"a shrunken copy: {layers}, random weights", tuple(kept)), mapped


def bisect_passes(
    material: Material,
    passes: Sequence[Pass],
    mesh: Mapping[str, int],
    report: Bisection,
    progress: ProgressCall = silent,
) -> None:
    """Apply `passes` one by one on `mesh` and compare the program after each with its independent reference.

    Adds a step for each to `report`, and the fault where they part. The first step is the trace itself. An exact pass
    has to leave the original function, an approximating one what its reference computes. Raises RewriterError where a
    reference cannot be had.
    """
    progress("comparing the trace")
    report.on = material.on
    report.notes.append(f"on {report.on}")
    model, traced, ids = material.model, material.traced, material.ids
    weights = load_weights(traced, torch.float32)
    original = expected_values(reference_of(traced, ()), model, ids)
    limit = exact_limit(traced)
    stage = Stage("tracing", traced, None, weights, weights, ids, original, limit, model)
    right = _compared(stage, report, material.kept)
    comparable = {p for p in right if p in original and difference(right[p], original[p]) <= limit}
    program = apply_passes(traced, (), mesh)
    for number, rewrite in enumerate(passes, start=1):
        if report.fault is not None:
            return
        progress(f"comparing after {rewrite.name}", number, len(passes))
        try:
            made = rewrite.apply(program)
            lint(made, rewrite.name)
        except RewriterError as error:
            report.steps.append(Step(rewrite.name, held=False, note="cannot be applied"))
            report.fault = Fault(rewrite.name, cause=f"it cannot be applied: {error}")
            return
        if made.source.padded and not program.source.padded:
            wanted, padded = original_logits(model, ids), padded_model(made)
            off = relative_error(real_tokens(original_logits(padded, ids), wanted), wanted)
            if off > limit:
                report.steps.append(Step(rewrite.name, held=False, error=off))
                report.fault = Fault(rewrite.name, cause="padded sizes do not compute what the model does", error=off)
                return
            model = padded  # what all that follows has to compute
        expected = expected_values(reference_of(made, passes[:number]), model, ids)
        # the stream's values, where the program has as many as the reference
        count = sum(side == "stream" for side, _ in expected)
        sides = {"logits", "stream"} if any(marks(n).stream == count - 1 for n in made.graph.nodes) else {"logits"}
        stage = replace(
            stage,
            name=rewrite.name,
            program=exact(both_wirings(made)),
            before=exact(both_wirings(program)),
            weights=load_weights(made, torch.float32),
            weights_before=stage.weights,
            host=model,
            expected={p: v for p, v in expected.items() if p in comparable or p[0] in sides},
            limit=limit if not made.mesh and bound_ranks(made) is None else RANKS,
        )
        if is_quantized(made) and EXACT_SUMS not in report.notes:
            report.notes.append(EXACT_SUMS)
        program = made
        _compared(stage, report, material.kept)


def _compared(stage: Stage, report: Bisection, kept: Sequence[int] | None) -> Values:
    """The values of a stage; adds the step to the report, and the fault where the logits are wrong. Layers of a
    shrunken copy, which has those `kept` of the model, are named as they are in the model."""
    rec = stage.record()
    values = rec.shown()
    logits = values.get(LOGITS)
    error = float("inf") if logits is None else difference(logits, stage.expected[LOGITS], partial=False)
    report.steps.append(Step(stage.name, error <= stage.limit, error))
    if error <= stage.limit:
        return values
    report.fault = fault = locate(stage, rec)
    if kept is not None:
        layers = ", ".join(map(str, kept))
        report.notes.append(f"statements are those of the copy, whose layers are {layers} of the model")
        if fault.layer is not None:
            layer = kept[fault.layer]
            module = re.sub(rf"\.{fault.layer}(?=\.|$)", f".{layer}", fault.module, count=1)
            report.fault = replace(fault, layer=layer, module=module)
    return values
