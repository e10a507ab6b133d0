"""What every algorithm of distributed attention is given beside its tensors.

An algorithm is a module with

    forward(q_BHSD, k_BKSD, v_BKSE, call, sinks_H=None) -> (o_BHSE, lse_BHS, k_kept, v_kept)
    backward(do_BHSE, q, k_kept, v_kept, o, lse, call) -> (dq, dk, dv)

on the tokens that this rank holds of its plane: `call.grid.rows` × `call.grid.columns` ranks with the same heads. o,
dq, dk and dv are of q's dtype, lse of the accumulation dtype. k_kept and v_kept are the keys and values as backward
wants them, S tokens too; o and lse go into backward as they came out of forward.

With `call.quantized`, k and v come, travel and are kept as bytes, uint8 [B, K, S, W], and `call.opened` gives what is
computed with: the same values on every rank, in forward and in backward, the rank's own among them. dk and dv are the
gradients of these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rewriter.runtime.attention.mesh import Grid
from rewriter.runtime.attention.quantized_kv import Quantized
from rewriter.runtime.attention.visibility import Visibility


@dataclass(frozen=True)
class Call:
    """The ranks, what queries see of the keys, the factor of the scores, and how keys and values travel."""

    grid: Grid
    seen: Visibility
    scale: float
    quantized: Quantized | None = None

    def opened(self, kv: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(k_BKSD, v_BKSE) from keys and values as they travel."""
        k, v = kv
        return (k, v) if self.quantized is None else self.quantized.opened(k, v)
