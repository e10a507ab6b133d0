"""What `rewrite inspect` says of collectives is what ranks do: every recipe of the library is counted at run time."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from emitted_ranks import build, import_source, load, prefill_and_step
from programs import runtime_case, shards, traced, weights
from ranks import run_ranks

from rewriter.emit.module import emit_runtime_module
from rewriter.explain.inspection import inspect
from rewriter.ir import Program
from rewriter.ir.communication import by_place, collectives, summary
from rewriter.passes.phases import exact_wiring
from rewriter.passes.sequence.distributed_attention import wire_bytes
from rewriter.passes.sequence.sequence_plans import attention_shapes, sequence_plan
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.recipes.catalogue import library

RANKS = 2
TOKEN_RANKS = {"attention2d": 2, "ring-attention": 2, "ulysses": 2, "long-context": 2}  # --sp; 1 for the others
BATCH, LENGTH = 2, 7
# The same options for the report and for the program; what is measured on weights is fixed here.
OPTIONS: dict[str, dict[str, Any]] = {
    "ladder-last-20": {"ladder.layers": "last:2"},
    "drop-sync": {"drop_sync.layers": [1, 3]},
}
# Block reductions per token of a model with L = 5 layers of attention and MLP.
LAYERS = 5
EXPECTED = {
    "tensor-parallel": 2 * LAYERS,
    "fit-tp": 2 * LAYERS,
    "parallel": LAYERS,
    "desync-2x": LAYERS,
    "desync-2x-sum": LAYERS,
    "desync-4x": 3,  # ⌈L/2⌉: every fourth, and the last
    "desync-4x-sum": 3,
    "ladder": 2 * LAYERS,
    "ladder-int8": 2 * LAYERS,
    "tensor-parallel-int8": 2 * LAYERS,
    "tensor-parallel-int4": 2 * LAYERS,
    "ladder-upper-half": 2 * LAYERS,
    "ladder-last-20": 2 * LAYERS,
    "ladder-own-partial": 2 * LAYERS,
    "ladder-then-desync": 2 * LAYERS - 2,  # the last quarter is two layers, whose attention reductions are dropped
    "drop-sync": 2 * LAYERS - 2,
    "upper-bound": 0,
    **dict.fromkeys(TOKEN_RANKS, 2 * LAYERS),  # of a rank's own tokens
}
# Reductions that overlap with another block.
HIDDEN = {
    "ladder": 2 * LAYERS - 1,
    "ladder-int8": 2 * LAYERS - 1,
    "ladder-own-partial": 2 * LAYERS - 1,
    "ladder-upper-half": 6,  # layers 2–4, begun by the MLP before them
    "ladder-last-20": 4,
    "ladder-then-desync": 2,
}
# Bytes of a quantized token, codes and half of the scale of a block of 128, where they are not 4 per channel.
PAYLOAD = {"tensor-parallel-int8": 64 + 1, "tensor-parallel-int4": 32 + 1, "ladder-int8": 64 + 1}


# The same of tokens that are rewired, where those of the prompt alone are; exact ones have a standard model's.
PROMPT = {
    "prefill-ladder-upper-half": (2 * LAYERS, 6),
    "prefill-ladder": (2 * LAYERS, 2 * LAYERS - 1),
    "prefill-desync-2x-sum": (LAYERS, 0),
    "prefill-desync-4x-sum": (3, 0),
    "prefill-int8": (2 * LAYERS, 0),
    "prefill-desync-2x-sum-int8": (LAYERS, 0),
}


@functools.cache
def rewritten(family: str, recipe: str) -> Program:
    loaded = load_recipe(recipe, OPTIONS.get(recipe))
    return apply_recipe(traced(family), loaded, RANKS, sp=TOKEN_RANKS.get(recipe, 1))[0]


def counted(group: Any, cases: list[Any], ids: torch.Tensor) -> list[Any]:
    """Per case, the events of a prefill and of a decode step: (kind, bytes)."""
    results = []
    for source, tensors, ties in cases:
        found = prefill_and_step(build(source, tensors[group.rank()], ties, group), ids)
        results.append([[(e.kind, e.bytes) for e in events] for events in found])
    return results


@functools.cache
def at_run_time(family: str, recipes: tuple[str, ...]) -> list[dict[str, Any]]:
    """By rank, the events of every recipe."""
    cases = []
    for recipe in recipes:
        program = rewritten(family, recipe)
        cases.append(runtime_case(program, weights(family)))
    ids = zoo.batch(BATCH, LENGTH, zoo.shared(family).config.vocab_size)
    by_rank = run_ranks(counted, RANKS, cases, ids)
    return [dict(zip(recipes, results, strict=True)) for results in by_rank]


def counted_over_tokens(group: Any, cases: list[Any], ids: torch.Tensor) -> list[Any]:
    """Per case, the events of a prefill whose tokens are sharded: (kind, name, bytes, bytes from other ranks)."""
    from rewriter.runtime import record_events, sequence_mesh

    results = []
    for source, tensors, ties, grid in cases:
        mesh = sequence_mesh("cpu", grid, tensor_parallel=RANKS)
        model = load(import_source(source).Model(mesh), tensors[mesh.get_local_rank("tp")], ties)
        with torch.no_grad(), record_events() as events:
            model(ids)
        results.append([(e.kind, e.name, e.bytes, e.received) for e in events])
    return results


@functools.cache
def over_tokens(family: str) -> list[dict[str, Any]]:
    """By rank, the events of every recipe that shards tokens."""
    cases = []
    for recipe in TOKEN_RANKS:
        program = rewritten(family, recipe)
        tensors = shards(program, weights(family))
        cases.append((emit_runtime_module(program), tensors, dict(program.ties), sequence_plan(program).grid))
    ids = zoo.batch(BATCH, LENGTH, zoo.shared(family).config.vocab_size)
    by_rank = run_ranks(counted_over_tokens, 2 * RANKS, cases, ids)
    return [dict(zip(TOKEN_RANKS, results, strict=True)) for results in by_rank]


def reported_collectives(family: str, recipe: str) -> list[Any]:
    """Those of the analysis, which the report's sums are."""
    found = collectives(rewritten(family, recipe))
    loaded, sp = load_recipe(recipe, OPTIONS.get(recipe)), TOKEN_RANKS.get(recipe, 1)
    reported = inspect(zoo.config(family), loaded, RANKS, sp=sp).data["communication"]["after"]
    assert reported["total"]["collectives"] == len(found)
    assert reported["total"]["bytes_per_token"] == sum(c.bytes_per_token for c in found)
    return list(found)


