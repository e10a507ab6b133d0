"""Keys that stand for blocks of tokens (DeepSeek V4's compressed attention, Qwen's block-sparse attention).

A block is `size` consecutive tokens of a row, counted from the row's first token. A call's tokens touch at most
W = (S + 2 · size − 2) // size blocks, wherever the first of them stands in its block; an operator that gives something
for each gives W entries, the last of which may belong to blocks that are not complete, or of which no token is there.
No query sees those: the entry of a block is seen by its last token and by all behind it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

Pooling = Literal["softmax", "mean", "first"]


def blocks_touched(tokens: Any, size: int) -> Any:
    """W, the number of blocks that as many tokens may touch."""
    return (tokens + 2 * size - 2) // size


def pool_blocks(
    x_BSC: torch.Tensor,
    gate_BSC: torch.Tensor | None,
    bias_NC: torch.Tensor | None,
    ctx: Any,
    *,
    slot: int | str,
    size: int,
    pooling: Pooling,
    overlap: bool = False,
) -> torch.Tensor:
    """One vector for each block that the tokens touch, [B, W, C] in x's dtype.

    "softmax": Σ_j softmax_j(gate_j + bias_j) ⊙ x_j over the block's tokens j, each channel by itself, softmax in fp32
    (DeepSeek V4, eqs. 20–23). With `overlap`, x and gate hold two series of C / 2 channels; a block sums the first of
    the block before and the second of its own, in one softmax, and the result has C / 2 channels (eqs. 9–17). "mean":
    the mean, in fp32. "first": the first token's vector. A cache keeps under `slot` what blocks to come need.
    """
    del ctx, slot
    batch, tokens, channels = x_BSC.shape
    count = blocks_touched(tokens, size)
    missing = count * size - tokens
    whole = torch.nn.functional.pad(x_BSC, (0, 0, 0, missing)).view(batch, count, size, channels)
    there = torch.arange(count * size, device=x_BSC.device).view(1, count, size, 1) < tokens
    if gate_BSC is None or bias_NC is None:
        return pooled(whole, None, there, pooling)
    gate = torch.nn.functional.pad(gate_BSC, (0, 0, 0, missing)).view(batch, count, size, channels) + bias_NC
    if overlap:
        half = channels // 2
        before = (x.roll(1, 1)[..., :half] for x in (whole, gate))
        whole, gate = (torch.cat([b, x[..., half:]], 2) for b, x in zip(before, (whole, gate), strict=True))
        none = torch.zeros_like(there[:, :1])
        there = torch.cat([torch.cat([none, there[:, :-1]], 1), there], 2)
    return pooled(whole, gate, there, pooling)


def pooled(
    x_BWNC: torch.Tensor, gate_BWNC: torch.Tensor | None, there_BWN1: torch.Tensor, pooling: Pooling
) -> torch.Tensor:
    """The vector [B, W, C] of each block of `x`, of those of its tokens that are `there`; finite without any."""
    if pooling == "first":
        return x_BWNC[:, :, 0]
    if pooling == "mean" or gate_BWNC is None:
        return x_BWNC.float().mean(2).to(x_BWNC.dtype)
    gate = gate_BWNC.float().masked_fill(~there_BWN1, torch.finfo(torch.float32).min)
    return (x_BWNC * gate.softmax(2).to(x_BWNC.dtype)).sum(2)


def block_starts(x_BSD: torch.Tensor, ctx: Any, *, size: int) -> torch.Tensor:
    """The place in its row of the first token of each block that the tokens of `x` touch, int64 [B, W]."""
    del ctx
    count = blocks_touched(x_BSD.shape[1], size)
    return (torch.arange(count, device=x_BSD.device) * size).expand(x_BSD.shape[0], -1)


def remember_blocks(x_BWD: torch.Tensor, ctx: Any, *, slot: int | str, size: int) -> torch.Tensor:
    """`x` of all blocks so far, [B, T, D], which a cache keeps under `slot`; those of blocks that are not complete are
    replaced by later calls. Without a cache that is `x` itself."""
    del ctx, slot, size
    return x_BWD


def blocks_seen(places_S: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Boolean [..., S, count]: a query at a place of its row sees the entries of blocks that end there or before."""
    block = torch.arange(count, device=places_S.device)
    return (block + 1) * size <= places_S[..., None] + 1


def chosen_of(keys_BSN: torch.Tensor, count: int) -> torch.Tensor:
    """Boolean [B, S, count]: which of `count` places are among `keys`."""
    none = torch.zeros(*keys_BSN.shape[:2], count, dtype=torch.bool, device=keys_BSN.device)
    return none.scatter(2, keys_BSN.long(), True)


def keys_of_blocks(keys_BSN: torch.Tensor, queries: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Boolean [B, S, T]: the keys in blocks that were chosen for a query, and those behind its last whole block.

    `queries` [1 or B, S] and `places` [1 or B, T] are the places in their rows of the queries and of the keys; padding
    has negative ones.
    """
    batch = keys_BSN.shape[0]
    queries, places = queries.expand(batch, -1), places.expand(batch, -1)
    block = (places.clamp(min=0) // size)[:, None].expand(-1, queries.shape[1], -1)
    chosen = chosen_of(keys_BSN, places.shape[1] // size + 2).gather(2, block)
    return chosen | (places[:, None] >= ((queries + 1) // size * size)[..., None])
