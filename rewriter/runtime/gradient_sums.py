"""Gradients of parameters that several ranks hold: summed over the ranks of a sequence, averaged over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.replicas import Replicas
from rewriter.runtime.sequence_axis import SequenceAxis

_HOOK = "_rewriter_gradient_hook"  # on a parameter: the handle of its hook
_SHARDED = "_rewriter_sharded"  # on a model: leave_gradients was called


class _Model(Protocol):
    """A RuntimeModel, whose forward calls `sum_gradients`."""

    replicas: Replicas
    sequence: SequenceAxis | None

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def sum_gradients(model: _Model) -> None:
    """Have backward leave in `.grad` the sum over all ranks of a sequence, averaged over replicas.

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
