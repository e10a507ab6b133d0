"""Private attributes of FSDP2 that are read and set here, and nowhere else.

`make matrix` checked torch 2.11 to 2.15, on Python 3.11 alone: docs/reference/versions.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rewriter.common.errors import RewriterError

__all__ = ["AllGather", "DefaultAllGather", "DefaultAllocMixin", "ParameterGroup", "ReduceScatter", "groups_of"]


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter that FSDP2 holds. `padded` elements of it stand in each rank's part of a collective, of which the
    first `local` are the rank's own shard, in its order."""

    parameter: nn.Parameter
    padded: int
    local: int


class ParameterGroup:
    """The parameters of one `fully_shard` call, which are gathered and reduced together."""

    def __init__(self, module: FSDPModule, group: Any, outermost: bool) -> None:
        self.module, self._group, self._outermost = module, group, outermost
        self.reduced: list[ShardedParameter] = []  # by the reduction under way, in its order; see `watch_reductions`

    @property
    def name(self) -> str:
        """The name of its module's class."""
        return type(self.module).__name__.removeprefix("FSDP")

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that was given to `fully_shard`."""
        return self._group.mesh_info.mesh

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that parameters are sharded over."""
        return self._group.mesh_info.shard_process_group

    @property
    def parameters(self) -> list[ShardedParameter]:
        return [
            ShardedParameter(p.sharded_param, p.padded_sharded_param_size.numel(), p.sharded_size.numel())
            for p in self._group.fsdp_params
        ]

    @property
    def trainable(self) -> list[ShardedParameter]:
        """Those that require a gradient now."""
        return [p for p in self.parameters if p.parameter.requires_grad]

    def watch_reductions(self) -> None:
        """Have `reduced` say what each reduction holds. FSDP2 leaves out parameters without a gradient, and its
        reduce-scatter is given the number of elements alone; by then the gradients are gone."""
        reduce = self._group.post_backward

        def post_backward(*unused: Any) -> None:
            self.reduced = [
                p for p, held in zip(self.parameters, self._group.fsdp_params, strict=True) if self._takes_part(held)
            ]
            reduce(*unused)

        self._group.post_backward = post_backward

    def _takes_part(self, p: Any) -> bool:
        """As FSDP2 chooses."""
        if not hasattr(p, "_unsharded_param"):
            return False
        if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None:
            return True
        unused = getattr(self._group, "reduce_scatter_unused_params", False)  # torch 2.13
        return bool(unused and p.unsharded_param.requires_grad)

    @property
    def replicas(self) -> tuple[int, int]:
        """The number of copies of the shards (HSDP), and the one that this rank has a part of."""
        info = self._group.mesh_info
        return (info.replicate_mesh_size, info.replicate_mesh_rank) if isinstance(info, HSDPMeshInfo) else (1, 0)

    @property
    def gathered_dtypes(self) -> set[torch.dtype]:
        """The dtypes that parameters are gathered and computed in."""
        wanted: torch.dtype | None = self._group.mp_policy.param_dtype
        own = {p.sharded_param.dtype for p in self._group.fsdp_params}
        return {wanted if wanted is not None and dtype.is_floating_point else dtype for dtype in own}

    @property
    def divide_factor(self) -> float | None:
        """The factor that the user set by `set_gradient_divide_factor`."""
        return self._group.gradient_divide_factor

    @property
    def all_reduces(self) -> bool:
        """The flag of `set_requires_all_reduce`, at which FSDP2 itself looks only where it has replicas."""
        return self._group.all_reduce_grads

    @property
    def reshards(self) -> bool:
        """True where parameters are freed after forward and gathered again in backward. An outermost module whose
        `reshard_after_forward` was left to FSDP2 keeps them."""
        left = self._outermost and self.module._get_fsdp_state()._auto_reshard_after_forward
        return self._group.post_forward_mesh_info is not None and not left

    def set_comms(self, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None) -> None:
        """Put ours in the place of FSDP2's own; None leaves what is there. Raises RewriterError where that is not
        FSDP2's default."""
        for comm, present, default in (
            (all_gather, self._group._all_gather_comm, DefaultAllGather),
            (reduce_scatter, self._group._reduce_scatter_comm, DefaultReduceScatter),
        ):
            if comm is not None and type(present) not in (default, type(comm)):
                raise RewriterError(
                    f"zero_plus_plus: {self.name} communicates with {type(present).__name__} already "
                    "(set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm or a custom one), which "
                    "cannot quantize. Leave that call out"
                )
        if all_gather is not None:
            self.module.set_custom_all_gather(all_gather)
        if reduce_scatter is not None:
            self.module.set_custom_reduce_scatter(reduce_scatter)
            self.watch_reductions()

    def keep_in(self, mesh: DeviceMesh | None) -> None:
        """After forward keep a shard among the ranks of `mesh`'s last dimension (its first: the copies); None keeps
        whole parameters.

        What `fully_shard(…, reshard_after_forward=N)` does. `set_reshard_after_forward` takes no number, and each call
        of either makes new process groups; those of one mesh serve the whole model.
        """
        info = None if mesh is None else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for p in self._group.fsdp_params:
            if p.is_dtensor:
                raise RewriterError(
                    f"secondary: parameter {p._module_info.param_name} of {self.name} is a DTensor (tensor parallel), "
                    "which FSDP2 cannot reshard to fewer ranks. Leave `secondary` out"
                )
            if p.fsdp_placement.dim != 0:
                raise RewriterError(
                    f"secondary: parameter {p._module_info.param_name} of {self.name} is sharded along dimension "
                    f"{p.fsdp_placement.dim}, and FSDP2 can reshard only along 0. Leave `secondary` out"
                )
        self._group.post_forward_mesh_info = info
        for p in self._group.fsdp_params:
            p.post_forward_mesh_info = info
            if info is not None:
                p._init_sharded_post_forward_param_metadata(torch.empty(p._orig_size, device="meta"))
        self._renew_when_changed()

    def _renew_when_changed(self) -> None:
        """Have forward gather anew once shards were written to: what a forward pass without a backward pass has left
        would otherwise be computed with again, after the step. Backward computes with what its forward had."""
        group, unshard = self._group, self._group.unshard
        gathered: list[int] = []
        steps = _optimizer_steps()

        def versions() -> list[int]:
            """Steps of optimizers too, since those of `foreach` and `fused` leave the versions of a DTensor alone."""
            tensors = [t for p in group.fsdp_params for t in (p.sharded_param, p.sharded_param._local_tensor)]
            return [*steps, *(t._version for t in tensors)]

        def renewed(async_op: bool = False) -> None:
            kept = not group.is_sharded and group._all_gather_result is None
            if kept and group._training_state != TrainingState.PRE_BACKWARD and versions() != gathered:
                group._to_sharded()
            if group.is_sharded:
                gathered[:] = versions()
            unshard(async_op)

        group.unshard = renewed


