"""The emitted module on real ranks computes what the oracle says: logits, gradients, greedy tokens with its cache."""

from __future__ import annotations

import re

import pytest
import torch
import zoo
from emitted_ranks import PAD, TOLERANCE, build, compare_gradients, on_rank
from oracles import greedy_oracle, ladder_logits, ladder_oracle, relative_error
from programs import program, runtime_case, shards, weights
from ranks import run_ranks

from rewriter.emit.module import emit_runtime_module
from rewriter.passes import available


def compiled_tokens_on_rank(group, cases, prompts, new_tokens, backend):
    """Per case: greedy tokens by steps that are compiled, and how they were."""
    from rewriter.runtime import compile_segments, generate
    from rewriter.runtime.generation.decode_step import decode_step

    found = []
    for source, tensors, ties in cases:
        torch.compiler.reset()
        model = build(source, tensors[0 if group is None else group.rank()], ties, group)
        compile_segments(model, backend=backend)
        tokens = generate(model, prompts, new_tokens, pad_token_id=PAD)
        found.append((tokens, decode_step(model, len(prompts), 1, group).how))
    return found


def check(name: str, ranks: int, selections: dict[str, set[int]], new_tokens: int) -> None:
    model = zoo.build(name)
    ids = zoo.batch(2, 21, model.config.vocab_size)
    ids[:, ::7] = PAD  # whose row of the embedding has no gradient
    prompts = zoo.prompts(8, model.config.vocab_size)
    programs = {label: program(name, layers, ranks) for label, layers in selections.items()}
    cases = [runtime_case(p, weights(name)) for p in programs.values()]
    if ranks == 1:
        by_rank = [on_rank(None, cases, ids, prompts, new_tokens)]
    else:
        by_rank = run_ranks(on_rank, ranks, cases, ids, prompts, new_tokens)
    for index, (label, layers) in enumerate(selections.items()):
        expected = ladder_logits(model, layers, ids)
        results = [rank[index] for rank in by_rank]
        for logits, _, _ in results:
            assert relative_error(logits, expected) <= TOLERANCE, label
        with ladder_oracle(model, layers) as oracle:
            oracle.zero_grad()
            oracle(ids).logits.square().mean().backward()
        compare_gradients(programs[label], [grads for _, grads, _ in results], model)
        if new_tokens:
            with ladder_oracle(model, layers) as oracle:
                wanted = greedy_oracle(lambda x, m=oracle: m(x).logits, prompts, new_tokens)
            assert all(tokens == wanted for _, _, tokens in results), label


@pytest.mark.parametrize("name", zoo.FAMILIES)
@pytest.mark.fast("gemma3_text", "qwen3_moe")
def test_emitted_modules_on_two_real_ranks_equal_the_oracle(name):
    depth = zoo.shared(name).config.num_hidden_layers
    check(name, 2, zoo.selections(depth), new_tokens=0)


