"""The norm of a gradient that is sharded over ranks: every element of the model counts once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(
    module: nn.Module,
    largest: float,
    shares: Mapping[str, float | Tensor] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `largest`; returns the norm, fp32, equal on all ranks.

    What FSDP2 has sharded is summed over its mesh. Tensor-parallel ranks (`group`) hold parts of parameters, and some
    elements alike: `shares` says by name how much of an element is this rank's (1 over its copies); it speaks of whole
    parameters, of which FSDP2 shards the first dimension.
    """
    sharded: dict[ProcessGroup, Tensor] = {}
    own: Tensor | None = None
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        share = 1.0 if shares is None else shares.get(name, 1.0)
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            total = _squares(local, _local_share(share, gradient))
            where = gradient.device_mesh.get_group()
            sharded[where] = sharded[where] + total if where in sharded else total
        else:
            total = _squares(gradient, share)
            own = total if own is None else own + total
    for where, total in sharded.items():
        dist.all_reduce(total, group=where)
        own = total if own is None else own + total
    if own is None:
        return torch.zeros(())
    if group is not None and group.size() > 1:
        dist.all_reduce(own, group=group)
    norm = own.sqrt()
    nn.utils.clip_grads_with_norm_(module.parameters(), largest, norm, foreach=False)
    return norm


def _squares(gradient: Tensor, share: float | Tensor) -> Tensor:
    squares = gradient.float().square()
    return (squares * share).sum() if isinstance(share, Tensor) else squares.sum() * share


def _local_share(share: float | Tensor, gradient: DTensor) -> float | Tensor:
    """The rows of a share that this rank's rows of a gradient have."""
    if not isinstance(share, Tensor) or share.shape[0] == 1:
        return share
    size, ranks, rank = gradient.shape[0], gradient.device_mesh.size(), gradient.device_mesh.get_local_rank()
    rows = -(-size // ranks)
    return share[min(rank * rows, size) : min((rank + 1) * rows, size)]
