"""A layer of experts: each token goes through the few that its router chose."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.ir.ops import ExpertLayout, gated
from rewriter.runtime.compiled import product
from rewriter.runtime.streams import host_waits
from rewriter.runtime.torch_marks import not_compiled

FEW = 16  # choices whose experts' weights are copied, rather than that the host waits to know them


def experts(
    x_ND: Tensor,
    index_NK: Tensor,
    weight_NK: Tensor,
    up_E2ID: Tensor,
    down_EDI: Tensor,
    up_bias_E2I: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    *,
    act: str,
    layout: ExpertLayout = "concatenated",
    transposed: bool = False,
    limit: float | None = None,
    slope: float = 1.0,
    offset: float = 0.0,
) -> Tensor:
    """Σ_k weight[n, k] · down_e(gated(up_e(x))) with e = index[n, k]; [N, D] in x's dtype.

    `act` (a name of `rewriter.ir.ops.ACTIVATIONS`), `layout`, `limit`, `slope` and `offset` are those of
    `rewriter.ir.ops.gated`. `up` is [E, 2I, D] and `down` [E, D, I], or [E, D, 2I] and [E, I, D] where they are
    `transposed`; ungated ones have I rows. With I split over ranks the result is partial, and `weight_NK`, being
    replicated, must pass through `copy_to_group` to be trained. Indices outside 0 … E-1, E being the experts of `down`,
    add nothing: transformers marks dropped tokens so. Only experts that some token chose are computed, each on its own
    tokens.

    How many tokens an expert gets is data, which the host reads outside of every compiled graph, and for which it waits
    on a GPU. Not so for up to `FEW` choices without gradients there and in compiled graphs: each of them takes its
    expert's weights.
    """
    gate: dict[str, Any] = dict(act=act, layout=layout, limit=limit, slope=slope, offset=offset)
    weights = (up_E2ID, down_EDI, up_bias_E2I, down_bias_ED)
    by_choice = host_waits(x_ND) or torch.compiler.is_compiling()
    if by_choice and index_NK.numel() <= FEW and not torch.is_grad_enabled():
        return _of_each_choice(x_ND, index_NK, weight_NK, weights, transposed, gate)
    return _of_each_expert(x_ND, index_NK, weight_NK, weights, transposed, gate)


_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@not_compiled
def _of_each_expert(
    x_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, weights: _Weights, transposed: bool, gate: dict[str, Any]
) -> Tensor:
    up_E2ID, down_EDI, up_bias_E2I, down_bias_ED = weights
    count, per_token = down_EDI.shape[0], index_NK.shape[1]
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
        up, down = (w[expert].T if transposed else w[expert] for w in (up_E2ID, down_EDI))
        up_bias, down_bias = (None if b is None else b[expert] for b in (up_bias_E2I, down_bias_ED))
        h = F.linear(x_ND[token], up, up_bias)
        h = gated(h, **gate)
        y = F.linear(h, down, down_bias)
        out_ND = out_ND.index_add(0, token, (y * weight_of[begin : begin + size, None]).to(out_ND.dtype))
        begin += size
    return out_ND


def _of_each_choice(
    x_ND: Tensor,
    index_NK: Tensor,
    weight_NK: Tensor,
    weights: _Weights,
    transposed: bool,
    gate: dict[str, Any],
) -> Tensor:
    """`experts` with the weights of each of the C = N · K choices side by side, up, down and their biases: no shape
    depends on who was chosen."""
    tokens, per_token = index_NK.shape
    chosen = index_NK.reshape(-1)
    real = (chosen >= 0) & (chosen < len(weights[1]))
    own = [None if w is None else w.index_select(0, torch.where(real, chosen, 0)) for w in weights]

    def linear(x_CD: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
        assert w is not None
        if torch.compiler.is_compiling() and x_CD.device.type == "cpu":
            y = product(x_CD, w.transpose(1, 2) if transposed else w)
        else:
            y = torch.bmm(x_CD[:, None], w if transposed else w.transpose(1, 2))[:, 0]
        return y if bias is None else y + bias

    up, down, up_bias, down_bias = own
    h = gated(linear(x_ND.repeat(1, per_token).view(tokens * per_token, -1), up, up_bias), **gate)
    y = linear(h, down, down_bias) * weight_NK.reshape(-1, 1)
    y = torch.where(real[:, None], y, 0).to(x_ND.dtype)
    return y.view(tokens, per_token, -1).sum(1)
