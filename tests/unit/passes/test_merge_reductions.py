"""Reductions that are added become one, whatever numbers scale them and whatever else is added in between."""

from __future__ import annotations

import functools

import pytest
import torch
from oracles import relative_error
from programs import PASSES, tensor_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.ir import Program, ops
from rewriter.ir.marks import mark, marks
from rewriter.ir.residual import is_add, residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace


@functools.cache
def granite() -> tuple[Program, dict[str, torch.Tensor]]:
    """A model whose blocks are scaled before they are added, and its weights."""
    config = AutoConfig.for_model(
        "granite", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return trace(config), {n: 8 * p.detach() if p.ndim > 1 else p.detach() for n, p in model.named_parameters()}


def parallel(program: Program) -> Program:
    """Attention and MLP of a layer read the same stream value, and both are added to it: one block per layer."""
    graph, env = program.edit()
    for first, second in zip(*[iter(residual_blocks(program))] * 2, strict=True):
        for node in second.branch:
            env[node].replace_input_with(env[first.add], env[first.skip])
        mark(env[first.add], stream=None)
        mark(env[second.add], stream=first.layer + 1)
        for node in (*first.branch, *second.branch, first.add):
            mark(env[node], block=first.layer)
    return program.with_(graph=graph)


def block_reductions(program: Program) -> list[torch.fx.Node]:
    return [n for n in program.graph.nodes if n.target is ops.all_reduce and marks(n).layer is not None]


@pytest.mark.parametrize("tp", [2, 4])
def test_scaled_reductions_with_the_stream_between_them_become_one_per_layer(tp: int) -> None:
    """x + s·AR(a) + s·AR(m) → x + AR(s·a + s·m)."""
    program, weights = granite()
    changed = parallel(program)
    sharded = tensor_parallel(changed, tp)
    merged = PASSES["merge_reductions"]().apply(sharded)
    assert len(block_reductions(sharded)) == 4
    assert len(block_reductions(merged)) == 2
    assert merged.history[-1].fired
    assert [b.kind for b in residual_blocks(merged)] == ["parallel", "parallel"]
    ids = torch.arange(42).view(2, 21) % 64
    expected = simulate(changed, ids, weights=weights)
    assert relative_error(expected, simulate(program, ids, weights=weights)) >= 1e-2
    assert relative_error(simulate(merged, ids, weights=weights), expected) <= 1e-5


def test_gradients_of_merged_scaled_reductions_are_those_of_one_device() -> None:
    program, weights = granite()
    changed = parallel(program)
    merged = PASSES["merge_reductions"]().apply(tensor_parallel(changed, 2))
    ids = torch.arange(42).view(2, 21) % 64
    gradients = []
    for form in (changed, merged):
        leaves = {n: t.clone().requires_grad_() for n, t in weights.items()}
        simulate(form, ids, weights=leaves).square().mean().backward()
        gradients.append({n: t.grad for n, t in leaves.items()})
    for name, expected in gradients[0].items():
        assert relative_error(gradients[1][name], expected) <= 1e-5, name


def test_reductions_of_sequential_blocks_stay_apart() -> None:
    sharded = tensor_parallel(granite()[0], 2)
    merged = PASSES["merge_reductions"]().apply(sharded)
    assert not merged.history[-1].fired
    assert len(block_reductions(merged)) == 4


def test_a_sum_that_something_else_reads_is_not_taken_apart() -> None:
    sharded = tensor_parallel(parallel(granite()[0]), 2)
    graph, _ = sharded.edit()
    first = next(n for n in graph.nodes if n.target is ops.all_reduce and marks(n).layer == 0)
    last = next(n for n in reversed(graph.nodes) if is_add(n))
    with graph.inserting_before(last):
        again = graph.call_function(last.target, (last.args[0], first))
    again.meta = dict(last.meta)
    mark(again, stream=None)
    last.args = (again, last.args[1])
    merged = PASSES["merge_reductions"]().apply(sharded.with_(graph=graph))
    assert len(block_reductions(merged)) == 3  # the last layer's two became one, the first layer's did not
