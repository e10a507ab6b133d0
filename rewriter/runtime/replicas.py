"""Ranks that hold the same parameters: the sums of their gradients, and the loss of which these are the gradients.

The loss of a rank is the sum of its own tokens' losses over the mean number of targets of a data-parallel replica, that
of all its tokens: gradients that are summed over the ranks of a sequence and averaged over replicas are those of the
mean over all targets, however unevenly these are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.runtime.attention.mesh import DIMENSIONS, flattened
from rewriter.runtime.collectives.differentiable import all_reduce
from rewriter.runtime.collectives.gradients import with_gradient


@dataclass(frozen=True)
class Replicas:
    """The mesh dimensions "dp", "heads", "columns" and "rows" as one, or None for a single rank.

    data_parallel: how many replicas see different rows; the other ranks see different tokens of the same rows.
    own: the ranks of this rank's replica, tensor-parallel ones included; None for a single rank.
    """

    mesh: DeviceMesh | None = None
    data_parallel: int = 1
    own: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Replicas:
        """Those of this rank. Every rank of the mesh calls it."""
        rows, own = flattened(mesh, ["dp"], "dp"), flattened(mesh, [*DIMENSIONS, "tp"], "sp_tp")
        return cls(
            flattened(mesh, ["dp", *DIMENSIONS], "dp_sp"),
            1 if rows is None else rows.size(),
            None if own is None else own.get_group(),
        )

    @property
    def group(self) -> ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group()


_HOOK = "_rewriter_gradient_hook"  # on a parameter: the handle of its hook
_SHARDED = "_rewriter_sharded"  # on a model: leave_gradients was called


def sum_gradients(model: Any) -> None:
    """Have backward leave in `.grad` of a RuntimeModel the sum over all ranks of a sequence, averaged over replicas.

    A hook on every parameter that requires a gradient all-reduces in fp32 what one backward adds to `.grad`. A tied
    weight is summed once. A parameter that takes no part in a backward pass gets no gradient, on any rank. The model's
    forward calls this: parameters that were added since, such as adapters, get their hook then. A model whose
    parameters FSDP2 holds is left alone.

    Raises RewriterError for a model with sequence ranks that `fully_shard` was called on directly, since FSDP2 then
    divides gradients by the number of sequence ranks.
    """
    group = model.replicas.group
    if group is None or getattr(model, _SHARDED, False):
        return
    from torch.distributed.fsdp import FSDPModule  # half a second, which a rank that does not train saves

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        if model.sequence is not None and model.sequence.ranks > 1:
            raise RewriterError(
                f"{type(model).__name__}: fully_shard was called on it directly, and would average gradients over "
                f"{model.sequence.ranks} sequence ranks, where they are to be summed. Call "
                "rewriter.training.shard_parameters(model) instead"
            )
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, _HOOK):
            hook = _summed(group, model.replicas.data_parallel)
            setattr(parameter, _HOOK, parameter.register_hook(hook))


def _summed(group: ProcessGroup, data_parallel: int) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.div_(data_parallel).to(gradient.dtype)

    return hook


def leave_gradients(model: nn.Module) -> None:
    """Remove what `sum_gradients` has put on parameters, and have it leave this model alone: others reduce them."""
    for parameter in model.parameters():
        hook = getattr(parameter, _HOOK, None)
        if hook is not None:
            hook.remove()
            delattr(parameter, _HOOK)
    setattr(model, _SHARDED, True)


IGNORED = -100


def next_tokens(labels_BS: Tensor) -> Tensor:
    """int64 [B, S]: what each position predicts, the label of the next one; IGNORED at the end.

    For full sequences: within a rank's tokens the next label is not that of the next token.
    """
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)


def global_loss(logits_BSV: Tensor, targets_BS: Tensor, replicas: Replicas) -> Tensor:
    """The mean cross entropy over the targets of all ranks that are not IGNORED: a scalar, fp32 (fp64 of fp64 logits).

    Its value is equal on all ranks. Its gradient flows through this rank's tokens alone, scaled as the head of this
    file says; the sum that makes the value takes no part in it. Without any target, loss and gradients are 0: one batch
    in which everything is ignored shall not end a training run in NaN, as the mean of nothing would.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    own = F.cross_entropy(
        logits_BSV.flatten(0, 1).to(dtype), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    # in fp64, which counts exactly
    totals = torch.stack([own.detach().double(), (targets_BS != IGNORED).sum().double()])
    total, targets = all_reduce(totals, replicas.group, "loss").unbind()
    targets = targets.clamp(min=1)
    scaled = own * (replicas.data_parallel / targets).to(dtype)
    return with_gradient(scaled, lambda _: (total / targets).to(dtype))
