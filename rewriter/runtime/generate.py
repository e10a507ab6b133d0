"""Text generation by any emitted module: prefill, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.cache import SequenceCache, StaticCache
from rewriter.runtime.context import Context
from rewriter.runtime.replicas import Replicas
from rewriter.runtime.sequence_axis import SequenceAxis


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor | None]:
    """ids int64 [B, S], padded at the left, and the padding per row int64 [B], None if all rows have one length."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
    padding = [longest - len(prompt) for prompt in prompts]
    return ids, torch.tensor(padding) if any(padding) else None


def positions(length: int, first_valid: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """int64 [B, S]: 0 at a row's first valid token and, as in transformers, 0 on its padding."""
    index = torch.arange(length, device=device).expand(batch, length)
    return index if first_valid is None else (index - first_valid[:, None]).clamp(min=0)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    group: ProcessGroup | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to and including its end-of-sequence token.

    Greedy at temperature 0, which equals transformers' `generate(do_sample=False)`; else sampled from softmax(logits
    / temperature) cut to the `top_k` likeliest and then to the likeliest whose probabilities reach `top_p`, as
    transformers orders them. Every rank of `group` (default: those of this rank's replica of the model) calls this with
    the same arguments; the first rank's choice is sent to the others, so that ranks cannot part ways over rounding.
    `use_cache=False` recomputes everything for each token. Where the model shards tokens over ranks, prompts are
    computed so, and their keys and values stay where they are: see `SequenceCache`.
    """
    if not prompts or not all(prompts):
        raise RewriterError("generate: a prompt has no tokens. Give each at least one")
    if max_new_tokens < 1:
        raise RewriterError(f"generate: max_new_tokens is {max_new_tokens}, expected at least 1")
    if group is None and dist.is_initialized():
        replicas: Replicas | None = getattr(model, "replicas", None)
        group = dist.group.WORLD if replicas is None or replicas.data_parallel == 1 else replicas.own
    weight = next(model.parameters())
    device, batch = weight.device, len(prompts)
    ids, first_valid = left_pad(prompts, pad_token_id)
    ids, first_valid = ids.to(device), None if first_valid is None else first_valid.to(device)
    length = ids.shape[1]
    cache = make_cache(model, batch, length + max_new_tokens, weight) if use_cache else None
    random = torch.Generator(device).manual_seed(seed)
    ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)

    ctx = Context(cache=cache, first_valid=first_valid)
    logits = model(ids, positions(length, first_valid, batch, device), ctx, logits_to_keep=1)[:, -1]
    produced: list[Tensor] = []
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    while True:
        token = _choose(logits.float(), temperature, top_k, top_p, random)
        if group is not None and group.size() > 1:
            dist.broadcast(token, group=group, group_src=0)
        token = token.masked_fill(finished, pad_token_id)
        produced.append(token)
        finished = finished | torch.isin(token, ends)
        if len(produced) == max_new_tokens or (len(ends) and bool(finished.all())):
            break
        length += 1
        here = positions(length, first_valid, batch, device)
        if cache is None:
            ids = torch.cat([ids, token[:, None]], dim=1)
            logits = model(ids, here, ctx, logits_to_keep=1)[:, -1]
        else:
            step = Context(cache, torch.tensor(length - 1, device=device), first_valid)
            logits = model(token[:, None], here[:, -1:], step)[:, -1]
    rows = torch.stack(produced, dim=1).tolist()
    return [_until_end(row, eos_token_ids) for row in rows]


def make_cache(model: nn.Module, batch: int, max_length: int, like: Tensor) -> StaticCache | SequenceCache:
    """An empty cache for `batch` rows of an emitted model, in dtype and on the device of `like`.

    Raises RewriterError for a model that does not say what it caches.
    """
    slots: Any = getattr(model, "slots", None)
    if not slots:
        raise RewriterError(
            f"generate: {type(model).__name__} names no cache slots. Rewrite the model with this version, or pass "
            "use_cache=False"
        )
    axis: SequenceAxis | None = getattr(model, "sequence", None)
    if axis is not None and axis.ranks > 1:
        return SequenceCache(slots, axis, batch, max_length, like.dtype, like.device)
    return StaticCache(slots, batch, max_length, like.dtype, like.device)


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator
) -> Tensor:
    if temperature <= 0:
        return logits_BV.argmax(dim=-1)
    logits = logits_BV / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = (before >= top_p).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(cut & (logits < ordered[:, :1]), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]


def _until_end(row: list[int], ends: Collection[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
