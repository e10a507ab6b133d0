"""Models, recipes and a fabric → comparisons: what `rewriter.api.predict`, `measure` and `validate` do."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
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
from rewriter.predict.analytic import Candidate, Predictor, bytes_per_rank, with_front
from rewriter.predict.candidates import Candidates, distinct
from rewriter.predict.results import PredictedPoint, Prediction, RecipeComparison
from rewriter.predict.validation import Validation
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace, trace_skeleton
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.weights.checkpoint import INDEX, SINGLE

_Path = str | os.PathLike[str]
# what users have today: tensor parallelism, parallel blocks, and no communication at all
BASELINES = ("tensor-parallel", "parallel", "upper-bound")
DEGREES, BATCHES = (1, 2, 4, 8), (1, 4, 16, 64)


def compare(
    model: Any,
    recipes: Sequence[str | os.PathLike[str] | Recipe],
    workload: Workload,
    cluster: Cluster,
    *,
    pareto: bool = False,
    baselines: bool = False,
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
    asked_for, skipped = candidates.of(loaded, workload.tp)
    said, asked = about_model(program, workload.prompt + workload.generate), len(asked_for)
    if baselines:
        asked_for += _baselines(candidates, workload.tp, {recipe.name for recipe in loaded})
    done = predictor.compare(name, [replace(c, notes=(*said, *c.notes)) for c in asked_for], skipped)
    if baselines:
        names = {c.recipe for c in asked_for[:asked]}
        others = [p for p in done.predictions if p.recipe not in names]
        others += [p for p in [_replicas(predictor, candidates, done.predictions[0])] if p is not None]
        kept = tuple(p for p in done.predictions if p.recipe in names)
        done = replace(done, predictions=kept, baselines=tuple(others))
    points: dict[str, tuple[PredictedPoint, ...]] = {}
    if pareto:
        by_name = {recipe.name: recipe for recipe in loaded}
        points = {p.recipe: _points(predictor, candidates, by_name[p.recipe]) for p in done.predictions}
    return replace(done, pareto=points, seconds=time.process_time() - began)


def _baselines(candidates: Candidates, tp: int, named: Collection[str]) -> list[Candidate]:
    """Those of BASELINES that are not `named` and can be applied."""
    baselines: list[Candidate] = []
    for name in BASELINES:
        if name not in named:
            with suppress(RewriterError):  # a model that has no such blocks
                baselines.append(candidates.one(load_recipe(name), tp))
    return baselines


def _replicas(predictor: Predictor, candidates: Candidates, first: Prediction) -> Prediction | None:
    """The same ranks as replicas of the model, of as few ranks as hold it: each serves its share of the sequences.

    None where no fewer ranks hold the model. `first` is what the others are compared with.
    """
    load = predictor.workload
    for degree in (d for d in range(1, load.tp) if load.tp % d == 0):
        each = -(-load.batch * degree // load.tp)
        try:
            program = candidates.one(load_recipe("tensor-parallel"), degree).program
        except RewriterError:  # heads that do not divide
            continue
        if bytes_per_rank(program, each, load.prompt, load.generate) > predictor.fabric.device.memory:
            continue
        used = -(-load.batch // each)
        alone = replace(predictor, workload=replace(load, batch=each, tp=degree, nodes=None))
        (replica,) = alone.compare("", [Candidate(f"replicas of {degree}", program)]).predictions
        rate = load.batch * load.generate / replica.generation_seconds
        said = f"{used} of {load.tp // degree} replicas on {degree} ranks each serve {each} of {load.batch} sequences"
        return replace(
            replica, batch=load.batch, tokens_per_second=rate, speedup=rate / first.tokens_per_second,
            break_even_note="other ranks", break_even_prefill_note="other ranks", speedup_interval=None,
            notes=(*replica.notes, said),
        )  # fmt: skip
    return None


def about_model(program: Program, length: int) -> tuple[str, ...]:
    """Notes on what its config leaves open, or asks for and is not simulated. `length`: tokens of a whole sequence."""
    config, said = program.source.config, []
    if declared_dtype(config) is None:
        said.append("The config names no dtype: float32 is assumed for weights, cache and messages.")
    if quantization_settings(config):
        dtype = str(model_dtype(program)).removeprefix("torch.")
        said.append(f"The config's quantization of weights is not simulated: they count as {dtype}.")
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
