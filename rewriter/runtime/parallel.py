"""Layers of which a rank holds a part. Their names for parameters are those of the full layers.

Sizes are local. The linear ones are `nn.Linear`, so tools that look for `nn.Linear` (LoRA, quantisation) find them.
None of them communicates in forward: sums are printed where the schedule puts them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives.differentiable import Shared, once, share, shared_gradient
from rewriter.runtime.collectives.gradients import copy_to_group
from rewriter.runtime.collectives.process_groups import group_rank


class ColumnParallelLinear(nn.Linear):
    """A linear layer split by outputs: weight [out_features (local), in_features], bias [out_features (local)].

    Takes a replicated x [..., in_features] and returns this rank's outputs [..., out_features (local)]. `shared` says
    which rows of the full layer these are, where ranks hold some of them more than once.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, shared: Shared | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.shared = shared

    def forward(self, input: Tensor) -> Tensor:
        if self.shared is None or not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        weight = shared_gradient(self.weight, self.shared)
        bias = None if self.bias is None else shared_gradient(self.bias, self.shared)
        return F.linear(input, weight, bias)


def _matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """[out_features, in_features]."""
    return weight.t() if isinstance(layer, Conv1D) else weight


class _RowParallel(nn.Module):
    weight: Any  # as the other base has them
    bias: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: ProcessGroup | None = None,
        bias_share: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias)  # of nn.Linear or Conv1D
        self.group = group
        self.bias_of_rank = share if bias_share else once

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, _matrix(self, self.weight), self.bias_of_rank(self.bias, self.group))


class RowParallelLinear(_RowParallel, nn.Linear):
    """A linear layer split by inputs: weight [out_features, in_features (local)], bias [out_features] on every rank.

    Takes this rank's x [..., in_features (local)] and returns a partial [..., out_features]: the caller sums it over
    `group`. The bias is added on the first rank only; with `bias_share` each rank adds an equal share of it, for
    partials that are also read without the sum.
    """


class Conv1D(nn.Module):
    """GPT-2's linear layer as transformers stores it: weight [in_features, out_features], bias [out_features].

    The order of the arguments is nn.Linear's, not that of transformers' class (which takes the output size first).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnParallelConv1D(Conv1D):
    """`Conv1D` split by outputs: weight [in_features, out_features (local)], bias [out_features (local)]."""


class RowParallelConv1D(_RowParallel, Conv1D):
    """`Conv1D` split by inputs: weight [in_features (local), out_features], bias [out_features]; returns a partial.

    `bias_share` is as in `RowParallelLinear`.
    """


class _PerRank(nn.Module):
    weight: Any  # as the other base has them
    bias: Any

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, group: ProcessGroup | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)  # of nn.Linear or Conv1D
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        weight = _matrix(self, copy_to_group(self.weight, self.group))
        return F.linear(input, weight, _copied(self.bias, self.group))


class PerRankLinear(_PerRank, nn.Linear):
    """A full linear layer on every rank, whose input differs by rank: gradients are summed over `group`."""


class PerRankConv1D(_PerRank, Conv1D):
    """A full `Conv1D` on every rank, whose input differs by rank: gradients are summed over `group`."""


class PerRankLayerNorm(nn.LayerNorm):
    """A layer norm with equal weights on every rank, whose input differs by rank: gradients are summed over `group`."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, group: ProcessGroup | None = None) -> None:
        super().__init__(normalized_shape, eps=eps)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = copy_to_group(self.weight, self.group), _copied(self.bias, self.group)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def _copied(x: Tensor | None, group: ProcessGroup | None) -> Tensor | None:
    return None if x is None else copy_to_group(x, group)


class VocabParallelEmbedding(nn.Embedding):
    """Rows `first_index … first_index + num_embeddings - 1` of a token embedding: weight [num_embeddings (local),
    dim].

    Takes ids [...] (int64, of the full vocabulary) and returns a partial [..., dim]: zeros where another rank holds
    the row. The caller sums it over `group`. Without `first_index` ranks hold equal consecutive parts. The row of
    `padding_idx`, of the full vocabulary too, has no gradient from here, as in `nn.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        first_index: int | None = None,
        group: ProcessGroup | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.group, self.padding_idx = group, padding_idx
        self.first_index = group_rank(group) * num_embeddings if first_index is None else first_index

    def forward(self, input: Tensor) -> Tensor:
        return _rows(input, self.weight, self.first_index, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, first_index={self.first_index}"


class OffloadedEmbedding(nn.Embedding):
    """An embedding whose table stays in the host's memory: ids go there and rows come back.

    `load` leaves its weight on the CPU, where it is a view of the mapped file that ranks of one host share, unless a
    dtype is asked for that is not the file's.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = F.embedding(input.to(self.weight.device), self.weight, self.padding_idx)
        return rows.to(input.device)


def vocab_embedding(ids: Tensor, weight: Tensor, group: ProcessGroup | None, padding_idx: int | None = None) -> Tensor:
    """`VocabParallelEmbedding` as a function, for embeddings that do more than look up (Gemma's scaled ones)."""
    return _rows(ids, weight, group_rank(group) * weight.shape[0], padding_idx)


def _rows(ids: Tensor, weight: Tensor, first_index: int, padding_idx: int | None) -> Tensor:
    local = ids - first_index
    elsewhere = (local < 0) | (local >= weight.shape[0])
    padding = None if padding_idx is None else padding_idx - first_index
    if padding is not None and not 0 <= padding < weight.shape[0]:
        padding = None
    return F.embedding(local.masked_fill(elsewhere, 0), weight, padding).masked_fill(elsewhere[..., None], 0)
