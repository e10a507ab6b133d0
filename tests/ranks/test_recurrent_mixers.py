"""Models with recurrent mixers on real ranks: logits, gradients, and greedy tokens of padded prompts, in chunks of a
prefill, eager, compiled and as a replayed step, as transformers computes and generates them."""

from __future__ import annotations

import copy

import decode_steps
import hybrids
import pytest
import torch
from decode_steps import STEPS, replayed
from emitted_ranks import TOLERANCE, build, compare_gradients, on_rank
from oracles import relative_error
from programs import runtime_case, tensor_parallel
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from rewriter.api import convert
from rewriter.convert.save_options import SaveOptions

as_on_a_gpu = decode_steps.as_on_a_gpu
MERGE, OVERLAP = ("merge_reductions", {}), ("overlap", {})


def program(name, ranks):
    return tensor_parallel(hybrids.traced(name), ranks, MERGE, OVERLAP)


def on_ranks(function, ranks, *arguments):
    return [function(None, *arguments)] if ranks == 1 else run_ranks(function, ranks, *arguments)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*hybrids.TYPES, *hybrids.OTHERS])
@pytest.mark.fast("kimi_linear-2", "falcon_mamba-2", "falcon_h1-4")
def test_logits_and_gradients_are_those_of_one_device(name, ranks):
    model, sharded = hybrids.model(name), program(name, ranks)
    ids = torch.randint(3, 100, (2, 70), generator=torch.Generator().manual_seed(3))
    cases = [runtime_case(sharded, hybrids.weights(name))]
    by_rank = [results[0] for results in on_ranks(on_rank, ranks, cases, ids, None, 0)]
    model.zero_grad()
    expected = model(input_ids=ids, use_cache=False).logits
    expected.square().mean().backward()
    for logits, _, _ in by_rank:
        assert relative_error(logits, expected.detach()) <= TOLERANCE
    trained = dict(model.named_parameters())
    learned = {n: p for n, p in sharded.parameters.items() if n in trained}
    assert learned
    compare_gradients(sharded.with_(parameters=learned), [grads for _, grads, _ in by_rank], model)
    model.zero_grad()


def tokens_on_rank(group, case, prompts, count, ways):
    """Greedy tokens by each of `ways`: "eager", "chunks" of a prefill, "compiled"."""
    from rewriter.runtime import compile_segments, generate

    source, tensors, ties = case
    model = build(source, tensors[0 if group is None else group.rank()], ties, group)
    found = []
    for way in ways:
        if way == "compiled":
            torch.compiler.reset()
            compile_segments(model, backend="aot_eager")
        found.append(generate(model, prompts, count, prefill_chunk=7 if way == "chunks" else None))
    return found


WAYS = ("eager", "chunks", "compiled")


def check_tokens(name, ranks, count, ways=WAYS):
    prompts = hybrids.prompts(hybrids.model(name).config.get_text_config().vocab_size)
    expected = hybrids.generated(name, prompts, count)
    case = runtime_case(program(name, ranks), hybrids.weights(name))
    for results in on_ranks(tokens_on_rank, ranks, case, prompts, count, ways):
        for way, tokens in zip(ways, results, strict=True):
            assert tokens == expected, way


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_greedy_tokens_are_those_of_transformers(name):
    check_tokens(name, 2, 16, ("eager", "chunks"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*hybrids.TYPES, *hybrids.OTHERS])
def test_64_greedy_tokens_are_those_of_transformers(name, ranks):
    check_tokens(name, ranks, 64)


@pytest.mark.parametrize("name", [*hybrids.TYPES, *hybrids.OTHERS])
@pytest.mark.fast("falcon_h1")
def test_a_replayed_step_gives_the_tokens_of_transformers(name, as_on_a_gpu):
    source, tensors, ties = runtime_case(program(name, 1), hybrids.weights(name))
    prompts = torch.randint(3, 100, (3, 11), generator=torch.Generator().manual_seed(5)).tolist()
    got, _ = replayed(build(source, tensors[0], ties, None), prompts)
    assert got == hybrids.generated(name, prompts, STEPS)


def logits_on_rank(group, directory, ids):
    from rewriter.runtime import load

    with torch.no_grad():
        return load(directory)(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*hybrids.TYPES, *hybrids.OTHERS])
@pytest.mark.fast("mamba-dtype0", "falcon_h1-dtype1")
@torch.no_grad()
def test_a_narrow_dtype_errs_as_transformers_does_in_it(name, dtype, tmp_path):
    """By the fp32 model; some types add in fp32 in any dtype, and keep single parameters in it. Where an expert is
    hardly better than the next one, rounding chooses: a token in ten may have another."""
    ids = torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(3))
    exact = hybrids.model(name)(input_ids=ids, use_cache=False).logits
    copy.deepcopy(hybrids.model(name)).to(dtype).save_pretrained(tmp_path / "source")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype, attn_implementation="eager")
    theirs = relative_error(narrow(input_ids=ids, use_cache=False).logits.float(), exact)
    convert(tmp_path / "source", "tensor-parallel", out=tmp_path / "out", tp=2, options=SaveOptions(verify="none"))
    least = 0.9 if any(".experts." in parameter for parameter in hybrids.weights(name)) else 1.0
    for logits in run_ranks(logits_on_rank, 2, tmp_path / "out", ids):
        errors = (logits.float() - exact).abs().amax(-1) / exact.abs().max()
        assert (errors <= 2 * theirs + 1e-3).float().mean() >= least
