"""Tokens behind earlier ones, of whole sequences and of a cache in any steps: each row as it would be alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import rewriter.runtime as runtime
from rewriter import RewriterError
from rewriter.ir import ops
from rewriter.runtime import Context, StateSpec, StaticCache

BATCH, CHANNELS, COUNT, LENGTH = 3, 4, 3, 12
PADDING = torch.tensor([0, 5, 3])


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, CHANNELS, LENGTH, generator=generator, dtype=torch.float64)
    taps = [torch.randn(CHANNELS, CHANNELS, size, generator=generator, dtype=torch.float64) for size in (2, 3)]
    return x.to(dtype), [t.to(dtype) for t in taps]


def convolved(x, taps, ctx, of=runtime):
    """Two convolutions, the first of which has a bias, so that what it gives of zeros is not zero."""
    first = F.conv1d(of.preceded(x, ctx, slot=0, count=COUNT), taps[0], torch.ones(CHANNELS, dtype=x.dtype))
    return F.conv1d(first, taps[1])


def alone(x, taps, padding=None):
    """Each row from its first valid token on, by sums; NaN at padding."""
    rows = []
    for row in range(BATCH):
        first = 0 if padding is None else int(padding[row])
        behind = torch.cat([x.new_zeros(CHANNELS, COUNT), x[row, :, first:]], 1)
        once = torch.stack([1 + (taps[0] * behind[:, t : t + 2]).sum((1, 2)) for t in range(behind.shape[1] - 1)], 1)
        twice = [(taps[1] * once[:, t : t + 3]).sum((1, 2)) for t in range(once.shape[1] - 2)]
        rows.append(F.pad(torch.stack(twice, 1), (first, 0), value=torch.nan))
    return torch.stack(rows)


def compare(got, expected, tolerance=1e-12):
    valid = ~expected.isnan()
    assert got.shape == expected.shape
    assert (got[valid].double() - expected[valid]).abs().max() <= tolerance * expected[valid].abs().max()


def test_the_specification():
    x, taps = inputs()
    compare(convolved(x, taps, None, ops), alone(x, taps))


@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("steps", [[LENGTH], [7, 5], [2, 1, 1, 8], [1] * LENGTH], ids=lambda s: str(len(s)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_cache_continues_in_any_steps(dtype, steps, padding):
    x, taps = inputs(dtype)
    expected = alone(x.double(), [t.double() for t in taps], padding)
    cache = StaticCache([StateSpec((CHANNELS, COUNT), False)], BATCH, LENGTH, dtype)
    cache.states[0].fill_(7)  # of a generation before this one
    pieces, at = [], 0
    for step in steps:
        ctx = Context(cache, torch.tensor(at) if at else None, padding)
        pieces.append(convolved(x[:, :, at : at + step], taps, ctx))
        at += step
    assert pieces[0].dtype == dtype
    compare(torch.cat(pieces, 2), expected, 1e-12 if dtype == torch.float64 else 2e-2)
    compare(convolved(x, taps, Context(first_valid=padding)), expected, 1e-12 if dtype == torch.float64 else 2e-2)


def test_padding_gives_no_gradient():
    x, taps = inputs()
    x.requires_grad_()
    out = convolved(x, taps, Context(first_valid=PADDING))
    sum(out[row, :, int(first) :].square().sum() for row, first in enumerate(PADDING)).backward()
    for row, first in enumerate(PADDING):
        assert not x.grad[row, :, : int(first)].any()
        assert x.grad[row, :, int(first) :].all()


def test_what_would_lose_or_mix_tokens_is_refused():
    x, _ = inputs()
    with pytest.raises(RewriterError, match="segment_ids with preceded, slot 0"):
        runtime.preceded(x, Context(segment_ids=torch.zeros(BATCH, LENGTH, dtype=torch.long)), slot=0, count=COUNT)
    cache = StaticCache([StateSpec((CHANNELS, COUNT), False)], BATCH, LENGTH, torch.float64)
    with pytest.raises(RewriterError, match="gradient"):
        runtime.preceded(x.requires_grad_(), Context(cache, None, None), slot=0, count=COUNT)
