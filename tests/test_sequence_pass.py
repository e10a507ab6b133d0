"""Tokens sharded over ranks: the same function, for every plan, length and mesh; and what would break it is seen."""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from oracles import ladder_logits, relative_error
from programs import traced, weights

from rewriter.apply import apply_recipe
from rewriter.program import Program
from rewriter.recipes import Recipe
from rewriter.verify.simulate import simulate

GRIDS = [
    ("attention2d", (1, 2, 2)), ("attention2d", (1, 4, 1)), ("attention2d", (1, 1, 4)), ("attention2d", (1, 2, 3)),
    ("attention2d", (2, 2, 1)), ("ring", (1, 3, 1)), ("ulysses", (4, 1, 1)),
]  # fmt: skip


def recipe(*passes: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"name": "mine", "summary": "one", "paper": "none", "passes": list(passes)})


def sequence(kind: str, grid: tuple[int, int, int]) -> dict[str, object]:
    return {"pass": "sequence_parallel", "kind": kind, "grid": grid}


def rewritten(name: str, *passes: dict[str, object], sp: int, tp: int = 1) -> Program:
    return apply_recipe(traced(name), recipe(*passes), tp=tp, sp=sp)[0]


@functools.cache
def sharded(name: str, kind: str = "attention2d", grid: tuple[int, int, int] = (1, 2, 2)) -> Program:
    ranks = grid[0] * grid[1] * grid[2]
    return rewritten(name, {"pass": "tensor_parallel"}, sequence(kind, grid), sp=ranks)


def logits(program: Program, name: str, length: int = 21) -> torch.Tensor:
    with torch.no_grad():
        return simulate(program, batch(name, length), weights=weights(name))


def batch(name: str, length: int = 21) -> torch.Tensor:
    return zoo.batch(2, length, zoo.shared(name).config.vocab_size)


@pytest.mark.parametrize(("kind", "grid"), GRIDS)
def test_every_plan_keeps_the_function_at_any_length(kind, grid):
    program = sharded("llama", kind, grid)
    for length in (1, 5, 21, 48):
        expected = ladder_logits(zoo.shared("llama"), (), batch("llama", length))
        assert relative_error(logits(program, "llama", length), expected) <= 1e-5, length
