"""Models, recipes and a fabric → comparisons: what `rewriter.api.predict`, `measure` and `validate` do."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import context_length, declared_dtype, quantization_settings
from rewriter.fabric import load_fabric
from rewriter.ir import Program
from rewriter.ir.communication import model_dtype
from rewriter.predict.analytic import Predictor, with_front
from rewriter.predict.candidates import Candidates, distinct
from rewriter.predict.exact import ExactChoices, best_exact, comparable
from rewriter.predict.results import PredictedPoint, Prediction, RecipeComparison
from rewriter.predict.validation import Validation
from rewriter.predict.weight_formats import stored_weights
from rewriter.predict.workload import Cluster, Draft, WeightFormat, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace, trace_skeleton
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.weights.checkpoint import INDEX, SINGLE

_Path = str | os.PathLike[str]
BOUND = "upper-bound"  # no communication at all
DEGREES, BATCHES = (1, 2, 4, 8), (1, 4, 16, 64)


def compare(
    model: Any,
    recipes: Sequence[str | os.PathLike[str] | Recipe],
    workload: Workload,
    cluster: Cluster,
    *,
    pareto: bool = False,
    exact: bool = False,
    engine: str = "vllm",
    draft: Draft | None = None,
    set: Mapping[str, Any] | None = None,
    context: RunContext = RunContext(),
) -> RecipeComparison:
    """See `rewriter.api.predict`."""
    began = time.process_time()
    if not recipes:
        raise RewriterError("predict: no recipe is named. Give at least one: --recipe tensor-parallel")
    predictor = Predictor(workload, cluster)
    loaded = distinct([load_recipe(recipe, set) for recipe in recipes])
    name, program = _traced(model, context.trust_remote_code)
    candidates = Candidates(program, workload.sp)
    choices = ExactChoices(predictor, candidates, engine, draft) if exact else None
    if choices is not None:  # recipes run with the sums that the engine has
        predictor = Predictor(workload, replace(cluster, library=choices.usable(choices.available)), predictor.runner)
    asked_for, skipped = candidates.of(loaded, workload.tp)
    said = about_model(program, workload.prompt + workload.generate, workload.weights)
    done = predictor.compare(name, [replace(c, notes=(*said, *c.notes)) for c in asked_for], skipped)
    if choices is not None:
        done = _over_exact(done, choices)
    points: dict[str, tuple[PredictedPoint, ...]] = {}
    if pareto:
        by_name = {recipe.name: recipe for recipe in loaded}
        points = {p.recipe: _points(predictor, candidates, by_name[p.recipe]) for p in done.predictions}
    return replace(done, pareto=points, seconds=time.process_time() - began)


def _over_exact(done: RecipeComparison, exact: ExactChoices) -> RecipeComparison:
    """The comparison with what the model does as it is, and its speedups over the best of that."""
    choices, predictor = exact.all(), exact.predictor
    best, known = best_exact(choices), comparable(choices)
    step, prefill = (min(known, key=lambda one: getattr(one, f"{kind}_seconds")) for kind in ("decode", "prefill"))

    def over(p: Prediction) -> Prediction:
        end_to_end, (low, high) = p.tokens_per_second / best.tokens_per_second, p.end_to_end_interval or (0.0, 0.0)
        ratio, alike = end_to_end / p.end_to_end, best.tp == predictor.workload.tp
        return replace(
            p, decode_speedup=step.decode_seconds / p.decode.seconds,
            prefill_speedup=prefill.prefill_seconds / p.prefill.seconds, end_to_end=end_to_end,
            # its terms are off as those of the first recipe, which communicates like a choice on as many ranks
            end_to_end_interval=(low * ratio, high * ratio) if alike and low < high else None,
        )  # fmt: skip

    bound = None
    with suppress(RewriterError):  # on one rank nothing is communicated
        program = exact.candidates.one(load_recipe(BOUND), predictor.workload.tp)
        (bound,) = predictor.compare("", [program]).predictions
        bound = replace(over(bound), break_even_note=None, break_even_prefill_note=None)
    return replace(
        done, exact=tuple(choices), engine=exact.engine, over=best.name, over_decode=step.name, bound=bound,
        over_prefill=prefill.name, predictions=tuple(map(over, done.predictions)),
    )  # fmt: skip


def about_model(program: Program, length: int, weights: WeightFormat | None = None) -> tuple[str, ...]:
    """Notes on what its config leaves open, or asks for and is not simulated. `length`: tokens of a whole sequence;
    `weights`: as in `Workload`."""
    config, said = program.source.config, []
    if declared_dtype(config) is None:
        said.append("The config names no dtype: float32 is assumed for weights, cache and messages.")
    dtype = str(model_dtype(program)).removeprefix("torch.")
    stored = stored_weights(weights, settings := quantization_settings(config))
    if stored is not None:
        said.append(f"Weights of layers: {stored.name}, {stored.bits:g} bits each; embeddings and head {dtype}.")
    elif settings:
        said.append(f"The config's quantization of weights is not known: they count as {dtype}. See --weights.")
    if length > (most := context_length(config)):
        said.append(f"{length:,} tokens are more than the {most:,} positions that the config says the model has.")
    return tuple(said)


def _traced(model: Any, trust_remote_code: bool) -> tuple[str, Program]:
    """(what the model is called, its program as traced)."""
    if isinstance(model, Program):
        if model.history:
            raise RewriterError(f"{model!r} is rewritten already: start from the program as traced")
        return model.source.path or model.source.model_type, model
    config = load_config(model, trust_remote_code)
    program = trace_skeleton(build_skeleton(config, trust_remote_code), remote_code=trust_remote_code)
    return str(model) if isinstance(model, (str, os.PathLike)) else program.source.model_type, program


def _points(predictor: Predictor, candidates: Candidates, recipe: Recipe) -> tuple[PredictedPoint, ...]:
    """Points of a recipe over numbers of ranks and batches, those asked for among them; on as few nodes as it takes.

    There are none where the recipe cannot be applied (bound to several ranks, heads that do not divide), or where the
    fabric cannot hold the ranks."""
    load, points = predictor.workload, []
    anywhere = replace(predictor, workload=replace(load, nodes=None))
    for degree in sorted({*DEGREES, load.tp}):
        with suppress(RewriterError):
            program = candidates.one(recipe, degree).program
            points += [anywhere.point(program, batch) for batch in sorted({*BATCHES, load.batch})]
    return with_front(points)


def measure(
    model: _Path,
    recipes: Sequence[str],
    workload: Workload,
    cluster: Cluster,
    *,
    wire: bool = False,
    context: RunContext = RunContext(),
) -> RecipeComparison:
    """See `rewriter.api.measure`."""
    fewest, nodes = -(-workload.tp // load_fabric(cluster.fabric).node), workload.nodes
    if nodes is not None and nodes != fewest:
        raise RewriterError(
            f"--nodes {nodes}: with --measure, {workload.tp} ranks fill their nodes one by one, {fewest} of "
            f"{cluster.fabric}. Leave out --nodes, or --measure"
        )
    program = traced(model, context.trust_remote_code)
    predicted = compare(program, recipes, workload, cluster)
    from rewriter.predict import measurement  # starts what only real ranks need

    measured = measurement.measure(_programs(program, recipes, workload), predicted, workload, cluster, wire)
    return replace(measured, model=os.fspath(model))


def validate(
    model: _Path, recipes: Sequence[str], job: Workload, where: Cluster, *, launches: int, context: RunContext
) -> Validation:
    """See `rewriter.api.validate`."""
    from rewriter.predict.validate import validate as compare_with_real

    programs = _programs(traced(model, context.trust_remote_code), recipes, job)
    return compare_with_real(programs, job, where, launches)


def traced(model: _Path, trust_remote_code: bool) -> Program:
    """The model with its checkpoint; of a directory without weights, its config alone."""
    path = Path(model)
    if path.is_dir() and not any((path / name).is_file() for name in (SINGLE, INDEX)):
        return trace(load_config(path, trust_remote_code), trust_remote_code=trust_remote_code)
    return trace(path if path.exists() else os.fspath(model), trust_remote_code=trust_remote_code)


def _programs(program: Program, recipes: Sequence[str], workload: Workload) -> list[tuple[str, Program]]:
    loaded = distinct([load_recipe(recipe) for recipe in recipes])
    programs, _ = Candidates(program, workload.sp).of(loaded, workload.tp)
    return [(candidate.recipe, candidate.program) for candidate in programs]
