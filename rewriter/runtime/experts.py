"""A layer of experts: each token goes through the few that its router chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.errors import RewriterError
from rewriter.ops import ACTIVATIONS


@torch.compiler.disable
def experts(
    x_ND: Tensor,
    index_NK: Tensor,
    weight_NK: Tensor,
    gate_up_E2ID: Tensor,
    down_EDI: Tensor,
    act: str | Callable[[Tensor], Tensor],
    gate_up_layout: Literal["concatenated", "interleaved"] = "concatenated",
) -> Tensor:
    """Σ_k weight[n, k] · down_e(act(gate_e(x)) · up_e(x)) with e = index[n, k]; [N, D] in x's dtype.

    `gate_up` [E, 2I, D] holds gate then up ("concatenated") or alternates their rows ("interleaved"); `down` is
    [E, D, I]. With I split over ranks the result is partial, and `weight_NK`, being replicated, must pass through
    `enter` to be trained. Indices outside 0 … E-1 add nothing: transformers marks dropped tokens so. `act` is a name of
    `rewriter.ops.ACTIVATIONS` or a function. Only experts that some token chose are computed, each on its own tokens.

    How many tokens an expert gets is data, so this is never inside a compiled graph.
    """
    if isinstance(act, str):
        if act not in ACTIVATIONS:
            raise RewriterError(
                f"experts: activation {act!r} is unknown, expected one of {', '.join(sorted(ACTIVATIONS))}"
            )
        act = ACTIVATIONS[act]
    if gate_up_layout not in ("concatenated", "interleaved"):
        raise RewriterError(f"experts: gate_up_layout {gate_up_layout!r}, expected 'concatenated' or 'interleaved'")
    count, per_token = gate_up_E2ID.shape[0], index_NK.shape[1]
    # Choices in order of expert, then of token; one transfer to the host tells where each expert's begin.
    chosen = index_NK.reshape(-1)
    chosen = chosen.masked_fill((chosen < 0) | (chosen >= count), count)
    order = chosen.argsort(stable=True)
    sizes = torch.bincount(chosen, minlength=count + 1).tolist()[:count]
    token_of = order // per_token
    weight_of = weight_NK.reshape(-1)[order]

    out_ND = torch.zeros_like(x_ND)
    begin = 0
    for expert, size in enumerate(sizes):
        if size == 0:
            continue
        token = token_of[begin : begin + size]
        h = F.linear(x_ND[token], gate_up_E2ID[expert])
        gate, up = h.chunk(2, dim=-1) if gate_up_layout == "concatenated" else (h[..., ::2], h[..., 1::2])
        y = F.linear(act(gate) * up, down_EDI[expert])
        out_ND = out_ND.index_add(0, token, (y * weight_of[begin : begin + size, None]).to(out_ND.dtype))
        begin += size
    return out_ND
