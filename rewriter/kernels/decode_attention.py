"""Attention of one new token per row over a cache, where the host does not know how long the cache is: a decode step
that is captured in a CUDA graph runs for every position.

The keys are split among programs (flash decoding, https://pytorch.org/blog/flash-decoding), as a single query of few
heads leaves most of a GPU idle otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewriter.kernels.devices import runs_triton
from rewriter.kernels.merge import accumulation_dtype

_MOST_SIZE = 512  # of a head, whose tiles shared memory has room for


def decode_attention(
    q_BH1D: Tensor,
    keys_BKTD: Tensor,
    values_BKTE: Tensor,
    position: Tensor,
    first_valid_B: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys that are seen, summed in fp32 (fp64 of fp64); o [B, H, 1, E] in q's dtype.

    `position` is an int64 scalar tensor on the device of q: the place of the new token, whose key and value are stored
    already. Position p is in slot p modulo T, so that the last T are there. Of these, row b sees
    first_valid_B[b] <= p <= position (int64 [B]; None is 0), with a window w also position − p < w, and the token
    itself always. What is stored in other slots, NaN too, has no effect. Query head h reads key/value head
    h // (H / K). `softcap` c replaces scores by c · tanh(scores / c); `sinks_H` [H] adds a logit per head that takes
    probability and returns nothing.

    All of q, keys and values have one dtype. Keys and values may have any strides; they are copied where the last
    dimension is not contiguous. On CUDA one Triton kernel reads each key and value that is seen once for up to 16 heads
    of a group, and a second merges; nothing is read on the host. Elsewhere, for fp64 and for heads of more than 512,
    plain PyTorch.
    """
    tensors = (q_BH1D, keys_BKTD, values_BKTE, position, first_valid_B)
    if q_BH1D.is_cuda and accumulation_dtype(q_BH1D.dtype) == torch.float32:
        o: Tensor = _on_cuda(*tensors, sinks_H, scale, window, softcap)
        return o
    return decode_attention_reference(*tensors, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)


def decode_attention_reference(
    q_BH1D: Tensor,
    keys_BKTD: Tensor,
    values_BKTE: Tensor,
    position: Tensor,
    first_valid_B: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The specification. It looks at all T slots."""
    wide = accumulation_dtype(q_BH1D.dtype)
    batch, heads, _, _ = q_BH1D.shape
    kv_heads, slots = keys_BKTD.shape[1:3]
    place_T = position - (position - torch.arange(slots, device=q_BH1D.device)) % slots  # below 0: nothing there yet
    seen_BT = (place_T >= 0)[None]
    if first_valid_B is not None:
        seen_BT = seen_BT & (place_T >= first_valid_B[:, None])
    if window is not None:
        seen_BT = seen_BT & (position - place_T < window)
    seen_B1T = (seen_BT | (place_T == position))[:, None]
    q_BKGD = q_BH1D.to(wide).reshape(batch, kv_heads, heads // kv_heads, -1)
    scores_BHT = (q_BKGD @ keys_BKTD.to(wide).transpose(-1, -2)).reshape(batch, heads, slots) * scale
    if softcap is not None:
        scores_BHT = torch.tanh(scores_BHT / softcap) * softcap
    scores_BHT = scores_BHT.masked_fill(~seen_B1T, float("-inf"))
    if sinks_H is not None:
        scores_BHT = torch.cat([scores_BHT, sinks_H.to(wide)[None, :, None].expand(batch, heads, 1)], -1)
    weights_BKGT = scores_BHT.softmax(-1)[..., :slots].reshape(batch, kv_heads, -1, slots)
    # a weight of 0 times NaN is NaN
    o_BKGE = weights_BKGT @ values_BKTE.to(wide).masked_fill(~seen_B1T[..., None], 0)
    return o_BKGE.reshape(batch, heads, 1, -1).to(q_BH1D.dtype)


@torch.library.custom_op("rewriter::decode_attention_over_cache", mutates_args=())
def _on_cuda(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    first_valid: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """An operator, so that torch.compile does not look into how a kernel is chosen and launched."""
    if not runs_triton(q) or max(keys.shape[-1], values.shape[-1]) > _MOST_SIZE:
        return decode_attention_reference(
            q, keys, values, position, first_valid, scale=scale, window=window, softcap=softcap, sinks_H=sinks
        )
    from rewriter.kernels.decode_attention_triton import launch

    return launch(q, keys, values, position, first_valid, sinks, scale, window, softcap)


@_on_cuda.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:3], values.shape[-1])
