"""Runtime modules whose parameters, or whose optimizer, are sharded over data- and sequence-parallel ranks.

Gradients are reduced in fp32 for parameters of any dtype. Tensor-parallel ranks take no part: their parameters are
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from rewriter.common.errors import RewriterError
from rewriter.runtime.module import ENTRIES, RuntimeModel
from rewriter.runtime.replicas import leave_gradients
from rewriter.training.zero.master_weights import Parameters
from rewriter.training.zero.stages import ZeroOptimizer, zero_optimizer


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
    leave_gradients(model)
    reduced = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduced)
    for module in [*_read_by_others(model), *_layers(model), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
        # A sum, divided afterwards: gloo has no other, and NCCL's division before the sum would need another.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(float(model.replicas.data_parallel))
        for name in (name for name in dir(type(module)) if name.startswith(ENTRIES)):
            register_fsdp_forward_method(module, name)
    return model


def shard_optimizer(
    model: RuntimeModel,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer],
    *,
    stage: int,
    params: Parameters | None = None,
    **options: Any,
) -> ZeroOptimizer:
    """ZeRO stage 1 or 2 over all data- and sequence-parallel ranks: `zero_optimizer`, with its arguments and errors.

    Gradients are summed over the ranks of a sequence and averaged over replicas. Each tensor-parallel rank shards the
    optimizer of its own parameters. Call it after loading, once what is not trained is frozen.
    """
    if isinstance(model, FSDPModule):
        raise RewriterError(f"shard_optimizer: {type(model).__name__} is sharded already. Load it again first")
    leave_gradients(model)
    divide = float(model.replicas.data_parallel)
    return zero_optimizer(model, optimizer, model.replicas.group, stage=stage, params=params, divide=divide, **options)


def _read_by_others(model: nn.Module) -> list[nn.Module]:
    """Norms that may be called when their layer has returned: of a pending sum, by the next layer or by the model.

    As parts of their layer they would be sharded again by then.
    """
    layers = list(_layers(model))
    if not any(name.startswith("previous") for layer in layers for name in signature(layer.forward).parameters):
        return []
    children = [child for layer in layers for child in layer.children()]
    return [child for child in children if child._parameters and next(child.children(), None) is None]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)
