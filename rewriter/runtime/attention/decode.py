"""Attention of new tokens over keys that are sharded over the ranks of a sequence axis: each rank attends over its own,
and the parts are merged by their log-sum-exp.

Every rank holds the new queries, which are few; a rank sends a row of the output and one number per query and head, and
no keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.kernels import merge
from rewriter.runtime.attention import sinks as sink_logits
from rewriter.runtime.attention.local import in_autocast_dtype, kernel_forward
from rewriter.runtime.exchange import gather_start

_groups: dict[str, ProcessGroup | None] = {}


def register(key: str, group: ProcessGroup | None) -> None:
    """The ranks of the sequence axis that `decode_attention` finds under `key`."""
    _groups[key] = group


def decode_attention(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    visible: Tensor,
    key: str,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys of all ranks; o [B, H, S, E] in q's dtype, equal on all of them.

    q is that of the new tokens, k and v those that this rank holds; query head h reads key/value head h // (H / K).
    `visible`: boolean [B or 1, 1, S, T]; a rank may see nothing, but each query sees a key of some rank. `sinks` [H]: a
    logit per head that takes probability and returns nothing. Parts travel with o in the model's dtype and the
    log-sum-exp in fp32 (fp64 of fp64), and are merged in the latter. Without gradient. Raises RewriterError for a `key`
    that was not registered.
    """
    if key not in _groups:
        raise RewriterError(f"sequence axis {key!r} is not registered in this process: make its SequenceAxis first")
    q, k, v = in_autocast_dtype(q_BHSD, k_BKTD, v_BKTE)
    o: Tensor = _decode(q, k, v, visible, sinks, key, scale)
    return o


@torch.library.custom_op("rewriter::decode_attention", mutates_args=())
def _decode(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, key: str, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    groups = heads // k.shape[1]
    # The query heads of a group are rows of one attention, so that K and V are read once and never repeated.
    rows = q.reshape(batch, k.shape[1], groups * queries, -1)
    o, lse = kernel_forward(rows, k, v, visible.repeat(1, 1, groups, 1), False, scale)
    part = o.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)
    o, lse = merge(gather_start(part, _groups[key], "decode").wait())
    o, _ = sink_logits.fold(o, lse, sinks)
    return o.to(q.dtype)


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, key: str, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])
