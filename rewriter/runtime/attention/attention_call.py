"""What an algorithm of distributed attention is on a rank, and what it is given beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rewriter.runtime.attention import sinks
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.quantized_kv import QuantizedKV
from rewriter.runtime.attention.visibility import Visibility

KeysAndValues = tuple[Tensor, Tensor]


class OwnTensors(NamedTuple):
    """What backward has of queries, of a rank's own tokens or of gathered ones."""

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
        o, lse = sinks.fold(o_BHSE, lse_BHS, self.sinks_H)
        return o.to(dtype), lse


class RankAttention(Protocol):
    """An algorithm, on the tokens that this rank holds: of `call.mesh.rows` × `call.mesh.columns` ranks with the same
    heads.

    o, dq, dk and dv are of q's dtype, lse of the accumulation dtype. k_kept and v_kept are the keys and values as
    backward wants them, S tokens too; o and lse go into backward as they came out of forward.

    With `call.quantized`, k and v come, travel and are kept as bytes, uint8 [B, K, S, W], and `call.opened` gives what
    is computed with: the same values on every rank, in forward and in backward, the rank's own among them. dk and dv
    are the gradients of these values.
    """

    def forward(
        self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(o_BHSE, lse_BHS, k_kept, v_kept)."""

    def backward(self, own: OwnTensors, kept: KeysAndValues, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) from the tensors of the own queries and (k_kept, v_kept)."""
