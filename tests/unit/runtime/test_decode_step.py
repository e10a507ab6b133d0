"""A decode step reads nothing on the host, holds no value of the token that it was recorded with, and keeps its
memory: what a CUDA graph and a compiled step rely on. Each fault that they would hide is seeded here."""

from __future__ import annotations

import copy
import pickle

import decode_steps
import pytest
import runtime_reference as reference
import torch
import zoo
from decode_steps import STEPS, begun, emitted, prompts_of, replayed
from host_reads import HostReads
from qwen_ranks import PROMPTS, build

from rewriter import RewriterError
from rewriter.runtime import generate
from rewriter.runtime.compiled import product
from rewriter.runtime.generation.decode_step import Sampling, decode_step

as_on_a_gpu = decode_steps.as_on_a_gpu
FAMILIES = [name for name in zoo.FAMILIES if name not in ("bloom", "mpt")]  # position biases have no cache


@torch.no_grad()
def addresses(model, prompts):
    """Where the state and the cache of a step are, before and after some tokens."""
    step, found = begun(model, prompts), []
    for _ in range(3):
        held = [x for x in vars(step).values() if isinstance(x, torch.Tensor)]
        found.append([x.data_ptr() for x in (*held, *step.cache.keys, *step.cache.values)])
        step.run()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("llama", "gemma3_text", "qwen3_moe")
def test_a_step_replays_reads_nothing_and_keeps_its_memory(family, as_on_a_gpu):
    model, prompts = emitted(family), prompts_of(family)
    got, wanted = replayed(model, prompts)
    assert got == wanted
    step = begun(model, prompts)
    with torch.no_grad(), HostReads() as reads:
        step.run()
    assert not reads.counts
    first, *later = addresses(model, prompts)
    assert all(places == first for places in later)


class Faulty(torch.nn.Module):
    """A model whose step has the fault `kind`."""

    def __init__(self, model, kind):
        super().__init__()
        self.model, self.kind, self.slots, self.steps = model, kind, model.slots, 0

    def forward(self, ids, positions, ctx, logits_to_keep=0):
        if self.kind == "item" and int(positions.max()) < 0:
            return None
        if self.kind == "counted" and ctx.position is not None:
            positions = torch.full_like(positions, 11 + self.steps)  # right, where the host counts
            self.steps += 1
        if self.kind == "reallocated":
            ctx.cache.keys[0] = ctx.cache.keys[0].clone()
        return self.model(ids, positions, ctx, logits_to_keep)


@torch.no_grad()
def test_a_read_on_the_host_is_seen(as_on_a_gpu):
    step = begun(Faulty(build(None, reference.weights()), "item"), prompts_of(None))
    with HostReads() as reads:
        step.run()
    assert reads.counts["_local_scalar_dense"] == 1


def test_a_position_of_the_recording_is_seen(as_on_a_gpu):
    model = build(None, reference.weights())
    prompts = prompts_of(None)
    wanted = generate(model, prompts, STEPS)
    assert generate(Faulty(model, "counted"), prompts, STEPS) == wanted
    got, _ = replayed(Faulty(model, "counted"), prompts)
    assert got != wanted


def test_a_cache_that_moves_is_seen(as_on_a_gpu):
    first, *later = addresses(Faulty(build(None, reference.weights()), "reallocated"), prompts_of(None))
    assert any(places != first for places in later)


def test_the_step_stays_with_the_model_until_it_changes():
    model = build(None, reference.weights())
    expected = generate(model, PROMPTS, 6)
    step = decode_step(model, len(PROMPTS), 20, None)
    assert generate(model, PROMPTS, 6) == expected
    assert decode_step(model, len(PROMPTS), 20, None) is step
    assert decode_step(model, 1, 20, None) is not step
    kept = decode_step(model, 1, 20, None)
    name, weight = next(iter(model.named_parameters()))
    model.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(weight.clone())
    assert decode_step(model, 1, 20, None) is not kept
    assert decode_step(model, 1, 10 * step.capacity, None).capacity == 10 * step.capacity


def test_a_copy_of_a_model_has_a_step_of_its_own():
    model = build(None, reference.weights())
    generate(model, PROMPTS, 2)
    twin = copy.deepcopy(model)
    assert generate(twin, PROMPTS, 6) == generate(model, PROMPTS, 6)
    assert decode_step(twin, len(PROMPTS), 9, None) is not decode_step(model, len(PROMPTS), 9, None)
    assert pickle.loads(pickle.dumps(vars(model)["_decode_step"])).step is None


@pytest.mark.parametrize("chunk", [1, 3, 4, None])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_prompts_in_chunks_give_the_same_tokens(family, chunk):
    """Windows are rings that a chunk passes the end of, and a chunk may be all padding."""
    model, vocabulary = emitted(family), zoo.config(family).vocab_size
    prompts = zoo.prompts(4, vocabulary)
    assert generate(model, prompts, 8, prefill_chunk=chunk) == generate(model, prompts, 8, prefill_chunk=10_000)


def test_samples_are_those_of_a_reference_with_the_same_noise():
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    noise = torch.empty(3, 50).exponential_()
    for temperature, top_k, top_p in ((1.0, None, None), (0.7, 5, None), (1.5, None, 0.8), (1.1, 20, 0.5)):
        token, broken = Sampling(temperature, top_k, top_p).choose(logits, noise)
        assert token.tolist() == [sampled(*rows, temperature, top_k, top_p) for rows in zip(logits, noise, strict=True)]
        assert not broken.any()


def sampled(logits, noise, temperature, top_k, top_p):
    """One row, in fp64, by sorting: what the documentation of `generate` says."""
    probabilities = (logits.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[:top_k]
    if top_p is not None:
        whole, nucleus, mass = float(probabilities[kept].sum()), [], 0.0
        for token in kept:
            if mass / whole < top_p:
                nucleus.append(token)
            mass += float(probabilities[token])
        kept = nucleus
    return max(kept, key=lambda token: float(probabilities[token]) / float(noise[token]))


def test_logits_that_are_no_numbers_are_refused():
    model = build(None, reference.weights())
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(RewriterError, match=r"logits of prompt 0 are NaN"):
            generate(model, PROMPTS, 2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [17, 20])
def test_a_product_is_the_linear_layer(dtype, rows):
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((2, 1, 33), (rows, 33), (rows,)))
    for given in ((x, weight), (x, weight, bias), (x, weight.T.contiguous().T, bias)):
        torch.testing.assert_close(product(*given), torch.nn.functional.linear(*given))
