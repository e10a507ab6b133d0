"""Algorithms of distributed attention on a rank, and their arguments besides tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rewriter.kernels import Format, dequantize_vectors, quantize_vectors
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.partial_merge import fold_sinks
from rewriter.runtime.attention.tiles import Visibility


@dataclass(frozen=True)
class QuantizedKV:
    """Keys and values that travel quantized: in `format`, keys of `head_dim` and values of `value_dim` elements of
    `dtype`.

    The rank that computed them quantizes them once, each head's vector of a token by itself, and all that is sent, kept
    for backward and gathered again are these bytes. So every rank computes with the same values, the owner too, and
    backward with those of forward; what a vector becomes depends neither on the grid nor on its neighbours. Queries,
    outputs, log-sum-exps and gradients travel as they are; the gradient of a dequantized value is taken for that of
    the value (straight through).
    """

    format: Format
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def closed(self, k_BKSD: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, K, S, W] each: what travels."""
        return quantize_vectors(k_BKSD, self.format), quantize_vectors(v_BKSE, self.format)

    def opened(self, k_BKSW: Tensor, v_BKSW: Tensor) -> tuple[Tensor, Tensor]:
        """(k_BKSD, v_BKSE), of any of these heads and tokens in any order."""
        return (
            dequantize_vectors(k_BKSW, self.format, self.head_dim, self.dtype),
            dequantize_vectors(v_BKSW, self.format, self.value_dim, self.dtype),
        )


KeysAndValues = tuple[Tensor, Tensor]


class OwnTensors(NamedTuple):
    """Tensors of queries for backward, of a rank's own tokens or of gathered ones."""

    do_BHSE: Tensor
    q_BHSD: Tensor
    o_BHSE: Tensor
    lse_BHS: Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The ranks, what queries see of the keys, the factor of the scores, how keys and values travel, and the logits [H]
    of sinks."""

    mesh: AttentionMesh
    seen: Visibility
    scale: float
    quantized: QuantizedKV | None = None
    sinks_H: Tensor | None = None

    def opened(self, kv: Sequence[Tensor]) -> KeysAndValues:
        """(k_BKSD, v_BKSE) from keys and values as they travel."""
        k, v = kv
        return (k, v) if self.quantized is None else self.quantized.opened(k, v)

    def finished(self, o_BHSE: Tensor, lse_BHS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(o in `dtype`, lse) with the sinks, of the sums over all keys."""
        o, lse = fold_sinks(o_BHSE, lse_BHS, self.sinks_H)
        return o.to(dtype), lse


@dataclass(frozen=True)
class RankAttention:
    """An algorithm, on the tokens that this rank holds: of `call.mesh.rows` × `call.mesh.columns` ranks with the same
    heads.

    forward(q_BHSD, k_BKSD, v_BKSE, call) gives (o_BHSE, lse_BHS, k_kept, v_kept), backward(own, (k_kept, v_kept), call)
    gives (dq, dk, dv). o, dq, dk and dv are of q's dtype, lse of the accumulation dtype. k_kept and v_kept are the keys
    and values as backward wants them, S tokens too; o and lse go into backward as they came out of forward.

    With `call.quantized`, k and v come, travel and are kept as bytes, uint8 [B, K, S, W], and `call.opened` gives what
    is computed with: the same values on every rank, in forward and in backward, the rank's own among them. dk and dv
    are the gradients of these values.
    """

    forward: Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor, Tensor, Tensor]]
    backward: Callable[[OwnTensors, KeysAndValues, AttentionCall], tuple[Tensor, Tensor, Tensor]]
