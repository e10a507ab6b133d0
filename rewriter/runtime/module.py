"""Base class of every emitted `Model`, of any architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import check_tokens
from rewriter.ir.phases import PromptPhase
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.cache import SlotSpec, StateSpec, StaticCache
from rewriter.runtime.context import (
    Context,
    check_agreement,
    positions,
    rewired_by_default,
    segment_positions,
    shard_tokens,
)
from rewriter.runtime.replicas import IGNORED, Replicas, global_loss, next_tokens, sum_gradients

ENTRIES = ("rewired", "exact", "keys")  # names of layers' methods that run them, besides `forward`, begin so


class LocalLogits(NamedTuple):
    """Logits [B, n, V] of the n tokens that a rank holds, padding left out, and their places in the row, int64 [n]."""

    logits: Tensor
    indices: Tensor


class LossOutput(NamedTuple):
    """`loss`: a scalar, equal on all ranks, whose gradient flows through a rank's own tokens. The rest: LocalLogits."""

    loss: Tensor
    logits: Tensor
    indices: Tensor


class RuntimeModel(nn.Module):
    """Base of an emitted model, which defines `compute`; users call the model itself, whose `forward` is here.

    `slots` says what a cache must hold, in order of the slot numbers that attention calls and mixers use.
    `dropout_probability` is the largest one in the source model's configuration; the traced computation is that of
    evaluation, which has none. `sequence` is the axis over which tokens are sharded, None where there is none.
    `by_length`: what a token computes depends on the length of its call, so that a prompt is one call; after
    `renewed_after` tokens, keys and values of all of them are computed anew. The mesh may have a dimension "dp" of
    replicas that see different rows.
    `in_fp32` are the parameters that transformers keeps in fp32 in a model of a dtype, by its name, with * for the
    number of a layer. `phase` says which tokens of a prompt are rewired, where not all tokens are computed alike: the
    model then has `compute_rewired`, `compute_exact`, `compute_mixed` and `compute_keys` in place of `compute`.
    `vocabulary` is the number of tokens, `positions` that of the table of positions; None where it is not known, or
    where there is no table.
    """

    slots: Sequence[SlotSpec | StateSpec] = ()
    dropout_probability: float = 0.0
    sequence: SequenceAxis | None = None
    by_length: bool = False
    in_fp32: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    renewed_after: int | None = None
    phase: PromptPhase | None = None
    vocabulary: int | None = None
    positions: int | None = None

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.replicas = Replicas.of(mesh)

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor | None = None,
        ctx: Context | None = None,
        logits_to_keep: int | None = 0,
        *,
        labels: Tensor | None = None,
        gather: bool = True,
    ) -> Tensor | LocalLogits | LossOutput | None:
        """Logits [B, S, V] of the full vocabulary for tokens int64 [B, S], of which every rank passes all.

        `position_ids_BS` (int64) are by default 0 … S − 1, counted from each row's first valid token, or from the start
        of its segment; `ctx` is by default that of full, unpadded rows. `logits_to_keep` n > 0 gives the logits of the
        last n tokens only, so that prefill need not compute the rest; None gives no logits: the call only fills its
        cache. Where tokens are sharded, `gather=False` leaves
        each rank those of its own tokens: LocalLogits.

        With `labels` (int64 [B, S], the tokens themselves; −100 is ignored) the result is a LossOutput, with the loss
        that transformers computes on one device: position t is asked for label t + 1, and the mean is that of all
        targets of all rows, on all ranks. Without any target it is 0, and so are gradients. Backward leaves every
        rank the gradient of this mean: see `rewriter.runtime.replicas`.

        Raises RewriterError for tokens beyond the vocabulary (on a CPU, and where they do not follow others), for
        tokens after a cache without their positions, for labels, padding, segments or `ctx.rewired` of another shape
        than the tokens, for `ctx.rewired` where all tokens are computed alike, for arguments that exclude each other,
        and where ranks that share sequences are given different ones.
        """
        ctx = self._context(input_ids_BS, ctx or Context())
        rewired = self._rewired(input_ids_BS, ctx)
        if ctx.rewired is not None:
            ctx = replace(ctx, rewired=None)
        if position_ids_BS is None:
            position_ids_BS = self._positions(input_ids_BS, ctx)
        if labels is not None and labels.shape != input_ids_BS.shape:
            raise RewriterError(
                f"labels {list(labels.shape)}: expected the shape of input_ids, {list(input_ids_BS.shape)}"
            )
        if logits_to_keep is None and (ctx.cache is None or labels is not None or not gather):
            raise RewriterError(
                "logits_to_keep=None only fills a cache. Pass one in the context, without labels or gather"
            )
        if logits_to_keep and (labels is not None or not gather):
            raise RewriterError(
                f"logits_to_keep={logits_to_keep} leaves logits of the last tokens on every rank. Leave out "
                f"{'gather=False' if labels is None else 'labels'}, or logits_to_keep"
            )
        if ctx.shards is not None:
            check_agreement(
                self.replicas.own,
                input_ids_BS.device,
                input_ids=input_ids_BS,
                labels=labels,
                segment_ids=ctx.segment_ids,
                first_valid=ctx.first_valid,
                position_ids=position_ids_BS,
                **({} if self.phase is None else {"rewired": rewired if isinstance(rewired, Tensor) else None}),
            )
        if torch.is_grad_enabled():
            sum_gradients(self)
        whole = gather and labels is None
        inputs = (input_ids_BS, position_ids_BS)
        if logits_to_keep is None and rewired is True:
            self.compute_keys(*inputs, ctx)
            return None
        options = (1 if logits_to_keep is None else logits_to_keep, whole and logits_to_keep == 0)
        if isinstance(rewired, Tensor):
            logits = self.compute_mixed(*inputs, rewired, ctx, *options)
        elif rewired is None:
            logits = self.compute(*inputs, ctx, *options)
        else:
            logits = (self.compute_rewired if rewired else self.compute_exact)(*inputs, ctx, *options)
        if logits_to_keep is None:
            return None
        if whole:
            return logits
        loss = None
        if labels is not None:
            loss = global_loss(logits, shard_tokens(next_tokens(labels), ctx, IGNORED), self.replicas)
        local = _without_padding(logits, ctx)
        return local if loss is None else LossOutput(loss, *local)

    def compute(
        self, input_ids: Tensor, position_ids: Tensor, ctx: Context, logits_to_keep: int = 0, gather: bool = True
    ) -> Tensor:
        """Generated code: logits of all tokens, or without `gather` of those that this rank holds, with padding."""
        raise NotImplementedError(f"{type(self).__name__} has no compute")

    def compute_rewired(
        self, input_ids: Tensor, position_ids: Tensor, ctx: Context, logits_to_keep: int = 0, gather: bool = True
    ) -> Tensor:
        """Generated code, where there is a `phase`: `compute` for rewired tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_rewired")

    def compute_exact(
        self, input_ids: Tensor, position_ids: Tensor, ctx: Context, logits_to_keep: int = 0, gather: bool = True
    ) -> Tensor:
        """Generated code, where there is a `phase`: `compute` for exact tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_exact")

    def compute_mixed(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rewired: Tensor,
        ctx: Context,
        logits_to_keep: int = 0,
        gather: bool = True,
    ) -> Tensor:
        """Generated code, where there is a `phase`: `compute` for tokens of which `rewired` [B, S] are rewired."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_mixed")

    def compute_keys(self, input_ids: Tensor, position_ids: Tensor, ctx: Context) -> None:
        """Generated code, where there is a `phase`: stores keys and values of rewired tokens, and computes no more."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_keys")

    def _rewired(self, input_ids_BS: Tensor, ctx: Context) -> Tensor | bool | None:
        """The tokens of a call that are rewired: bool [B, S], or all or none of them; None without a `phase`."""
        shape, rewired = input_ids_BS.shape, ctx.rewired
        if self.phase is None:
            if rewired is not None:
                raise RewriterError(
                    f"{type(self).__name__} computes all tokens alike: leave rewired out of the context"
                )
            return None
        if rewired is None:
            rewired = rewired_by_default(self.phase, shape, ctx, input_ids_BS.device)
        if not isinstance(rewired, Tensor):
            return rewired
        if rewired.dtype != torch.bool or rewired.shape not in (shape, (1, shape[1])):
            raise RewriterError(f"rewired: {rewired.dtype} {list(rewired.shape)}; expected bool {list(shape)}")
        return rewired.expand(shape)

    def _context(self, input_ids_BS: Tensor, ctx: Context) -> Context:
        """`ctx` with what it says about tokens that are sharded over ranks."""
        on_host = input_ids_BS.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_host and ctx.position is None and self.vocabulary is not None and input_ids_BS.numel():
            check_tokens("input_ids", [int(end) for end in input_ids_BS.aminmax()], self.vocabulary)
        if ctx.segment_ids is not None and ctx.segment_ids.shape != input_ids_BS.shape:
            raise RewriterError(
                f"segment_ids {list(ctx.segment_ids.shape)}: expected the shape of input_ids, "
                f"{list(input_ids_BS.shape)}"
            )
        if ctx.first_valid is not None and ctx.first_valid.shape != input_ids_BS.shape[:1]:
            raise RewriterError(
                f"first_valid {list(ctx.first_valid.shape)}: expected the padding of each row, "
                f"{list(input_ids_BS.shape[:1])}"
            )
        if self.sequence is None or self.sequence.ranks == 1:
            return ctx
        if isinstance(ctx.cache, StaticCache):
            raise RewriterError(
                f"StaticCache: it holds all keys on each rank, but tokens are sharded over {self.sequence.ranks}. Use "
                "rewriter.runtime.SequenceCache, or generate"
            )
        # tokens after others are few: every rank computes them, and looks at the keys that it holds
        return ctx if ctx.position is not None else replace(ctx, shards=self.sequence.shards(input_ids_BS.shape[1]))

    def _positions(self, input_ids_BS: Tensor, ctx: Context) -> Tensor:
        if ctx.position is not None:
            raise RewriterError(
                f"{type(self).__name__}: the context says that tokens follow others, but position_ids is None. "
                "Pass their positions"
            )
        if ctx.segment_ids is not None:
            return segment_positions(ctx.segment_ids)
        batch, length = input_ids_BS.shape
        return positions(length, ctx.first_valid, batch, input_ids_BS.device)

    def train(self, mode: bool = True) -> Self:
        if mode and self.dropout_probability > 0:
            raise RewriterError(
                f"{type(self).__name__}.train(): the model has dropout probability {self.dropout_probability}, which "
                "the sharded module does not apply. Train it in eval mode, or set dropout to 0 in config.json and "
                "rewrite again"
            )
        return super().train(mode)


def _without_padding(logits: Tensor, ctx: Context) -> LocalLogits:
    if ctx.shards is None:
        return LocalLogits(logits, torch.arange(logits.shape[1], device=logits.device))
    indices = ctx.shards.indices
    (real,) = torch.where(indices < ctx.shards.length)
    if len(real) < len(indices):
        logits = logits.index_select(1, real.to(logits.device))
    return LocalLogits(logits, indices[real].to(logits.device))
