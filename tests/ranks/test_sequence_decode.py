"""Keys and values that stay on the ranks of a sequence axis: what decode attends over, and how many tokens fit."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from sequence_decode_ranks import (
    BATCH,
    HEAD,
    KV_HEADS,
    MASKS,
    PLANS,
    PROMPTS,
    STEPS,
    VALUE,
    combinations,
    continued,
    decoded,
    tokens,
)

from rewriter import RewriterError
from rewriter.ir.ops import SequencePlan
from rewriter.runtime import Context, SequenceAxis, SequenceCache, SlotSpec, StaticCache, attention
from rewriter.runtime.attention.sequence_axis import Shards
from rewriter.runtime.cache import NEVER


def axis_of(plan: SequencePlan, rank: int) -> SequenceAxis:
    """A rank's axis without processes: for what does not communicate."""
    return SimpleNamespace(plan=plan, ranks=plan.ranks, rank=rank, key="")


@functools.cache
def on_four_ranks():
    by_rank = run_ranks(decoded, 4, list(PLANS.values()))
    cases = [(name, prompt) for name in PLANS for prompt in PROMPTS for _ in combinations(prompt)]
    return cases, by_rank


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", PLANS)
def test_tokens_after_a_sharded_prompt_see_what_they_see_on_one_device(name, prompt):
    """Windows, chunks, sinks and left padding, one token or several at a time, whatever rank holds the keys."""
    q, k, v = tokens(prompt + sum(STEPS))
    cases, by_rank = on_four_ranks()
    own = [index for index, case in enumerate(cases) if case == (name, prompt)]
    for index, (mask, sinks, first_valid) in zip(own, combinations(prompt), strict=True):
        cache = StaticCache([SlotSpec(KV_HEADS, HEAD, VALUE)], BATCH, prompt + sum(STEPS), q.dtype)

        def attend(part, ctx, mask=mask, sinks=sinks):
            return attention(*(x[:, :, part] for x in (q, k, v)), ctx, slot=0, mask=mask, scale=0.4, sinks=sinks)

        attend(slice(0, prompt), Context(cache, None, first_valid))
        expected = continued(cache, attend, prompt, first_valid)
        for rank in by_rank:
            torch.testing.assert_close(rank[index], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("prompt", [0, 1, 4, 7, 8, 19])
@pytest.mark.parametrize("length", [19, 20, 23])
def test_every_token_has_one_place_on_one_rank_up_to_the_length(name, prompt, length):
    plan, held = PLANS[name], []
    with torch.no_grad():
        for rank in range(4):
            cache = SequenceCache([SlotSpec(1, 1, 1)], axis_of(plan, rank), 1, length, torch.float32)
            if prompt:
                shards = Shards(cache.axis, prompt)
                own = shards.indices.float().view(1, 1, -1, 1)
                cache.store_prompt(0, own, -own, shards)
            for token in range(prompt, length):
                new = torch.full((1, 1, 1, 1), float(token))
                cache.append(0, new, -new, torch.tensor(token))
            places, real = cache.places, cache.places < length
            assert torch.equal(cache.keys[0][0, 0, real, 0], places[real].float())
            assert torch.equal(cache.values[0][0, 0, real, 0], -places[real].float())
            assert places[-1] == NEVER
            held.append(places[real].tolist())
            new = torch.zeros(1, 1, 1, 1)
            with pytest.raises(RewriterError, match=f"{length + 1} tokens, but it was made for max_length={length}"):
                cache.append(0, new, new, torch.tensor(length))
    assert sorted(token for own in held for token in own) == list(range(length))
    sizes = [sum(token >= prompt for token in own) for own in held]
    assert max(sizes) - min(sizes) <= 1


def test_a_cache_is_not_used_where_it_cannot_be_right():
    cache = SequenceCache([SlotSpec(1, 1, 1)], axis_of(PLANS["ring"], 1), 1, 6, torch.float32)
    shards, x = Shards(cache.axis, 8), torch.zeros(1, 1, 2, 1)
    with pytest.raises(RewriterError, match="8 tokens, but it was made for max_length=6"):
        cache.store_prompt(0, x, x, shards)
    with pytest.raises(RewriterError, match="require a gradient"):
        cache.append(0, x.requires_grad_(), x, torch.tensor(3))
    with pytest.raises(RewriterError, match="a full sequence without a sequence axis"):
        attention(x, x, x, Context(cache), slot=0, mask=MASKS[0], scale=1.0)
    with pytest.raises(
        RewriterError, match="slot 0 has a softcap, but attention over tokens of several ranks has none"
    ):
        attention(x, x, x, Context(cache, torch.tensor(3)), slot=0, mask=MASKS[0], scale=1.0, softcap=2.0)


def test_a_new_prompt_replaces_what_was_stored():
    cache = SequenceCache([SlotSpec(1, 1, 1)], axis_of(PLANS["attention2d"], 1), 1, 12, torch.float32)
    for prompt in (9, 2):
        shards = Shards(cache.axis, prompt)
        own = torch.ones(1, 1, shards.count, 1)
        cache.store_prompt(0, own, own, shards)
        assert sorted(p for p in cache.places.tolist() if p < prompt) == [t for t in range(prompt) if t % 4 == 1]
        later = [p for p in cache.places.tolist() if prompt <= p < NEVER]
        assert later == list(range(prompt + 1, prompt + 1 + 4 * len(later), 4))
