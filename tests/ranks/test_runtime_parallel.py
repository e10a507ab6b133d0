"""The sharded module on real ranks equals the whole model on one device: logits, every gradient, greedy tokens,
schedule."""

from __future__ import annotations

import pytest
import ranks as _ranks  # noqa: F401  (its fork server starts before transformers is imported)
import runtime_reference as reference
import torch
import torch.nn.functional as F
from qwen_ranks import LADDER_FROM, LAYERS, PROMPTS, build
from ranks import run_ranks

from rewriter import RewriterError
from rewriter.runtime import Context, generate, record_events
from rewriter.runtime.generation.decode_step import cut
from rewriter.runtime.generation.generate import left_pad, positions


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def batch():
    return torch.randint(0, reference.VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))


def train_once(group, weights, ids, ladder_from):
    model = build(group, weights, ladder_from)
    logits = model(ids, torch.arange(ids.shape[1]).expand_as(ids), Context())
    loss_of(logits, ids).backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ladder_from", [LADDER_FROM, LAYERS], ids=["ladder", "standard"])
def test_logits_and_every_gradient_equal_one_device(size, ladder_from, batch):
    whole = {name: value.double().requires_grad_() for name, value in reference.weights().items()}
    expected = reference.logits(whole, batch, ladder_from)
    loss_of(expected, batch).backward()
    for rank, (logits, gradients) in enumerate(run_ranks(train_once, size, reference.weights(), batch, ladder_from)):
        assert relative(logits, expected.detach()) < 1e-5
        assert gradients.keys() == whole.keys()
        for name, gradient in gradients.items():
            assert relative(gradient, reference.shard(name, whole[name].grad, rank, size)) < 1e-4, name


def test_ladder_differs_from_the_original(batch):
    w = reference.weights()
    assert relative(reference.logits(w, batch, LADDER_FROM), reference.logits(w, batch, LAYERS)) > 1e-1


def both_ways(group, weights, prompts, count):
    model = build(group, weights)
    ends = sorted({generate(model, prompts, 4)[0][3]})
    return (
        generate(model, prompts, count),
        generate(model, prompts, count, use_cache=False),
        (ends, generate(model, prompts, count, eos_token_ids=ends)),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.fast("2")
def test_greedy_tokens_equal_one_device_with_padding_cache_and_end(size):
    w = {name: value.double() for name, value in reference.weights().items()}
    expected = [reference.greedy(w, prompt, 24, LADDER_FROM) for prompt in PROMPTS]
    assert min(len(set(row)) for row in expected) >= 8, "a repeating sequence would prove little"
    for cached, recomputed, (ends, stopped) in run_ranks(both_ways, size, reference.weights(), PROMPTS, 24):
        assert cached == expected
        assert recomputed == expected
        for row, whole in zip(stopped, expected, strict=True):
            end = next((i + 1 for i, token in enumerate(whole) if token in ends), len(whole))
            assert row == whole[:end]
        assert len(stopped[0]) <= 4 < 24


def sampled(group, weights, prompts):
    model = build(group, weights)
    generator = dict(temperature=1.3, top_k=20, top_p=0.9)
    return generate(model, prompts, 12, seed=3, **generator), generate(model, prompts, 12, seed=4, **generator)


def test_sampling_is_the_same_on_every_rank_and_follows_the_seed():
    results = run_ranks(sampled, 2, reference.weights(), PROMPTS)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def stopped(group, weights, prompts, wanted):
    """Each prompt is ended after as many tokens as `wanted` says, by the first rank."""
    model, seen = build(group, weights), [[] for _ in prompts]

    def on_token(prompt, token):
        seen[prompt].append(token)
        return len(seen[prompt]) == wanted[prompt]

    return seen, generate(model, prompts, 12, on_token=on_token), generate(model, prompts, 12)


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_rank_gets_every_token_and_ends_prompts_on_all(size):
    wanted = [3, 1, 12, 5]
    for rank, (seen, tokens, whole) in enumerate(run_ranks(stopped, size, reference.weights(), PROMPTS, wanted)):
        assert tokens == [row[:count] for row, count in zip(whole, wanted, strict=True)]
        assert seen == (tokens if rank == 0 else [[] for _ in PROMPTS])


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.7), (5, None), (8, 0.6), (500, 0.999), (1, 0.01), (None, 1.0)])
def test_what_is_sampled_from_is_what_transformers_samples_from(top_k, top_p):
    from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(4, reference.VOCAB, generator=torch.Generator().manual_seed(2))
    warpers = [kind(value) for kind, value in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p)) if value]
    theirs = LogitsProcessorList(warpers)
    torch.testing.assert_close(cut(logits, top_k, top_p), theirs(None, logits.clone()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0, expected at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0, expected more than 0 and at most 1"),
        ({"top_p": 0.9}, "top_p is 0.9, but at temperature 0 the likeliest token is taken"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"prompts": [[1], []]}, "a prompt has no tokens"),
        ({"eos_token_ids": [None]}, r"eos_token_ids is \[None\], expected numbers of tokens"),
    ],
)
def test_arguments_of_generate_outside_of_their_range_are_refused(options, message):
    with pytest.raises(RewriterError, match=message):
        generate(build(None, reference.weights()), **{"prompts": PROMPTS, "max_new_tokens": 2, **options})


