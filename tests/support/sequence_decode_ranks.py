"""Decoding from a cache that is dealt over the ranks of a sequence axis, as each rank runs it."""

from __future__ import annotations

import torch

from rewriter.ir.ops import SequencePlan
from rewriter.runtime import Context, MaskSpec, SequenceAxis, SequenceCache, SlotSpec, attention

PLANS = {
    "attention2d": SequencePlan("attention2d", (1, 2, 2)),
    "heads-first": SequencePlan("attention2d", (2, 2, 1)),
    "ring": SequencePlan("ring", (1, 4, 1)),
}


MASKS = [MaskSpec("causal"), MaskSpec("window", 5), MaskSpec("chunk", 6)]


PROMPTS = (1, 7, 18)  # tokens


STEPS = (1, 3, 1, 1, 2)  # tokens that follow, call by call


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


BATCH, HEADS, KV_HEADS, HEAD, VALUE = 2, 4, 2, 8, 6


def tokens(length: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(length)
    sizes = ((HEADS, HEAD), (KV_HEADS, HEAD), (KV_HEADS, VALUE))
    return tuple(torch.randn(BATCH, heads, length, size, generator=random) for heads, size in sizes)


def combinations(prompt: int):
    for mask in MASKS:
        for sinks in (None, SINKS):
            for first_valid in (None, torch.tensor([0, prompt // 2])):
                yield mask, sinks, first_valid


def continued(cache, attend, prompt, first_valid):
    """Outputs of every call after a prompt that `attend` put into the cache."""
    position, found = prompt, []
    for step in STEPS:
        ctx = Context(cache, torch.tensor(position), first_valid)
        found.append(attend(slice(position, position + step), ctx))
        position += step
    return found


def decoded(group, plans):
    """Per plan, prompt and combination: what every call after the prompt gives."""
    from rewriter.runtime import sequence_mesh, shard_tokens

    results = []
    for plan in plans:
        axis = SequenceAxis(sequence_mesh("cpu", plan.grid), plan)
        for prompt in PROMPTS:
            q, k, v = tokens(prompt + sum(STEPS))
            shards = axis.shards(prompt)
            for mask, sinks, first_valid in combinations(prompt):
                cache = SequenceCache([SlotSpec(KV_HEADS, HEAD, VALUE)], axis, BATCH, prompt + sum(STEPS), q.dtype)

                def attend(part, ctx, q=q, k=k, v=v, mask=mask, sinks=sinks):
                    own = (x[:, :, part] for x in (q, k, v))
                    if ctx.shards is not None:
                        own = (shard_tokens(x.transpose(1, 2), ctx).transpose(1, 2) for x in own)
                    return attention(*own, ctx, slot=0, mask=mask, scale=0.4, sinks=sinks)

                attend(slice(0, prompt), Context(cache, None, first_valid, shards=shards))
                results.append(continued(cache, attend, prompt, first_valid))
    return results
