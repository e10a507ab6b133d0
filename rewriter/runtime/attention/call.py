"""What every algorithm of distributed attention is given beside its tensors.

An algorithm is a module with

    forward(q_BHSD, k_BKSD, v_BKSE, call, sinks_H=None) -> (o_BHSE, lse_BHS, k_kept, v_kept)
    backward(do_BHSE, q, k_kept, v_kept, o, lse, call) -> (dq, dk, dv)

on the tokens that this rank holds of its plane: `call.grid.rows` × `call.grid.columns` ranks with the same heads. o,
dq, dk and dv are of q's dtype, lse of the accumulation dtype. k_kept and v_kept are the keys and values as backward
wants them, S tokens too; o and lse go into backward as they came out of forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.runtime.attention.grid import Grid
from rewriter.runtime.attention.visibility import Visibility


@dataclass(frozen=True)
class Call:
    """The ranks, what queries see of the keys, and the factor of the scores."""

    grid: Grid
    seen: Visibility
    scale: float