@cache
def _optimizer_steps() -> list[int]:
    """The number of steps that optimizers of this process have made from now on, kept up to date."""
    steps = [0]

    def stepped(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(stepped)
    return steps


def groups_of(model: nn.Module, caller: str) -> list[ParameterGroup]:
    """FSDP2's parameter groups of `model`, in the order of its modules; at least one. Raises RewriterError for FSDP1, a
    model that is not sharded, and groups of several meshes in one module."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise RewriterError(
            f"{caller}: {type(model).__name__} is wrapped in FullyShardedDataParallel (FSDP1). Use "
            "torch.distributed.fsdp.fully_shard instead"
        )
    groups = list(_groups(model, caller))
    if not groups:
        raise RewriterError(
            f"{caller}: {type(model).__name__} is not sharded. Call torch.distributed.fsdp.fully_shard on its layers "
            "and on itself first"
        )
    return groups


def _groups(model: nn.Module, caller: str) -> Iterator[ParameterGroup]:
    seen: set[int] = set()
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = {id(child) for module in sharded for child in module.modules() if child is not module}
    for module in sharded:
        state: Any = module._get_fsdp_state()
        groups: Sequence[Any]
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # torch < 2.12
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(groups) > 1:
            raise RewriterError(
                f"{caller}: parameters of {type(module).__name__} are sharded over several meshes by "
                "shard_placement_fn, where FSDP2 takes no custom communication. Give them modules of their own"
            )
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield ParameterGroup(module, group, id(module) not in inner)


def reduction_factor(op: Any, ranks: int) -> float:
    """The factor of FSDP2's sum over `ranks`: `op` is SUM, AVG, or PREMUL_SUM with a factor inside."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])  # how it is pickled; there is no other way to its factor
    raise RewriterError(f"gradients: FSDP2 asks for the reduction {op}, expected SUM, AVG or PREMUL_SUM")


def local_shard(parameter: Tensor) -> Tensor:
    """This rank's elements of a sharded parameter or of its gradient, as one dimension of the same memory."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        return parameter.to_local().view(-1)