@pytest.mark.parametrize("name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.slow) for n in zoo.FAMILIES])
def test_emitted_modules_on_four_real_ranks_equal_the_oracle(name):
    depth = zoo.shared(name).config.num_hidden_layers
    check(name, 4, zoo.selections(depth), new_tokens=0)


@pytest.mark.parametrize("ranks", [1, 2])  # on 4 below
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
@pytest.mark.fast("llama-1", "gemma3_text-2", "qwen3_moe-2")
def test_greedy_tokens_on_real_ranks_equal_recomputation_without_a_cache(name, ranks):
    depth = zoo.shared(name).config.num_hidden_layers
    check(name, ranks, {"upper-half": zoo.selections(depth)["upper-half"]}, new_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_64_greedy_tokens_on_real_ranks_equal_recomputation_without_a_cache(name, ranks):
    depth = zoo.shared(name).config.num_hidden_layers
    check(name, ranks, zoo.selections(depth), new_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_64_greedy_tokens_of_compiled_steps_equal_recomputation_without_a_cache(name, ranks):
    model = zoo.build(name)
    vocabulary = model.config.vocab_size
    padded = zoo.prompts(8, vocabulary)
    alike = [(prompt * 12)[:12] for prompt in padded]  # of one length: without padding
    cases = [runtime_case(program(name, (), ranks), weights(name))]
    for prompts in (padded, alike):
        arguments = (cases, prompts, 64, "eager")
        by_rank = (
            [compiled_tokens_on_rank(None, *arguments)]
            if ranks == 1
            else run_ranks(compiled_tokens_on_rank, ranks, *arguments, timeout=400)
        )
        wanted = greedy_oracle(lambda x: model(x).logits, prompts, 64)
        assert [rank[0] for rank in by_rank] == [(wanted, "compiled segments")] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_compiled_segments_of_an_emitted_module_compute_the_same(name):
    """Segments hold every computation of a layer and no collective; compiling them changes nothing."""
    from rewriter.runtime import Context, compile_segments, generate

    sharded = program(name, zoo.selections(zoo.shared(name).config.num_hidden_layers)["upper-half"])
    source, tensors = emit_runtime_module(sharded), shards(sharded, weights(name))[0]
    ids, prompts = (
        zoo.batch(2, 21, zoo.shared(name).config.vocab_size),
        zoo.prompts(3, zoo.shared(name).config.vocab_size),
    )
    positions = torch.arange(21).expand(2, 21)
    plain = build(source, tensors, dict(sharded.ties), None)
    compiled = build(source, tensors, dict(sharded.ties), None)
    names = compile_segments(compiled, backend="eager")
    assert names
    with torch.no_grad():
        expected = plain(ids, positions, Context())
        assert relative_error(compiled(ids, positions, Context()), expected) <= 1e-6
    assert generate(compiled, prompts, 8, pad_token_id=PAD) == generate(plain, prompts, 8, pad_token_id=PAD)


def test_logits_can_be_asked_for_the_last_tokens_only():
    """Prefill need not pass every token through the head."""
    from rewriter.runtime import Context

    sharded = program("llama")
    model = build(emit_runtime_module(sharded), shards(sharded, weights("llama"))[0], {}, None)
    ids = zoo.batch(2, 21, 256)
    positions = torch.arange(21).expand(2, 21)
    with torch.no_grad():
        everything = model(ids, positions, Context())
        assert relative_error(model(ids, positions, Context(), logits_to_keep=1), everything[:, -1:]) <= 1e-6


def test_positions_and_context_are_filled_in():
    """A model takes token ids alone; left padding shifts the positions of what follows it."""
    from rewriter.common.errors import RewriterError
    from rewriter.runtime import Context, StaticCache
    from rewriter.runtime.generation.generate import positions

    sharded = program("llama")
    model = build(emit_runtime_module(sharded), shards(sharded, weights("llama"))[0], {}, None)
    ids, padding = zoo.batch(2, 21, 256), torch.tensor([0, 5])
    padded = Context(first_valid=padding)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), model(ids, torch.arange(21).expand(2, 21), Context()))
        expected = model(ids, positions(21, padding, 2, ids.device), padded)
        torch.testing.assert_close(model(ids, ctx=padded), expected)
        later = Context(StaticCache(model.slots, 2, 32, torch.float32, ids.device), torch.tensor(4))
        with pytest.raises(RewriterError, match="Pass their positions"):
            model(ids[:, :1], ctx=later)


@pytest.mark.parametrize(
    ("passes", "names"),
    [
        ([], ["First", "", "", ""]),
        ([("ladder", {"layers": [2, 3]})], ["First", "", "FirstLadder", "Ladder"]),
        ([("ladder", {"layers": [0, 1]})], ["FirstLadder", "Ladder", "Drained", ""]),
        ([("desync", {"n": 2})], ["Desync"] * 4),
        ([("desync", {"n": 4})], ["Desync", "Resync"] * 2),
        (
            [("ladder", {"variant": "own_partial"})],
            ["FirstOwnPartialLadder", *["OwnPartialLadder"] * 2, "LastOwnPartialLadder"],
        ),
        ([("parallel_block", {}), ("merge_reductions", {})], ["FirstParallel", *["Parallel"] * 3]),
    ],
)
def test_layers_are_named_after_how_they_are_wired(passes, names):
    sharded = program("llama", tp=2, overlap=False)
    for name, options in [*passes, ("overlap", {})]:
        sharded = available()[name](**options).apply(sharded)
    listed = emit_runtime_module(sharded).split("nn.ModuleList(")[1].split("def compute")[0]
    found = []
    for line in listed.splitlines():
        if (layer := re.search(r"(\w*)LlamaDecoderLayer\(tp, slot", line)) is not None:
            run = re.search(r"range\((?:(\d+), )?(\d+)\)", line)
            found += [layer[1]] * (int(run[2]) - int(run[1] or 0) if run else 1)
    assert found == names
