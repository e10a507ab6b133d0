"""Gradients of parameters that several ranks hold: summed over the ranks of a sequence, averaged over replicas.

Each rank's backward gives a parameter the part of the rank's own tokens and rows. The sum is made in fp32 whatever the
parameter's dtype, either by hooks on the parameters of a plain module (`sum_gradients`), or by FSDP2, which also shards
parameters, gradients and optimizer state over these ranks (`shard_parameters`). Tensor-parallel ranks take no part:
their parameters are their own.

`shard_optimizer` leaves parameters whole and shards the optimizer (ZeRO stages 1 and 2), as `zero_optimizer` does for
any module. Where nodes have slow links between them, `zero_plus_plus` quantizes what FSDP2 communicates, and
`node_resident` keeps weights in the node: see `rewriter.runtime.zero`. `quantize_frozen` keeps weights that are not
trained as bytes, and `export_quantized` writes those that were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from rewriter.errors import RewriterError
from rewriter.runtime.zero import (
    Exported,
    Frozen,
    NodeResident,
    StagedOptimizer,
    ZeroPlusPlus,
    export_quantized,
    load_quantized,
    node_mesh,
    node_resident,
    quantize_frozen,
    zero_optimizer,
    zero_plus_plus,
)
from rewriter.runtime.zero.masters import Parameters

if TYPE_CHECKING:
    from rewriter.runtime.module import RuntimeModel

__all__ = [
    "Exported",
    "Frozen",
    "NodeResident",
    "StagedOptimizer",
    "ZeroPlusPlus",
    "export_quantized",
    "load_quantized",
    "node_mesh",
    "node_resident",
    "quantize_frozen",
    "shard_optimizer",
    "shard_parameters",
    "sum_gradients",
    "zero_optimizer",
    "zero_plus_plus",
]

_HOOK = "_rewriter_gradient_hook"  # on a parameter: the handle of its hook
_SHARDED = "_rewriter_sharded"  # on a model: shard_parameters has seen to its gradients


def sum_gradients(model: RuntimeModel) -> None:
    """See to it that backward leaves in `.grad` the sum over all ranks of a sequence, averaged over replicas.

    By a hook on every parameter that requires a gradient: an all-reduce in fp32 of what one backward adds to `.grad`,
    so that gradients of several backward passes accumulate. A tied weight is summed once. A parameter that takes no
    part in a backward pass gets no gradient, on any rank. The model's forward calls this, which finds parameters that
    were added since, such as adapters; it does nothing for those that have their hook. A model whose parameters FSDP2
    holds is left alone.

    Raises RewriterError for a model with sequence ranks that `fully_shard` was called on directly, since FSDP2 then
    divides gradients by the number of sequence ranks.
    """
    group = model.replicas.group
    if group is None or getattr(model, _SHARDED, False):
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        if model.sequence is not None and model.sequence.ranks > 1:
            raise RewriterError(
                f"{type(model).__name__}: fully_shard was called on it directly, and would average gradients over "
                f"{model.sequence.ranks} sequence ranks, where they are to be summed. Call "
                "rewriter.runtime.shard_parameters(model) instead"
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


def shard_parameters(
    model: RuntimeModel, *, param_dtype: torch.dtype | None = None, reshard_after_forward: bool = True
) -> RuntimeModel:
    """Shard parameters over all data- and sequence-parallel ranks with FSDP2, each layer and the rest by itself.

    In place; returns the model. Gradients are reduced in fp32, summed over the ranks of a sequence and averaged over
    replicas. `param_dtype`: what layers compute in, where parameters are kept in a wider type. Each tensor-parallel
    rank shards its own parameters. Call it after loading, and before the optimizer takes the parameters; from then on
    all these ranks call the model equally often. A model on one rank, or with tensor parallelism alone, is returned as
    it is.

    Raises RewriterError if the model was sharded before.
    """
    mesh = model.replicas.mesh
    if mesh is None:
        return model
    if isinstance(model, FSDPModule):
        raise RewriterError(f"shard_parameters: {type(model).__name__} is sharded already. Load it again first")
    _unhook(model)
    reduced = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduced)
    for module in [*_read_by_others(model), *_layers(model), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
        # A sum, divided afterwards: gloo has no other, and NCCL's division before the sum would need one of its own.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(float(model.replicas.data_parallel))
    setattr(model, _SHARDED, True)
    return model


def shard_optimizer(
    model: RuntimeModel,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer],
    *,
    stage: int,
    params: Parameters | None = None,
    **options: Any,
) -> StagedOptimizer:
    """ZeRO stage 1 or 2 over all data- and sequence-parallel ranks: `zero_optimizer`, with its arguments and errors.

    Gradients are summed over the ranks of a sequence and averaged over replicas. Each tensor-parallel rank shards the
    optimizer of its own parameters. Call it after loading, once what is not trained is frozen.
    """
    if isinstance(model, FSDPModule):
        raise RewriterError(f"shard_optimizer: {type(model).__name__} is sharded already. Load it again first")
    _unhook(model)
    divide = float(model.replicas.data_parallel)
    made = zero_optimizer(model, optimizer, model.replicas.group, stage=stage, params=params, divide=divide, **options)
    setattr(model, _SHARDED, True)
    return made


def _unhook(model: nn.Module) -> None:
    """Remove what `sum_gradients` has put on parameters."""
    for parameter in model.parameters():
        hook = getattr(parameter, _HOOK, None)
        if hook is not None:
            hook.remove()
            delattr(parameter, _HOOK)


def _read_by_others(model: nn.Module) -> list[nn.Module]:
    """Norms that may be called when their layer has returned: of a pending sum, by the layer behind or by the model.

    As parts of their layer they would be sharded again by then.
    """
    layers = list(_layers(model))
    if not any("previous" in signature(layer.forward).parameters for layer in layers):
        return []
    children = [child for layer in layers for child in layer.children()]
    return [child for child in children if child._parameters and next(child.children(), None) is None]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)
