"""Pass after pass: the first one after which a program computes something else than its reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError
from rewriter.explain.bisect.finding import Bisection, Fault, Step
from rewriter.explain.bisect.locate import comparable, locate, logits_error, only
from rewriter.explain.bisect.recording import record
from rewriter.explain.bisect.references import Expected, expected_values
from rewriter.explain.bisect.stage import Stage
from rewriter.ir import Program
from rewriter.passes.base import Pass, bound_ranks
from rewriter.passes.quantize_collectives import exact, is_quantized
from rewriter.recipes.apply import lint
from rewriter.verify.comparison import EXACT, RANKS
from rewriter.verify.reference_modes import reference_of
from rewriter.verify.simulate import load_weights

TRACING = "tracing"
EXACT_SUMS = "sums that travel quantized were compared as exact sums"


@dataclass(frozen=True)
class Material:
    """What a bisection runs: the unmodified eager model (fp32, eval mode), its trace, tokens [B, S] (int64).

    `kept` are the layers of the model that a shrunken copy has, in order; None for the model itself.
    """

    model: PreTrainedModel
    traced: Program
    ids: torch.Tensor
    on: str
    kept: tuple[int, ...] | None = None

    def weights(self, program: Program) -> Mapping[str, torch.Tensor]:
        """The full weights of a program, fp32."""
        return load_weights(program, torch.float32)

    @property
    def host(self) -> nn.Module:
        return self.model


def bisect_passes(
    material: Material,
    passes: Sequence[Pass],
    mesh: Mapping[str, int],
    found: Bisection,
    progress: Callable[..., None] = lambda *_: None,
) -> Program:
    """Apply `passes` one by one on `mesh` and compare the program after each with its independent reference.

    Adds a step for each to `found`, and the fault where they part; returns the last program that was made. The first
    step is the trace itself. An exact pass has to leave the original function, an approximating one what its reference
    computes. Raises RewriterError where a reference cannot be had.
    """
    progress("comparing the trace")
    original = expected_values(reference_of(material.traced, ()), material.model, material.ids)
    weights = material.weights(material.traced)
    stage = Stage(TRACING, material.traced, None, weights, weights, material.ids, original, EXACT, material.host)
    if not _holds(stage, found, material.kept):
        return material.traced
    shown = comparable(
        original, record(material.traced, material.ids, weights, material.host), material.traced, EXACT
    )  # fmt: skip
    axes = {axis: mesh[axis] for axis in ("sp", "tp") if mesh.get(axis, 1) > 1}
    program = material.traced.with_(mesh=axes, origin=material.traced) if axes else material.traced
    for number, rewrite in enumerate(passes, start=1):
        progress(f"comparing after {rewrite.name}", number, len(passes))
        try:
            made = rewrite.apply(program)
            lint(made, rewrite.name)
        except RewriterError as error:
            found.steps.append(Step(rewrite.name, held=False, note="cannot be applied"))
            found.fault = Fault(rewrite.name, None, "", "", f"it cannot be applied: {error}")
            return program
        stage = _stage(material, rewrite, passes[:number], program, made, shown, stage)
        if is_quantized(made) and EXACT_SUMS not in found.notes:
            found.notes.append(EXACT_SUMS)
        program = made
        if not _holds(stage, found, material.kept):
            break
    return program


def _stage(
    material: Material,
    rewrite: Pass,
    passes: Sequence[Pass],
    before: Program,
    made: Program,
    shown: Expected,
    last: Stage,
) -> Stage:
    reference = reference_of(made, passes)
    expected = expected_values(reference, material.model, material.ids)
    limit = EXACT if not made.mesh and bound_ranks(made) is None else RANKS
    return replace(
        last,
        name=rewrite.name,
        program=exact(made),
        before=exact(before),
        weights=material.weights(made),
        weights_before=last.weights,
        expected=only(expected, shown),
        limit=limit,
    )


def _holds(stage: Stage, found: Bisection, kept: Sequence[int] | None) -> bool:
    """Whether a stage computes the logits that it should; adds the step, and the fault where it does not."""
    error = logits_error(stage)
    held = error <= stage.limit
    found.steps.append(Step(stage.name, held, error))
    if not held:
        found.fault = _of_the_model(locate(stage), kept)
        if kept is not None:
            found.notes.append(
                f"nodes are named as in the copy, whose layers are {', '.join(map(str, kept))} of the model"
            )
    return held


def _of_the_model(fault: Fault, kept: Sequence[int] | None) -> Fault:
    """A fault of a shrunken copy, with the layer of the model that it stands for."""
    if kept is None or fault.layer is None or list(kept) == list(range(len(kept))):
        return fault
    layer = kept[fault.layer]
    module = re.sub(rf"\.{fault.layer}(?=\.|$)", f".{layer}", fault.module, count=1)
    operator = fault.operator.replace(fault.module, module) if fault.module else fault.operator
    return replace(fault, layer=layer, module=module, operator=operator)
