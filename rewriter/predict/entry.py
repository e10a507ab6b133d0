"""A model and recipes → what real ranks of this machine measure: what `rewriter.api.measure` and `validate` do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.fabric import load_fabric
from rewriter.ir import Program
from rewriter.predict import measurement
from rewriter.predict.candidates import Candidates, distinct
from rewriter.predict.compare import compare
from rewriter.predict.results import RecipeComparison
from rewriter.predict.validate import validate as compare_with_real
from rewriter.predict.validation import Validation
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace
from rewriter.tracing.meta_model import load_config
from rewriter.weights.checkpoint import INDEX, SINGLE


def measure(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    workload: Workload,
    cluster: Cluster,
    *,
    trust_remote_code: bool = False,
) -> RecipeComparison:
    """See `rewriter.api.measure`."""
    fewest, nodes = -(-workload.tp // load_fabric(cluster.fabric).node), workload.nodes
    if nodes is not None and nodes != fewest:
        raise RewriterError(
            f"--nodes {nodes}: with --measure, {workload.tp} ranks fill their nodes one by one, {fewest} of "
            f"{cluster.fabric}. Leave out --nodes, or --measure"
        )
    program = traced(model, trust_remote_code)
    predicted = compare(program, recipes, workload, cluster, trust_remote_code=trust_remote_code)
    found = measurement.measure(_programs(program, recipes, workload), predicted, workload, cluster)
    return replace(found, model=os.fspath(model))


def validate(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    workload: Workload,
    cluster: Cluster,
    *,
    trust_remote_code: bool = False,
    launches: int = 3,
) -> Validation:
    """See `rewriter.api.validate`."""
    programs = _programs(traced(model, trust_remote_code), recipes, workload)
    return compare_with_real(programs, workload, cluster, launches)


def traced(model: str | os.PathLike[str], trust_remote_code: bool) -> Program:
    """The model with its checkpoint; of a directory without weights, its config alone."""
    path = Path(model)
    if path.is_dir() and not any((path / name).is_file() for name in (SINGLE, INDEX)):
        return trace(load_config(path, trust_remote_code), trust_remote_code=trust_remote_code)
    return trace(path if path.exists() else os.fspath(model), trust_remote_code=trust_remote_code)


def _programs(program: Program, recipes: Sequence[str], workload: Workload) -> list[tuple[str, Program]]:
    """The programs of those recipes that can be applied."""
    loaded = distinct([load_recipe(recipe) for recipe in recipes])
    found, _ = Candidates(program, workload.sp).of(loaded, workload.tp)
    return [(candidate.recipe, candidate.program) for candidate in found]
