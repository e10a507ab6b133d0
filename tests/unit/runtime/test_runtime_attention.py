"""Runtime attention against a naive fp64 loop: masks, grouped heads, soft-caps, sinks, padding, and the cache in any
steps."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import BATCH, EXTRAS, HEAD, HEADS, LENGTH, MASKS, PADDING, check, inputs, naive, real_rows

from rewriter import RewriterError
from rewriter.runtime import Context, SlotSpec, StaticCache, attention


@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_whole_sequences(mask, extra, kv_heads, padding):
    q, k, v = inputs(kv_heads, head_v=6)
    got = attention(q, k, v, Context(first_valid=padding), slot=0, mask=mask, scale=0.4, **EXTRAS[extra])
    check(got, naive(q, k, v, mask, 0.4, padding, **EXTRAS[extra]), padding)


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("steps", [[LENGTH], [6] + [1] * 5, [1] * LENGTH, [2, 5, 1, 3]], ids=str)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("extra", ["plain", "both"])
@pytest.mark.parametrize("mask", MASKS[:3], ids=lambda mask: mask.kind)
def test_the_cache_continues_in_any_steps(mask, extra, padding, steps, fills):
    """In view as a whole, or as far as it is filled."""
    q, k, v = inputs(2, head_v=6)
    window = mask.size if mask.kind == "window" else None
    cache = StaticCache([SlotSpec(2, HEAD, 6, window)], BATCH, LENGTH + 2, torch.float32)
    pieces, at = [], 0
    for step in steps:
        seen = cache.first(at + step) if fills else cache
        ctx = Context(seen, torch.tensor(at) if at else None, padding, fills=fills)
        part = [x[:, :, at : at + step] for x in (q, k, v)]
        pieces.append(attention(*part, ctx, slot=0, mask=mask, scale=0.4, **EXTRAS[extra]))
        at += step
    check(torch.cat(pieces, 2), naive(q, k, v, mask, 0.4, padding, **EXTRAS[extra]), padding)


def test_a_window_keeps_only_its_own_length():
    cache = StaticCache([SlotSpec(2, HEAD, HEAD, 4), SlotSpec(2, HEAD, HEAD)], BATCH, 100, torch.float32)
    assert [keys.shape[2] for keys in cache.keys] == [4, 100]


def test_a_bias_is_added_and_refused_with_a_cache():
    q, k, v = inputs(2)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
    for mask in (MASKS[0], MASKS[3]):
        for extra in ("plain", "softcap"):
            got = attention(q, k, v, Context(), slot=0, mask=mask, scale=0.4, bias=bias, **EXTRAS[extra])
            check(got, naive(q, k, v, mask, 0.4, bias=bias, **EXTRAS[extra]), None)
    cache = StaticCache([SlotSpec(2, HEAD, HEAD)], BATCH, 20, torch.float32)
    with pytest.raises(RewriterError, match="bias for 11 keys, but 20 are in view"):
        attention(q, k, v, Context(cache, torch.tensor(4)), slot=0, mask=MASKS[0], scale=0.4, bias=bias)
    q, k, v = (x[:, :, :1] for x in (q, k, v))  # a bias for one token fits any cache by broadcasting, and is wrong
    with pytest.raises(RewriterError, match="cannot be used with a key/value cache"):
        attention(q, k, v, Context(cache, torch.tensor(4)), slot=0, mask=MASKS[0], scale=0.4, bias=bias[..., :1, :1])


def test_gradients_equal_the_specification():
    from rewriter.ir.ops import attention as specification

    for mask in MASKS:
        for extra in EXTRAS.values():
            ours, theirs = ([x.double().requires_grad_() for x in inputs(2)] for _ in range(2))
            extra = {key: value.double() if key == "sinks" else value for key, value in extra.items()}
            for run, parts in ((attention, ours), (specification, theirs)):
                run(*parts, Context(), slot=0, mask=mask, scale=0.4, **extra).square().sum().backward()
            # The specification's softmax is fp32 whatever the inputs are.
            torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs], rtol=1e-4, atol=1e-4)


def test_padding_never_leaks_and_never_gives_nan_even_in_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(2))
    o = attention(q, k, v, Context(first_valid=PADDING), slot=0, mask=MASKS[1], scale=0.4)
    real_rows(o, PADDING).square().sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
        for row, first in enumerate(PADDING):
            assert not x.grad[row, :, : int(first)].any()
            assert x.grad[row, :, int(first) :].any()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences_are_what_they_are_alone(mask):
    """Each segment as if it were a row of its own: chunks too count from its start."""
    q, k, v = inputs(2)
    ids = torch.tensor([[3] * 11, [0] * 5 + [1] * 6, [7] + [2] * 2 + [9] * 8])
    got = attention(q, k, v, Context(segment_ids=ids), slot=0, mask=mask, scale=0.4)
    for b in range(BATCH):
        for segment in ids[b].unique():
            (own,) = torch.where(ids[b] == segment)
            expected = naive(*(x[b : b + 1, :, own] for x in (q, k, v)), mask, 0.4)
            torch.testing.assert_close(got[b : b + 1, :, own].double(), expected, rtol=1e-5, atol=1e-5)


def test_bf16_stays_within_its_rounding():
    q, k, v = inputs(2)
    expected = naive(q.bfloat16(), k.bfloat16(), v.bfloat16(), MASKS[0], 0.4, PADDING)
    for extra in ({}, {"softcap": 50.0}):
        parts = [x.bfloat16() for x in (q, k, v)]
        got = attention(*parts, Context(first_valid=PADDING), slot=0, mask=MASKS[0], scale=0.4, **extra)
        assert got.dtype == torch.bfloat16
        assert (real_rows(got, PADDING).double() - real_rows(expected, PADDING)).abs().max() < 5e-2


def test_what_cannot_be_right_is_refused():
    q, k, v = inputs(2)
    with pytest.raises(RewriterError, match=r"segment_ids .* with a cache"):
        Context(StaticCache([], BATCH, 5, torch.float32), segment_ids=torch.zeros(BATCH, LENGTH))
    with pytest.raises(RewriterError, match="position is given without a cache"):
        Context(position=torch.tensor(3))
    cache = StaticCache([SlotSpec(2, HEAD, HEAD)], BATCH, 5, torch.float32)
    with pytest.raises(RewriterError, match="11 tokens, but it was made for max_length=5"):
        attention(q, k, v, Context(cache), slot=0, mask=MASKS[0], scale=0.4)
    with pytest.raises(RewriterError, match="require a gradient"):
        attention(q, k.requires_grad_(), v, Context(cache), slot=0, mask=MASKS[0], scale=0.4)
    with pytest.raises(IndexError):
        attention(
            q[:, :, :2],
            k[:, :, :2].detach(),
            v[:, :, :2],
            Context(cache, torch.tensor(4)),
            slot=0,
            mask=MASKS[0],
            scale=1,
        )
