"""Kernels of recurrences: bytes of a step, arithmetic of a prompt, and what a rank of several has of both."""

from __future__ import annotations

import hybrids
import pytest
import torch
from programs import tensor_parallel

from rewriter.ir import Program, nodes_inside, ops, walk_modules
from rewriter.passes.placement.rank_memory import cache_elements, memory
from rewriter.predict.analytic import bytes_per_rank
from rewriter.predict.mixer_cost import CHUNK, recurrence_items
from rewriter.predict.workload import ForwardPass

BATCH = 3


def recurrence(program: Program, target: object) -> torch.fx.Node:
    inside = (node for _, module in walk_modules(program.modules) for _, node in nodes_inside(module))
    return next(node for node in inside if node.target is target)


def inputs(tokens: int, heads: int, keys: int, values: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, g and beta of a delta rule with as many key heads as value heads; its result."""
    sizes = [(keys,), (keys,), (values,), (), ()]
    tensors = [torch.empty(BATCH, tokens, heads, *size, device="meta") for size in sizes]
    return tensors, torch.empty_like(tensors[2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_reads_and_writes_its_state_once(ranks: int) -> None:
    node = recurrence(tensor_parallel(hybrids.traced("kimi_linear"), ranks), ops.delta_rule)
    heads = 8 // ranks
    tensors, out = inputs(1, heads, 16, 16)
    (kernel,) = recurrence_items(node, tensors, out, ForwardPass(batch=BATCH, tokens=1, keys=100))
    moved = sum(t.nbytes for t in (*tensors, out))
    assert kernel.nbytes == moved + 2 * BATCH * heads * 16 * 16 * 4
    assert kernel.work == "glue"


def test_a_prompt_costs_in_proportion_to_its_tokens() -> None:
    """In chunks of 64, the products of arXiv 2412.06464, section 3.3."""
    node = recurrence(hybrids.traced("kimi_linear"), ops.delta_rule)
    totals = {}
    for tokens in (CHUNK, 4 * CHUNK, 16 * CHUNK):
        tensors, out = inputs(tokens, 8, 16, 16)
        items = recurrence_items(node, tensors, out, ForwardPass(batch=BATCH, tokens=tokens))
        totals[tokens] = sum(kernel.flops for kernel in items)
        assert all(kernel.work == "product" for kernel in items)
    assert totals[4 * CHUNK] == 4 * totals[CHUNK]
    assert totals[16 * CHUNK] == 16 * totals[CHUNK]
    # q kᵀ and k kᵀ; the inverse times k and v; the state times q and k; scores times v; keys times v
    d, c = 16, CHUNK
    per_token = 2 * (2 * c * d + c * 2 * d + 2 * d * d + c * d + d * d)
    assert totals[CHUNK] == per_token * CHUNK * BATCH * 8


def test_states_do_not_grow_with_the_tokens() -> None:
    program = hybrids.traced("mamba2")
    assert cache_elements(program, 1000) == 0
    held = memory(program)
    assert held.states_per_row > 0
    assert bytes_per_rank(program, 2, 10, 1000) == bytes_per_rank(program, 2, 10, 10)
