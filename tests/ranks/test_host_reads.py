"""What runs for every token reads nothing on the host, which on a GPU would wait for the device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import runtime_reference as reference
import torch
from emitted_ranks import build as emitted_model
from host_reads import HostReads
from programs import program, runtime_case, weights
from qwen_ranks import PROMPTS, build
from ranks import run_ranks

from rewriter.ir.ops import SequencePlan
from rewriter.ir.sequence_plan import join_tokens, take_tokens
from rewriter.runtime import SequenceCache, SlotSpec, generate
from rewriter.runtime.attention.sequence_axis import Shards
from rewriter.runtime.cache import NEVER


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("_local_scalar_dense", lambda x: bool((x > 0).all())),
        ("tolist", lambda x: x.tolist()),
        ("lift_fresh", lambda x: torch.tensor(3)),
        ("nonzero", lambda x: torch.where(x > 0)),
        ("index of a mask", lambda x: x[x > 0]),
        ("_unique2", lambda x: x.unique()),
        ("multinomial", lambda x: torch.multinomial(x, 1)),
    ],
)
def test_every_kind_of_read_is_seen(name, read):
    with HostReads() as reads:
        read(torch.ones(3))
    assert reads.counts[name] == 1


POLL = 8
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "ends": {"eos_token_ids": range(reference.VOCAB - 3, reference.VOCAB + 30)},  # so many that torch.isin would sort
}


def reads_of(group, weights, poll):
    """Per option: what a generation of 4 tokens reads, what one of 24 does, and its tokens."""
    sys.modules["rewriter.runtime.generation.generate"].tokens_between_polls = lambda device: poll
    model, found = build(group, weights), {}
    for name, options in OPTIONS.items():
        rows = []
        for count in (4, 24):
            with HostReads() as reads:
                tokens = generate(model, PROMPTS, count, **options)
            rows.append(reads.counts)
        found[name] = *rows, tokens
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.fast("1")
def test_more_tokens_are_not_more_reads(ranks):
    for found in run_ranks(reads_of, ranks, reference.weights(), POLL):
        for name, (few, many, tokens) in found.items():
            assert max(map(len, tokens)) == 24
            polls = {"_local_scalar_dense": 2} if name == "ends" else {}  # after 8 and 16 tokens
            assert dict(many - few) == polls, name


def test_polls_change_no_tokens():
    """Prompts end between two polls, and the host asks after all have."""
    by_poll = [run_ranks(ended, 1, reference.weights(), poll)[0] for poll in (1, POLL)]
    assert by_poll[0] == by_poll[1]
    assert {len(row) for row in by_poll[0]} == {2, 3}


def ended(group, weights, poll):
    sys.modules["rewriter.runtime.generation.generate"].tokens_between_polls = lambda device: poll
    model = build(group, weights)
    whole = generate(model, PROMPTS[:2], 24)
    return generate(model, PROMPTS[:2], 24, eos_token_ids=[whole[0][1], whole[1][2]])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma2"])
@pytest.mark.fast("mixtral")
def test_an_emitted_model_reads_nothing_for_a_token(family, monkeypatch):
    """Experts as on a GPU, for one prompt; of which the first tokens are many, and are read."""
    monkeypatch.setattr(sys.modules["rewriter.runtime.experts"], "host_waits", lambda x: True)
    source, tensors, ties = runtime_case(program(family), weights(family))
    model = emitted_model(source, tensors[0], ties, None)
    found = []
    for count in (4, 12):
        with HostReads() as reads:
            found.append((reads.counts, generate(model, [list(range(3, 30))], count)))
    (few, first), (many, whole) = found
    assert first[0] == whole[0][:4]
    assert many == few
    monkeypatch.undo()
    assert generate(model, [list(range(3, 30))], 12) == whole


@pytest.mark.parametrize("kind", ["attention2d", "ring"])  # cyclic and zigzag
@pytest.mark.parametrize("length", [1, 7, 8, 19])
def test_shards_of_tokens_and_their_cache_are_found_on_the_device(kind, length):
    x = torch.arange(1.0, length + 1).view(1, length, 1)
    plan = SequencePlan(kind, (1, 4, 1))
    layout = plan.layout
    axes = [SimpleNamespace(plan=plan, ranks=4, rank=rank, key="") for rank in range(4)]
    caches = [SequenceCache([SlotSpec(1, 1, 1)], axis, 1, length + 2, torch.float32) for axis in axes]
    with torch.no_grad(), HostReads() as reads:
        parts = [take_tokens(x, 1, layout, rank, 4, fill=-1) for rank in range(4)]
        whole = join_tokens(parts, 1, layout, length)
        for cache, part in zip(caches, parts, strict=True):
            cache.store_prompt(0, part[:, None], part[:, None], Shards(cache.axis, length))
    assert not reads.counts
    assert torch.equal(whole, x)
    for cache, part in zip(caches, parts, strict=True):
        own = [place for place in cache.places[: part.shape[1]].tolist() if place != NEVER]
        assert part.flatten().tolist() == [place + 1.0 for place in own] + [-1.0] * (part.shape[1] - len(own))
        assert cache.prompt.tolist() == [length, part.shape[1]]
