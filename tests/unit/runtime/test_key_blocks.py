"""Keys of blocks of tokens with a cache: rows of any padding, in pieces of any size, give what each row alone gives."""

from __future__ import annotations

import pytest
import torch

from rewriter.ir import ops
from rewriter.ir.ops import MaskSpec
from rewriter.runtime import (
    Context,
    SlotSpec,
    StateSpec,
    StaticCache,
    attention,
    block_starts,
    pool_blocks,
    remember_blocks,
    top_keys,
)

SIZE, WIDTH, TOKENS, WINDOW, HEADS = 4, 6, 23, 5, 2
PADDING = torch.tensor([0, 3, 9])
GIVEN = {"softmax": (False, 1), "overlap": (True, 2), "mean": (False, 1)}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Layer:
    """Attention over a window of keys and over those of blocks, of which a few are chosen; or over the tokens of blocks
    that are chosen."""

    def __init__(self, pooling: str, entries: bool) -> None:
        torch.manual_seed(0)
        self.overlap, series = GIVEN[pooling]
        self.pooling = "softmax" if pooling == "overlap" else pooling
        self.entries = entries
        self.x, self.gate = drawn(len(PADDING), TOKENS, series * WIDTH), drawn(len(PADDING), TOKENS, series * WIDTH)
        self.bias = drawn(SIZE, series * WIDTH)
        self.q, self.k = drawn(len(PADDING), HEADS, TOKENS, WIDTH), drawn(len(PADDING), 1, TOKENS, WIDTH)

    def __call__(self, m, ctx, rows: slice, tokens: slice) -> torch.Tensor:
        """[B, H, S, D] by the functions of `m`, of `tokens` of some rows."""
        x, gate = self.x[rows, tokens], self.gate[rows, tokens]
        q, k = self.q[rows, :, tokens], self.k[rows, :, tokens]
        gated = (None, None) if self.pooling == "mean" else (gate, self.bias)
        pooled = m.pool_blocks(x, *gated, ctx, slot=0, size=SIZE, pooling=self.pooling, overlap=self.overlap)
        places = m.block_starts(x, ctx, size=SIZE)
        keys = m.remember_blocks(pooled + places[..., None].sin(), ctx, slot=1, size=SIZE)
        scores = q[:, 0] @ keys.transpose(1, 2)
        chosen = m.top_keys(scores, ctx, mask=MaskSpec("causal"), count=2, block=SIZE)
        more = {"entries": keys[:, None]} if self.entries else {}
        mask = MaskSpec("window", WINDOW) if self.entries else MaskSpec("causal")
        return m.attention(q, k, k, ctx, slot=2, mask=mask, scale=0.4, keys=chosen, block=SIZE, **more)

    def alone(self) -> list[torch.Tensor]:
        """By row, that of its tokens without padding, by the specification."""
        rows = [slice(row, row + 1) for row in range(len(PADDING))]
        return [self(ops, None, row, slice(int(p), None)) for row, p in zip(rows, PADDING, strict=True)]

    def cache(self) -> StaticCache:
        before = 2 * SIZE - 1 if self.overlap else SIZE - 1
        width = self.x.shape[2] * (1 if self.pooling == "mean" else 2)
        window = WINDOW if self.entries else None
        slots = [
            StateSpec((before, width), fp32=False),
            SlotSpec(1, WIDTH, 0, tokens=SIZE),
            SlotSpec(1, WIDTH, WIDTH, window=window),
        ]
        return StaticCache(slots, len(PADDING), TOKENS, torch.float64)


class Runtime:
    pool_blocks, block_starts = staticmethod(pool_blocks), staticmethod(block_starts)
    remember_blocks, top_keys, attention = map(staticmethod, (remember_blocks, top_keys, attention))


def in_pieces(layer: Layer, pieces: list[int], padding: torch.Tensor = PADDING, cached: bool = True) -> torch.Tensor:
    cache, begin, out = layer.cache() if cached else None, 0, []
    for piece in pieces:
        ctx = Context(cache, torch.tensor(begin) if begin else None, padding)
        out.append(layer(Runtime, ctx, slice(None), slice(begin, begin + piece)))
        begin += piece
    return torch.cat(out, 2)


def close(got: torch.Tensor, wanted: list[torch.Tensor]) -> bool:
    return all(torch.allclose(g[None, :, -w.shape[2] :], w, atol=1e-6) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("entries", [True, False])
@pytest.mark.parametrize("pooling", GIVEN)
@torch.no_grad()
def test_padded_rows_in_pieces_are_the_rows_alone(pooling: str, entries: bool) -> None:
    layer = Layer(pooling, entries)
    alone = layer.alone()
    assert close(in_pieces(layer, [TOKENS], cached=False), alone)
    for pieces in ([TOKENS], [1] * TOKENS, [7, 1, 1, 9, 5], [11, *[1] * 12], [2, 21]):
        assert close(in_pieces(layer, pieces), alone), pieces


@torch.no_grad()
def test_blocks_that_begin_at_padding_and_lost_tokens_show() -> None:
    """Blocks that are counted from the first place, padding or not; tokens before a piece that are forgotten."""
    layer = Layer("overlap", True)
    alone = layer.alone()
    assert not close(in_pieces(layer, [TOKENS], PADDING.clamp(max=0)), alone)
    cache = layer.cache()
    first = layer(Runtime, Context(cache, None, PADDING), slice(None), slice(0, 10))
    cache.keys[0].zero_()
    rest = layer(Runtime, Context(cache, torch.tensor(10), PADDING), slice(None), slice(10, None))
    assert not close(torch.cat([first, rest], 2), alone)


def test_gradients_are_those_of_the_specification() -> None:
    layer = Layer("overlap", True)
    got, wanted = (x.requires_grad_() for x in (layer.x.clone(), layer.x.clone()))
    for x, functions, ctx in ((got, Runtime, Context()), (wanted, ops, None)):
        layer.x = x
        layer(functions, ctx, slice(None), slice(None)).square().sum().backward()
    assert got.grad is not None
    assert torch.allclose(got.grad, wanted.grad, atol=1e-5)