def compare(family: str, recipe: str, recipes: tuple[str, ...]) -> None:
    """Number and bytes of all-reduces and gathers on every rank, in prefill and decode, are those of the analysis."""
    found = reported_collectives(family, recipe)
    # messages of so few tokens are exact also where longer ones are quantized
    sums = [c.exact_bytes_per_token for c in found if c.kind == "all-reduce"]
    gathers = [c.bytes_per_token for c in found if c.kind == "all-gather"]
    for rank in at_run_time(family, recipes):
        for events, tokens in zip(rank[recipe], (BATCH * LENGTH, BATCH), strict=True):
            started = [size for kind, size in events if kind == "start"]
            assert len(started) == len([1 for kind, _ in events if kind == "wait"]) == len(sums)
            assert sum(started) == tokens * sum(sums)
            gathered = [size * RANKS for kind, size in events if kind == "all_gather"]  # an event is a rank's own part
            assert sorted(gathered) == sorted(tokens * size for size in gathers)


def compare_over_tokens(family: str, recipe: str) -> None:
    """The same of a prefill whose tokens are sharded, and the bytes that attention receives are the planner's."""
    found, program = reported_collectives(family, recipe), rewritten(family, recipe)
    sums = [c.bytes_per_token for c in found if c.kind == "all-reduce"]
    vocabulary, logits = (c.bytes_per_token for c in found if c.kind == "all-gather")
    plan, shapes = sequence_plan(program), attention_shapes(program)
    assert plan is not None
    own = BATCH * plan.local_tokens(LENGTH)
    for rank, results in enumerate(over_tokens(family)):
        events = results[recipe]
        started = [size for kind, _, size, _ in events if kind == "start"]
        assert len(started) == len([1 for kind, *_ in events if kind == "wait"]) == len(sums)
        assert sum(started) == own * sum(sums)
        assert [RANKS * size for kind, _, size, _ in events if kind == "all_gather"] == [own * vocabulary]
        received: Counter[str] = Counter()
        for kind, name, _, size in events:
            received[name] += size if kind == "wire" else 0
        # whether ranks were given the same: four numbers of each of five inputs, whatever their size
        assert received.pop("agreement") == (plan.ranks * RANKS - 1) * 5 * 4 * 8
        assert received.pop("tokens") == (plan.ranks - 1) * own * logits
        planned = [wire_bytes(plan, replace(s, batch=BATCH), LENGTH, rank // RANKS).forward for s in shapes]
        assert sum(received.values()) == sum(s.layers * size for s, size in zip(shapes, planned, strict=True)) > 0


def test_every_recipe_of_the_library_is_expected_here() -> None:
    assert EXPECTED.keys() | PROMPT.keys() == library().keys()


def counted_by_phase(group: Any, cases: list[Any], ids: torch.Tensor) -> list[Any]:
    """Per case, the bytes of each all-reduce of a pass over rewired tokens and of one over exact ones."""
    from rewriter.runtime import Context, record_events

    results = []
    for source, tensors, ties in cases:
        model, found = build(source, tensors[group.rank()], ties, group), []
        for rewired in (True, False):
            with torch.no_grad(), record_events() as events:
                model(ids, ctx=Context(rewired=rewired))
            found.append([e.bytes for e in events if e.kind == "start"])
        results.append(found)
    return results


def test_collectives_of_both_phases_are_those_of_the_report() -> None:
    programs = {recipe: rewritten("qwen3", recipe) for recipe in PROMPT}
    cases = [runtime_case(program, weights("qwen3")) for program in programs.values()]
    ids = zoo.batch(BATCH, LENGTH, zoo.shared("qwen3").config.vocab_size)
    for rank in run_ranks(counted_by_phase, RANKS, cases, ids):
        for (recipe, program), (rewired, exact) in zip(programs.items(), rank, strict=True):
            for started, wiring in ((rewired, program), (exact, exact_wiring(program))):
                sums = [c.exact_bytes_per_token for c in collectives(wiring) if c.kind == "all-reduce"]
                assert sorted(started) == sorted(BATCH * LENGTH * size for size in sums)
            blocks = by_place(collectives(program))["block"]
            assert (blocks.collectives, blocks.hidden) == PROMPT[recipe]
            standard = by_place(collectives(exact_wiring(program)))["block"]
            assert (standard.collectives, standard.hidden) == (2 * LAYERS, 0)


@pytest.mark.parametrize("recipe", sorted(EXPECTED))
def test_collectives_at_run_time_are_those_of_the_report(recipe: str) -> None:
    if recipe in TOKEN_RANKS:
        compare_over_tokens("qwen3", recipe)
    else:
        compare("qwen3", recipe, tuple(sorted(EXPECTED.keys() - TOKEN_RANKS)))
    found = by_place(collectives(rewritten("qwen3", recipe)))
    blocks = found.pop("block", summary([]))
    assert (blocks.collectives, blocks.hidden) == (EXPECTED[recipe], HIDDEN.get(recipe, 0))
    each = PAYLOAD.get(recipe, zoo.HIDDEN * 4)
    assert blocks.bytes_per_token == EXPECTED[recipe] * each
    # embedding and head apart: one collective each, and the logits of all tokens
    head = 2 if recipe in TOKEN_RANKS else 1
    assert {place: t.collectives for place, t in found.items()} == (
        {} if recipe == "upper-bound" else {"embedding": 1, "head": head}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe", "blocks"),
    [
        ("gpt_neox", "tensor-parallel", 4),  # parallel blocks reduce once per layer
        ("gpt_neox", "desync-2x", 2),
        ("gpt2", "desync-2x-sum", 4),
        ("olmo2", "ladder", 8),  # norms over all heads reduce inside of attention
        ("mixtral", "ladder-own-partial", 8),
    ],
)
def test_other_families_communicate_as_reported(family: str, recipe: str, blocks: int) -> None:
    compare(family, recipe, (recipe,))
    places = by_place(collectives(rewritten(family, recipe)))
    assert places["block"].collectives == blocks
    assert ("inside a block" in places) == (family == "olmo2")
