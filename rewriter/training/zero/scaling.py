"""What is read inside torch's GradScaler, so that all ranks skip a step, and shrink the scale, together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer


def overflowed(scaler: GradScaler, optimizer: Optimizer, groups: Sequence[ProcessGroup]) -> bool:
    """Unscale the gradients unless that is done, and say whether any rank of `groups` has found inf or NaN in its own.

    Each rank has gradients of its own elements, and a plain GradScaler looks at no others': the rank of an element that
    overflowed would skip a step that the others wait for. `update` reads what is found here. All ranks call it.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    scale = scaler._scale
    assert scale is not None
    found: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
    if not found:  # this rank has no gradients
        found[scale.device] = torch.zeros((), device=scale.device)
    most = torch.stack([flag.reshape(()).to(scale.device) for flag in found.values()]).amax()
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    for flag in found.values():
        flag.fill_(most)
    return bool(most)
