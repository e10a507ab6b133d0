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
from rewriter.predict.measurement import Emulation, Job
from rewriter.predict.results import Comparison
from rewriter.predict.validate import validate as compare_with_real
from rewriter.predict.validation import Validation
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace
from rewriter.tracing.meta_model import load_config
from rewriter.weights.checkpoint import INDEX, SINGLE


def measure(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    *,
    job: Job,
    fabric: str,
    library: str | None,
    what_if: tuple[str, ...],
    nodes: int | None,
    sp: int | None,
    trust_remote_code: bool,
) -> Comparison:
    """See `rewriter.api.measure`."""
    fewest = -(-job.ranks // load_fabric(fabric).node)
    if nodes is not None and nodes != fewest:
        raise RewriterError(
            f"--nodes {nodes}: with --measure, {job.ranks} ranks fill their nodes one by one, {fewest} of {fabric}. "
            "Leave out --nodes, or --measure"
        )
    program = traced(model, trust_remote_code)
    predicted = compare(
        program, recipes, fabric=fabric, tp=job.ranks, sp=sp, nodes=nodes, batch=job.batch, prompt=job.prompt,
        generate=job.generate, graphed=job.graphed, what_if=what_if, library=library, pareto=False, set=None,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    programs = _programs(program, recipes, job.ranks, sp)
    found = measurement.measure(programs, predicted, job, Emulation(fabric, what_if, library))
    return replace(found, model=os.fspath(model))


def validate(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    *,
    job: Job,
    fabric: str,
    library: str | None,
    sp: int | None,
    trust_remote_code: bool,
    launches: int,
) -> Validation:
    """See `rewriter.api.validate`."""
    programs = _programs(traced(model, trust_remote_code), recipes, job.ranks, sp)
    return compare_with_real(programs, job, Emulation(fabric, (), library), launches)


def traced(model: str | os.PathLike[str], trust_remote_code: bool) -> Program:
    """The model with its checkpoint; of a directory without weights, its config alone."""
    path = Path(model)
    if path.is_dir() and not any((path / name).is_file() for name in (SINGLE, INDEX)):
        return trace(load_config(path, trust_remote_code), trust_remote_code=trust_remote_code)
    return trace(path if path.exists() else os.fspath(model), trust_remote_code=trust_remote_code)


def _programs(program: Program, recipes: Sequence[str], ranks: int, sp: int | None) -> list[tuple[str, Program]]:
    """The programs of those recipes that can be applied."""
    loaded = distinct([load_recipe(recipe) for recipe in recipes])
    found, _ = Candidates(program, sp).of(loaded, ranks)
    return [(candidate.recipe, candidate.program) for candidate in found]
