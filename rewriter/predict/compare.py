"""A model, recipes and a fabric → a Comparison: what `rewriter.api.predict` does."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rewriter.analysis.communication import model_dtype
from rewriter.analysis.sequence_layout import context_length
from rewriter.common.errors import RewriterError
from rewriter.fabric import Fabric, load_fabric
from rewriter.ir import Program
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates, distinct
from rewriter.predict.pareto import BATCHES, DEGREES
from rewriter.predict.results import PredictedPoint, RecipeComparison
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes.apply import load_recipe

if TYPE_CHECKING:
    from rewriter.recipes import Recipe


def compare(
    model: Any,
    recipes: Sequence[str | os.PathLike[str] | Recipe],
    workload: Workload,
    cluster: Cluster,
    *,
    pareto: bool = False,
    set: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RecipeComparison:
    """See `rewriter.api.predict`."""
    began = time.process_time()
    if not recipes:
        raise RewriterError("predict: no recipe is named. Give at least one: --recipe tensor-parallel")
    where = cluster.fabric if isinstance(cluster.fabric, Fabric) else load_fabric(cluster.fabric)
    predictor = Predictor(where, workload, cluster.what_if, workload.nodes, cluster.library)
    loaded = distinct([load_recipe(recipe, set) for recipe in recipes])
    name, program = _traced(model, trust_remote_code)
    candidates = Candidates(program, workload.sp)
    found, skipped = candidates.of(loaded, workload.tp)
    said = about_model(program, workload.prompt + workload.generate)
    done = predictor.compare(name, [replace(c, notes=(*said, *c.notes)) for c in found], skipped)
    points: dict[str, tuple[PredictedPoint, ...]] = {}
    if pareto:
        by_name = {recipe.name: recipe for recipe in loaded}
        points = {p.recipe: _points(predictor, candidates, by_name[p.recipe]) for p in done.predictions}
    return replace(done, pareto=points, seconds=time.process_time() - began)


def about_model(program: Program, length: int) -> tuple[str, ...]:
    """What its config leaves open, or asks for and is not simulated, in words. `length`: tokens of a whole sequence."""
    config, said = program.source.config, []
    if not (config.get("dtype") or config.get("torch_dtype")):
        said.append("The config names no dtype: float32 is assumed for weights, cache and messages.")
    if config.get("quantization_config"):
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
    from rewriter.tracing import trace_skeleton
    from rewriter.tracing.meta_model import build_skeleton, load_config

    config = load_config(model, trust_remote_code)
    program = trace_skeleton(build_skeleton(config, trust_remote_code), remote_code=trust_remote_code)
    return str(model) if isinstance(model, (str, os.PathLike)) else program.source.model_type, program


def _points(predictor: Predictor, candidates: Candidates, recipe: Recipe) -> tuple[PredictedPoint, ...]:
    """Points of a recipe over numbers of ranks and batches, those asked for among them; on as few nodes as it takes."""

    def program_at(degree: int) -> Program | None:
        try:
            return candidates.one(recipe, degree).program
        except RewriterError:  # bound to several ranks, or heads that do not divide: no such point
            return None

    degrees, batches = sorted({*DEGREES, predictor.workload.tp}), sorted({*BATCHES, predictor.workload.batch})
    return _on_few_nodes(predictor).pareto(program_at, degrees, batches)


def _on_few_nodes(predictor: Predictor) -> Predictor:
    """The same predictor, whose ranks lie on as few nodes as hold them."""
    return replace(predictor, nodes=None) if predictor.nodes is not None else predictor
