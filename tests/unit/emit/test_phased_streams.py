"""Prompts alone are rewired in models whose streams are more than x + f(x): their checkpoint and sharded module."""

from __future__ import annotations

import ast

import emitted
import pytest
import torch
from programs import OVERLAP, applied, tensor_parallel

from rewriter.check.comparison import relative_error
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import random_ids, random_model, save_model
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.ir.phases import PromptPhase
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import single_device
from rewriter.tracing import trace

PHASE = PromptPhase(exact_tail=3, exact_head=2)
STEP = ("ladder", {"phase": "prompt", "exact_tail": PHASE.exact_tail, "exact_head": PHASE.exact_head})
FAST = ("bart", "gemma4_text")
TYPES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*FAST, "deepseek_v4", "hy_v4", "zaya")]


@pytest.fixture(scope="module", params=TYPES)
def phased(request, tmp_path_factory):
    """(the traced program, its checkpoint) of a type's small model."""
    directory, config = tmp_path_factory.mktemp("phased") / request.param, small_config(request.param)
    save_model(random_model(config), config, directory)
    return trace(directory), directory


@torch.no_grad()
def test_the_checkpoint_computes_the_two_wirings(phased):
    program, directory = phased
    rewritten = applied(program, STEP)
    out = directory.with_name("rewritten")
    emitted.write(emit_huggingface(rewritten), directory, out)
    model = emitted.load(out)
    ids = random_ids(model.config, 12)

    def logits(**options):
        return model(input_ids=ids, use_cache=False, **options).logits

    weights = dict((*model.named_buffers(), *model.named_parameters()))
    both = single_device(rewritten)
    prompts = PHASE.rewired(ids.shape[1]).expand(ids.shape)
    some = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    expected = simulate(both, ids, weights=weights, rewired=prompts)
    assert relative_error(logits(), expected) < 1e-5  # a batch of prompts, as nothing else is said
    assert relative_error(logits(rewired=some), simulate(both, ids, weights=weights, rewired=some)) < 1e-5
    exact = simulate(program, ids, weights=weights)
    assert relative_error(logits(rewired=torch.zeros_like(some)), exact) < 1e-5
    assert relative_error(expected, exact) > 1e-2
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert len({state.shape for state in states[:-1]}) == 1  # what layers hand on beside the stream is cut off


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_sharded_module_is_python(phased, ranks):
    program, _ = phased
    sharded = applied(program, STEP) if ranks == 1 else tensor_parallel(program, ranks, STEP, OVERLAP)
    names = {node.name for node in ast.walk(ast.parse(emit_runtime_module(sharded))) if hasattr(node, "name")}
    assert {"compute_mixed", "compute_rewired", "compute_exact", "compute_keys"} <= names
