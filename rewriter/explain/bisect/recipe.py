"""`rewrite bisect MODEL --recipe NAME`: which pass of a recipe goes wrong, on a shrunken copy or the real weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rewriter.analysis.sequence_layout import sequence_plan
from rewriter.common.errors import RewriterError
from rewriter.common.files import name_of
from rewriter.common.scratch import scratch_folder
from rewriter.convert.pass_measurements import calibrate
from rewriter.explain.bisect.finding import Bisection
from rewriter.explain.bisect.passes import Material, bisect_passes
from rewriter.ir import Program
from rewriter.passes.base import Pass
from rewriter.recipes import Recipe
from rewriter.recipes.apply import check_bound, load_recipe
from rewriter.tracing import trace
from rewriter.tracing.meta_model import load_config
from rewriter.tracing.shrink import depth, representatives, shrink
from rewriter.verify.drift import golden_tokens, too_large
from rewriter.verify.plain_model import plain_model
from rewriter.verify.random_model import random_ids
from rewriter.verify.shrunken_check import on_ranks, telling_copy, test_lengths
from rewriter.weights.finite import require_finite

Weights = Literal["shrunken", "real"]
_TOKENS = 21
COPIES = 5  # of the weights in fp32: the model, the programs before and after a pass, what ranks hold of them


def bisect_recipe(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    *,
    tp: int = 1,
    sp: int = 1,
    weights: Weights = "shrunken",
    set: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[..., None] = lambda *_: None,
) -> Bisection:
    """The first pass of `recipe`, and in it the layer and operator, after which `model` computes something wrong.

    `weights`: of a shrunken copy with large random ones (the default), or the model's own, which have to fit into
    memory five times in fp32. Raises RewriterError for bad input, and where there is no independent reference.
    """
    loaded = load_recipe(recipe, set)
    check_bound(loaded, loaded.build(), tp, sp)
    mesh = {"tp": tp, **({"sp": sp} if sp > 1 else {})}
    progress("tracing")
    traced = trace(model, trust_remote_code=trust_remote_code)
    passes = calibrate(loaded, traced, tp, None, progress).build()
    found = Bisection(f"{name_of(model)}, {loaded.name} on {on_ranks(mesh)}")
    with scratch_folder("bisect") as scratch:
        if weights == "real":
            material = real_material(traced)
        else:
            material, passes = shrunken_material(traced, passes, mesh, scratch, progress)
        found.on = material.on
        bisect_passes(material, passes, mesh, found, progress)
    found.notes.insert(0, f"on {found.on}")
    return found


def real_material(traced: Program) -> Material:
    """The model of the checkpoint that was traced. Raises RewriterError where it does not fit into memory."""
    source = traced.source
    assert source.path is not None
    if reason := too_large(traced, COPIES):
        raise RewriterError(f"{source.path}: {reason}. Use --weights shrunken")
    model, _ = plain_model(source.path, source.remote_code)
    require_finite(model.named_parameters(), source.path)
    return Material(model, traced, golden_tokens(traced), "the real weights")


def shrunken_material(
    traced: Program,
    passes: Sequence[Pass],
    mesh: Mapping[str, int],
    scratch: Path,
    progress: Callable[..., None] = lambda *_: None,
) -> tuple[Material, list[Pass]]:
    """A shrunken copy of a traced model in `scratch`, and what the passes become on it."""
    source = traced.source
    assert source.path is not None
    config = load_config(source.path, source.remote_code)
    count = depth(config)
    plan = _plan(traced, passes, mesh)
    kept = representatives(config, [kind for p in passes for kind in p.kinds_of_layers(count)])
    mapped = [small for p in passes for small in p.shrunken(kept, count, plan)]
    small = shrink(config, kept, mesh["tp"], exchanged=1 if plan is None else plan.grid[0])
    model, copy, _ = telling_copy(small, mapped, mesh, scratch / "model", source.remote_code, progress)
    length = min(_TOKENS, test_lengths(small)[-1])
    layers = f"layers {', '.join(map(str, kept))} of {count}" if len(kept) < count else f"all {count} layers"
    return Material(
        model, copy, random_ids(small, length), f"a shrunken copy: {layers}, random weights", tuple(kept)
    ), mapped


def _plan(traced: Program, passes: Sequence[Pass], mesh: Mapping[str, int]) -> Any:
    if mesh.get("sp", 1) == 1:
        return None
    program = traced.with_(mesh={axis: n for axis, n in mesh.items() if n > 1}, origin=traced)
    for rewrite in passes:
        program = rewrite.apply(program)
    return sequence_plan(program)
