"""Emitted checkpoints that rewire the prompt alone."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import emitted
import torch
import zoo
from programs import MERGE, Step, tensor_parallel
from transformers import PreTrainedModel

from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import Program
from rewriter.ir.phases import PromptPhase
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import single_device

PHASE = PromptPhase(exact_tail=3, exact_head=2)
# ranks and the pass, without its phase
RECIPES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ladder": (2, "ladder", {}),
    "own-partial": (2, "ladder", {"variant": "own_partial"}),
    "2x-sum": (2, "desync", {"n": 2, "resync": "sum"}),
    "2x-mean": (4, "desync", {"n": 2}),
    "4x-sum": (2, "desync", {"n": 4, "resync": "sum"}),
    "parallel": (2, "parallel_block", {}),
    "parallel-own": (2, "parallel_block", {"norm": "own"}),
    "drop-sync": (2, "drop_sync", {"layers": [1, 2]}),
}
UNBOUND = ("ladder", "parallel", "parallel-own")  # one device computes what the source's model computes
# Layers that are one parallel block have no attention with an MLP after it; norms of olmo2 stand after its blocks, and
# those of its queries and keys take the size of what all ranks hold.
PAIRED = ("parallel", "parallel-own", "drop-sync")
ABSENT = {
    *itertools.product(["gpt_neox"], PAIRED),
    *itertools.product(["olmo2"], ("parallel", "own-partial", "4x-sum")),
}
CASES = [case for case in itertools.product(zoo.FAMILIES, RECIPES) if case not in ABSENT]


@functools.cache
def program(family: str, recipe: str, phased: bool = True) -> Program:
    """`family` after the recipe, for tokens of the prompt alone or for all."""
    ranks, name, options = RECIPES[recipe]
    phase = {"phase": "prompt", "exact_tail": PHASE.exact_tail, "exact_head": PHASE.exact_head} if phased else {}
    step: Step = (name, options | phase)
    return tensor_parallel(emitted.program(family), ranks, MERGE, step)


@functools.cache
def directory(family: str, recipe: str) -> Path:
    """The checkpoint of `program(family, recipe)`."""
    path = emitted.source(family).parent / f"phased-{family}-{recipe}"
    emitted.write(emit_huggingface(program(family, recipe)), emitted.source(family), path)
    return path


@functools.cache
def shared(family: str, recipe: str) -> PreTrainedModel:
    """Its model, for tests that do not change it."""
    return emitted.load(directory(family, recipe))


def batch(family: str, rows: int = 2, length: int = 21) -> torch.Tensor:
    return zoo.batch(rows, length, min(zoo.shared(family).config.vocab_size, 256))


def random_mask(ids: torch.Tensor, seed: int = 3) -> torch.Tensor:
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@functools.cache
def _single(family: str, recipe: str, phased: bool) -> Program:
    return single_device(program(family, recipe, phased))


def expected(family: str, recipe: str, ids: torch.Tensor, rewired: torch.Tensor | None) -> torch.Tensor:
    """Logits of the two wirings, all ranks in this process; with None, of the recipe without phase."""
    return simulate(_single(family, recipe, rewired is not None), ids, rewired=rewired)


def greedy(family: str, recipe: str, prompt: list[int], tokens: int, mask: torch.Tensor | None = None) -> list[int]:
    """The tokens after `prompt`, all computed anew for each; `mask` [1, prompt] tells which of its are rewired."""
    rewired = PHASE.rewired(len(prompt)) if mask is None else mask
    row = list(prompt)
    for _ in range(tokens):
        exact = torch.zeros(1, len(row) - len(prompt), dtype=torch.bool)
        logits = expected(family, recipe, torch.tensor([row]), torch.cat([rewired, exact], 1))
        row.append(int(logits[0, -1].argmax()))
    return row[len(prompt) :]
