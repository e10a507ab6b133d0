"""What users have today, to compare recipes with: tensor parallelism, parallel blocks, no communication at all, and
replicas of the model on fewer ranks each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rewriter.common.errors import RewriterError
from rewriter.predict.analytic import Candidate, Predictor
from rewriter.predict.candidates import Candidates
from rewriter.predict.generation_memory import bytes_per_rank
from rewriter.predict.results import Prediction
from rewriter.recipes.apply import load_recipe

RECIPES = ("tensor-parallel", "parallel", "upper-bound")


def recipes(candidates: Candidates, tp: int, named: Collection[str]) -> list[Candidate]:
    """Those of RECIPES that are not `named` and can be applied."""
    found: list[Candidate] = []
    for name in RECIPES:
        if name not in named:
            try:
                found.append(candidates.one(load_recipe(name), tp))
            except RewriterError:  # a model that has no such blocks
                continue
    return found


def replicas(predictor: Predictor, candidates: Candidates, first: Prediction) -> Prediction | None:
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
        alone = replace(predictor, workload=replace(load, batch=each, tp=degree, nodes=None), nodes=None)
        (found,) = alone.compare("", [Candidate(f"replicas of {degree}", program)]).predictions
        rate = load.batch * load.generate / found.generation_seconds
        said = f"{used} of {load.tp // degree} replicas on {degree} ranks each serve {each} of {load.batch} sequences"
        return replace(
            found, batch=load.batch, tokens_per_second=rate, speedup=rate / first.tokens_per_second,
            break_even_note="other ranks", break_even_prefill_note="other ranks", speedup_interval=None,
            notes=(*found.notes, said),
        )  # fmt: skip
    return None