def schedule(group, weights, ids):
    model = build(group, weights)
    with torch.no_grad(), record_events() as events:
        model(ids, torch.arange(ids.shape[1]).expand_as(ids), Context())
    return [(event.kind, event.name, event.bytes, event.ranks) for event in events]


def test_events_are_every_start_and_wait_where_the_module_puts_it(batch):
    """That a profile shows them among computation is tested with emitted modules (test_profile)."""
    expected = [("start", "embed"), ("wait", "embed")]
    for i in range(LADDER_FROM):
        expected += [(kind, f"layers.{i}.{block}") for block in ("attn", "mlp") for kind in ("start", "wait")]
    expected.pop()  # the first ladder layer's MLP hides it
    for i in range(LADDER_FROM, LAYERS):
        for block in ("attn", "mlp"):
            if i > LADDER_FROM or block == "mlp":
                expected.append(("wait", f"layers.{i - 1}.{block}"))
            expected.append(("start", f"layers.{i}.{block}"))
    expected += [("wait", f"layers.{LAYERS - 1}.{block}") for block in ("attn", "mlp")]
    size = batch.numel() * reference.HIDDEN * 4
    for events in run_ranks(schedule, 2, reference.weights(), batch):
        assert [(kind, name) for kind, name, _, _ in events if kind in ("start", "wait")] == expected
        assert all(amount == size and ranks == 2 for kind, _, amount, ranks in events if kind == "start")
        assert events[-1] == ("all_gather", "head", batch.numel() * reference.VOCAB // 2 * 4, 2)


@pytest.mark.parametrize("layer_kind", ["full", "sliding"])
def test_standard_layers_equal_transformers(layer_kind, batch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    kinds = ["full_attention", "sliding_attention"] * (LAYERS // 2)
    config = Qwen3Config(
        vocab_size=reference.VOCAB,
        hidden_size=reference.HIDDEN,
        intermediate_size=reference.INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=reference.HEADS,
        num_key_value_heads=reference.KV_HEADS,
        head_dim=reference.HEAD,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=reference.WINDOW,
        layer_types=kinds,
        tie_word_embeddings=False,
        attn_implementation="eager" if layer_kind == "full" else "sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = Qwen3ForCausalLM(config).eval()
    theirs.load_state_dict(reference.weights())
    ours = build(None, reference.weights(), LAYERS)
    ids, first_valid = left_pad(PROMPTS, 0)
    mask = (torch.arange(ids.shape[1]) >= first_valid[:, None]).long()
    with torch.no_grad():
        logits = ours(
            ids, positions(ids.shape[1], first_valid, len(PROMPTS), ids.device), Context(None, None, first_valid)
        )
        real = mask.bool()
        assert relative(logits[real], theirs(ids, attention_mask=mask).logits[real]) < 1e-5
    tokens = theirs.generate(ids, attention_mask=mask, max_new_tokens=32, do_sample=False)[:, ids.shape[1] :].tolist()
    assert generate(ours, PROMPTS, 32) == tokens
