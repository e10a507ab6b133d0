"""Modules of programs that rewire tokens of the prompt alone, on ranks: every entry, chunks, padding, generation."""

from __future__ import annotations

import itertools
import random

import torch
from emitted_ranks import PAD, build, import_source, load

WHOLE = ("rewired", "exact", "mixed", "default")


@torch.no_grad()
def whole_calls(model, ids, mask):
    """Logits by entry of calls without a cache."""
    from rewriter.runtime import Context

    said = {"rewired": True, "exact": False, "mixed": mask, "default": None}
    return {name: model(ids, ctx=Context(rewired=said[name])) for name in WHOLE}


@torch.no_grad()
def in_chunks(model, ids, mask, seed):
    """Logits of calls against one cache, cut at random places; pure ones by entries of their own, sometimes."""
    from rewriter.runtime import Context, StaticCache

    draw, length = random.Random(seed), ids.shape[1]
    cache = StaticCache(model.slots, ids.shape[0], length, next(model.parameters()).dtype)
    cuts = [0, *sorted(draw.sample(range(1, length), draw.randint(1, 6))), length]
    found = []
    for start, end in itertools.pairwise(cuts):
        part = mask[:, start:end]
        if draw.random() < 0.7 and bool(part.all() or not part.any()):
            part = bool(part.all())
        place = torch.tensor(start) if start else None
        here = torch.arange(start, end).expand(ids.shape[0], -1)
        found.append(model(ids[:, start:end], here, Context(cache, place, rewired=part)))
    return torch.cat(found, 1)


@torch.no_grad()
def stored(model, ids, logits_to_keep):
    """Keys and values after a prompt of rewired tokens in two calls, with and without logits; and what was called."""
    from rewriter.runtime import Context, StaticCache, record_events

    cache = StaticCache(model.slots, ids.shape[0], ids.shape[1], next(model.parameters()).dtype)
    with record_events() as events:
        for start, end in ((0, 7), (7, ids.shape[1])):
            place = torch.tensor(start) if start else None
            here = torch.arange(start, end).expand(ids.shape[0], -1)
            model(ids[:, start:end], here, Context(cache, place, rewired=True), logits_to_keep)
    return [*cache.keys, *cache.values], len(events)


@torch.enable_grad()
def gradients(model, ids, mask):
    from rewriter.runtime import Context

    model.zero_grad()
    model(ids, ctx=Context(rewired=mask)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def generated(model, prompts, new_tokens, compile=None):
    """Greedy tokens: in chunks of several sizes, and without a cache."""
    from rewriter.runtime import compile_segments, generate

    if compile is not None:
        torch.compiler.reset()
        compile_segments(model, backend=compile)
    found = [generate(model, prompts, new_tokens, pad_token_id=PAD, prefill_chunk=n) for n in (None, 3, 8)]
    if compile is None:
        found.append(generate(model, prompts, new_tokens, pad_token_id=PAD, use_cache=False))
    return found


def everything(group, cases, ids, mask, prompts, new_tokens):
    """Per case, a dictionary of all of the above."""
    from rewriter.runtime import Context

    results = []
    for source, tensors, ties in cases:
        model = build(source, tensors[0 if group is None else group.rank()], ties, group)
        with torch.no_grad():
            padded = model(ids, ctx=Context(first_valid=torch.tensor([0, 5])))
        results.append(
            {
                "whole": whole_calls(model, ids, mask),
                "chunks": [in_chunks(model, ids, mask, seed) for seed in range(4)],
                "padded": padded[1, 5:],
                "stored": [stored(model, ids, wanted) for wanted in (0, None)],
                "gradients": gradients(model, ids, mask),
                "tokens": generated(model, prompts, new_tokens) if new_tokens else [],
            }
        )
    return results


def compiled(group, cases, prompts, new_tokens):
    """Per case, greedy tokens of compiled segments, and how a decode step is computed."""
    from rewriter.runtime.generation.decode_step import decode_step

    found = []
    for source, tensors, ties in cases:
        model = build(source, tensors[0 if group is None else group.rank()], ties, group)
        tokens = generated(model, prompts, new_tokens, compile="eager")
        found.append((tokens, decode_step(model, len(prompts), 1, group).how))
    return found


@torch.no_grad()
def same_bits(group, pairs, ids):
    """Of pairs of cases, a program of both phases and the standard one: whether the exact entry's logits of a prompt
    and of a decode step are the same bits, and the events of collectives the same."""
    from rewriter.runtime import Context, StaticCache, record_events

    rank, answers = 0 if group is None else group.rank(), []
    for pair in pairs:
        found = []
        for (source, tensors, ties), exact in zip(pair, ({"rewired": False}, {}), strict=True):
            model = build(source, tensors[rank], ties, group)
            cache = StaticCache(model.slots, ids.shape[0], ids.shape[1] + 1, next(model.parameters()).dtype)
            with record_events() as events:
                prompt = model(ids, ctx=Context(cache, **exact))
                place = torch.tensor(ids.shape[1])
                step = model(ids[:, :1], place.expand(ids.shape[0], 1), Context(cache, place))
            found.append((prompt, step, [(e.kind, e.name, e.bytes) for e in events]))
        (prompt, step, events), (wanted_prompt, wanted_step, wanted) = found
        answers.append((torch.equal(prompt, wanted_prompt), torch.equal(step, wanted_step), events == wanted))
    return answers


def over_sequences(group, cases, ids, mask, prompts, new_tokens):
    """Of modules whose tokens are sharded, per case: logits by entry, gradients with a mask, greedy tokens."""
    from torch.distributed.tensor import DTensor

    from rewriter.runtime import Context, generate, sequence_mesh
    from rewriter.training import shard_parameters

    found = []
    for source, tensors, ties, grid, tp, dp, fsdp in cases:
        mesh = sequence_mesh("cpu", grid, data_parallel=dp, tensor_parallel=tp)
        model = load(import_source(source).Model(mesh), tensors[mesh.get_local_rank("tp")], ties)
        if fsdp:
            shard_parameters(model)
        logits = whole_calls(model, ids, mask)
        model(ids, labels=ids, ctx=Context(rewired=mask)).loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
        tokens = [generate(model, some, new_tokens, pad_token_id=PAD) for some in (prompts, prompts[:1])]
        found.append((logits, gradients, tokens))
    return found
