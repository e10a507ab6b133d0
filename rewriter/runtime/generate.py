"""Text generation by any emitted module: prefill, then one token at a time from the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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
    on_token: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to and including its end-of-sequence token.

    Greedy at temperature 0, which equals transformers' `generate(do_sample=False)`; else sampled from softmax(logits
    / temperature) cut to the `top_k` likeliest and then to the likeliest whose probabilities reach `top_p`, as
    transformers orders them. Every rank of `group` (default: those of this rank's replica of the model) calls this with
    the same arguments; the first rank's choice is sent to the others, so that ranks cannot part ways over rounding.
    `use_cache=False` recomputes everything for each token. Where the model shards tokens over ranks, prompts are
    computed so, and their keys and values stay where they are: see `SequenceCache`.

    On the first rank, `on_token(prompt, token)` is called with every token as soon as it is chosen, `prompt` being an
    index into `prompts`. Where it returns True, that prompt ends with this token, on all ranks.

    Raises RewriterError for a prompt without tokens and an argument outside of its range.
    """
    _check(prompts, max_new_tokens, temperature, top_k, top_p)
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

    # From here on the host reads nothing of a token's: on a GPU it would wait for each, and the GPU then for it.
    poll = 1 if on_token is not None else tokens_between_polls(device)
    place = torch.full((), length, dtype=torch.int64, device=device)
    ctx = Context(cache=cache, first_valid=first_valid)
    logits = model(ids, positions(length, first_valid, batch, device), ctx, logits_to_keep=1)[:, -1]
    produced: list[Tensor] = []
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    several = group is not None and group.size() > 1
    while True:
        token = _choose(logits.float(), temperature, top_k, top_p, random).masked_fill(finished, pad_token_id)
        ended = finished | (token[:, None] == ends).any(dim=1)
        if on_token is not None and (not several or dist.get_rank(group) == 0):
            ended = ended | _stopped(on_token, token, finished)
        if several:
            choice = torch.stack([token, ended.long()])
            dist.broadcast(choice, group=group, group_src=0)
            token, ended = choice[0], choice[1].bool()
        produced.append(token)
        lengths, finished = lengths + ~finished, ended
        if len(produced) == max_new_tokens:
            break
        can_end = len(ends) > 0 or on_token is not None
        if can_end and len(produced) % poll == 0 and bool(finished.all()):
            break
        if cache is None:
            ids = torch.cat([ids, token[:, None]], dim=1)
            here = positions(ids.shape[1], first_valid, batch, device)
            logits = model(ids, here, ctx, logits_to_keep=1)[:, -1]
        else:
            step = Context(cache, place, first_valid)
            here = place.expand(batch) if first_valid is None else place - first_valid
            logits = model(token[:, None], here[:, None], step)[:, -1]
            place = place + 1
    rows = torch.stack(produced, dim=1).tolist()
    return [row[:count] for row, count in zip(rows, lengths.tolist(), strict=True)]


def tokens_between_polls(device: torch.device) -> int:
    """After how many tokens the host asks whether all prompts have ended. The same on all ranks, which stop together;
    what is made beyond the ends is left out. On a CPU to ask costs nothing."""
    return 1 if device.type == "cpu" else 16


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


def cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """[B, V] with -inf for what is not among the `top_k` likeliest, then not among those that reach `top_p`."""
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = (before >= top_p).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(cut & (logits < ordered[:, :1]), float("-inf"))
    return logits


def _check(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if not prompts or not all(prompts):
        raise RewriterError("generate: a prompt has no tokens. Give each at least one")
    for name, value, fits, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "a number of at least 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0 and at most 1"),
    ):
        if not fits:
            raise RewriterError(f"generate: {name} is {value}, expected {expected}")
    for name, cut in (("top_k", top_k), ("top_p", top_p)):
        if cut is not None and temperature == 0:
            raise RewriterError(
                f"generate: {name} is {cut}, but at temperature 0 the likeliest token is taken. Give a temperature, "
                f"such as 1, or leave {name} out"
            )


def _stopped(on_token: Callable[[int, int], bool], token_B: Tensor, finished_B: Tensor) -> Tensor:
    """bool [B]: what `on_token` says of the prompts that are not finished."""
    rows = zip(token_B.tolist(), finished_B.tolist(), strict=True)
    said = [not done and bool(on_token(row, token)) for row, (token, done) in enumerate(rows)]
    return torch.tensor(said, device=token_B.device)


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator
) -> Tensor:
    """int64 [B]: the likeliest tokens, or a draw from those left by `cut`."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    probabilities = cut(logits_BV / temperature, top_k, top_p).softmax(-1)
    # a draw as `torch.multinomial` makes it, which also reads on the host whether these are probabilities
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=random)).argmax(dim=-1)
