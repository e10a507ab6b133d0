"""Whole models whose tokens lie on real ranks, from config to emitted module: logits, loss, gradients and greedy tokens
are those of transformers on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import zoo
from emitted_ranks import import_source
from oracles import greedy_oracle, relative_error
from programs import shards, traced, weights
from ranks import run_ranks

from rewriter.emit.module import emit_runtime_module
from rewriter.ir.ops import SequencePlan
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe

LENGTH, NEW_TOKENS = 37, 3
TOLERANCE = 1e-5  # relative to the largest entry

# name: family, plan, tensor-parallel ranks, data-parallel replicas, FSDP2
CASES: Mapping[str, tuple[str, SequencePlan, int, int, bool]] = {
    "attention2d": ("llama", SequencePlan("attention2d", (1, 2, 2)), 1, 1, False),
    "attention2d-windows": ("gemma3_text", SequencePlan("attention2d", (1, 2, 2), overlap=True), 1, 1, False),
    "attention2d-sinks-tp": ("gpt_oss", SequencePlan("attention2d", (1, 1, 2)), 2, 1, False),
    "attention2d-chunks": ("llama4_text", SequencePlan("attention2d", (1, 2, 2)), 1, 1, False),
    "ring-latent": ("deepseek_v3", SequencePlan("ring", (1, 4, 1), overlap=True), 1, 1, False),
    "ring": ("llama_tied", SequencePlan("ring", (1, 4, 1), overlap=True), 1, 1, False),
    "ulysses-tp": ("llama", SequencePlan("ulysses", (2, 1, 1)), 2, 1, False),
    "attention2d-dp-fsdp": ("llama_tied", SequencePlan("attention2d", (1, 1, 2)), 1, 2, True),
    "attention2d-tp-fsdp": ("llama_mha_bias", SequencePlan("attention2d", (1, 2, 1)), 2, 1, True),
}
# Their plans, degrees and FSDP2 occur in the other cases too, their masks in test_sequence_attention.
SLOW = {"attention2d", "attention2d-sinks-tp", "attention2d-chunks", "ring", "attention2d-tp-fsdp"}
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


@functools.cache
def program(name: str) -> Any:
    family, plan, tp, _, _ = CASES[name]
    passes = [
        {"pass": "tensor_parallel"},
        {"pass": "sequence_parallel", "kind": plan.kind, "grid": plan.grid, "overlap": plan.overlap},
    ]
    recipe = Recipe.model_validate({"name": name, "summary": "one", "paper": "none", "passes": passes})
    return apply_recipe(traced(family), recipe, tp=tp, sp=plan.ranks)[0]


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [4, LENGTH], with few targets in the first rows."""
    ids = zoo.batch(4, LENGTH, zoo.shared(CASES[name][0]).config.vocab_size)
    labels = ids.clone()
    labels[0, 5:] = labels[1, 1:20] = -100
    return ids, labels


def prompts(name: str) -> list[list[int]]:
    ids = zoo.batch(3, 33, zoo.shared(CASES[name][0]).config.vocab_size).tolist()
    return [ids[0][:1], ids[1][:7], ids[2]]


def on_rank(group, cases):
    return [one_case(*case) for case in cases]


def one_case(source, tensors, ties, plan, tp, dp, fsdp, ids, labels, prompts):
    """Of this rank: logits whole and in parts, loss, gradients, greedy tokens of the prompts together, and of the two
    shortest alone."""
    from torch.distributed.tensor import DTensor

    from rewriter.runtime import generate, sequence_mesh
    from rewriter.training import shard_parameters

    mesh = sequence_mesh("cpu", plan.grid, data_parallel=dp, tensor_parallel=tp)
    model = import_source(source).Model(mesh)
    parameters = {n: torch.nn.Parameter(t.clone()) for n, t in tensors[mesh.get_local_rank("tp")].items()}
    tied = {alias: parameters[canonical] for alias, canonical in ties.items()}
    model.load_state_dict(parameters | tied, strict=True, assign=True)
    if fsdp:
        shard_parameters(model)
    with torch.no_grad():
        whole, part = model(ids), model(ids, gather=False)
        last = model(ids, logits_to_keep=3)
    rows = mesh.get_local_rank("dp") * 4 // dp
    loss = model(ids[rows : rows + 4 // dp], labels=labels[rows : rows + 4 // dp]).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    gradients = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    if rows:  # replicas may continue different prompts
        prompts = prompts[::-1]
    together = generate(model, prompts, NEW_TOKENS)
    alone = [generate(model, [prompt], NEW_TOKENS)[0] for prompt in sorted(prompts, key=len)[:2]]
    tokens = (together[::-1] if rows else together), alone
    return whole, tuple(part), last, loss.detach(), gradients, tokens


def results(name: str) -> list[Any]:
    """By rank, what a case found: the slow ones are launched apart from the others."""
    return launched(tuple(n for n in CASES if (n in SLOW) == (name in SLOW)))[name]


@functools.cache
def launched(names: tuple[str, ...]) -> dict[str, list[Any]]:
    cases = []
    for name in names:
        family, plan, tp, dp, fsdp = CASES[name]
        sharded = program(name)
        source, tensors = emit_runtime_module(sharded), shards(sharded, weights(family))
        cases.append((source, tensors, dict(sharded.ties), plan, tp, dp, fsdp, *batch(name), prompts(name)))
    by_rank = run_ranks(on_rank, 4, cases)
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(names)}


@functools.cache
def expected(name: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """transformers in fp64: logits, loss and gradients."""
    model = copy.deepcopy(zoo.shared(CASES[name][0])).double()
    ids, labels = batch(name)
    output = model(ids, labels=labels)
    output.loss.backward()
    return output.logits.detach(), output.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", EACH)
def test_logits_are_whole_on_every_rank_or_those_of_its_own_tokens(name):
    logits = expected(name)[0]
    held = []
    for whole, (part, indices), last, *_ in results(name):
        assert relative_error(whole, logits) <= TOLERANCE
        assert relative_error(last, logits[:, -3:]) <= TOLERANCE
        torch.testing.assert_close(part, whole[:, indices], rtol=0, atol=0)
        held += indices.tolist()
    copies = 4 // CASES[name][1].ranks
    assert sorted(held) == sorted([*range(LENGTH)] * copies)


@pytest.mark.parametrize("name", EACH)
def test_loss_and_gradients_are_those_of_one_device(name):
    tp = CASES[name][2]
    _, wanted, gradients = expected(name)
    for rank, (*_, loss, found, _) in enumerate(results(name)):
        assert abs(loss - wanted) <= TOLERANCE * wanted
        for parameter, spec in program(name).parameters.items():
            part = whole = gradients[parameter]
            if spec.ranges is not None:
                pieces = [whole.narrow(spec.dim, a, b - a) for a, b in spec.ranges[rank % tp]]
                part = torch.cat(pieces, spec.dim)
            error = float((found[parameter] - part).abs().max() / whole.abs().max())
            assert error <= TOLERANCE, f"{parameter} on rank {rank}: {error:.1e}"


@pytest.mark.parametrize("name", EACH)
def test_greedy_tokens_after_a_sharded_prompt_are_those_of_one_device(name):
    model = zoo.shared(CASES[name][0])
    with torch.no_grad():
        wanted = greedy_oracle(lambda ids: model(ids).logits, prompts(name), NEW_TOKENS)
    for *_, (together, alone) in results(name):
        assert together == wanted
        assert alone == wanted[:2]
