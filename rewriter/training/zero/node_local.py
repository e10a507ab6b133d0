"""Node-local weights: what crosses nodes is gradients once and weight differences once per step.

ZeRO++ gathers quantized weights from all nodes in every forward: a step moves 0.5 M of weights between nodes at 8 bits
(M: bytes of the 16-bit parameters), and every rank computes with rounded weights. Here each node holds the whole model,
sharded over its ranks by FSDP2, so that no gather leaves it. Between nodes, quantized gradients are reduce-scattered,
every rank steps 1 / (nodes × local ranks) of fp32 master weights (ZeRO-1 across nodes), and the nodes exchange master −
replica, quantized: 0.25 M of gradients and 0.25 M of weights at 4 bits, once per step however many micro-batches it
has, with an error far below that of 8-bit weights, since differences are small (SDP4Bit, arXiv 2410.15526).

Differences are scaled by block. The other code that research/quantization.md measured, differences of bf16 codes in
units of the last place, is nearly exact at small learning rates, but falls behind on weights near zero at 1e-4 and
above; scaled blocks follow at any rate and with any dtype of the replica.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, parse_format
from rewriter.runtime.quantized.schedules import known_format
from rewriter.training.zero.comm_hooks import SeedCounter
from rewriter.training.zero.fsdp import groups_of
from rewriter.training.zero.master_weights import (
    MakeOptimizer,
    MasterWeightOptimizer,
    Parameters,
    clip,
    differing,
    groups_of_parameters,
)
from rewriter.training.zero.slices import SlicedGroup


def node_local_optimizer(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: MakeOptimizer,
    *,
    params: Parameters | None = None,
    gradients: str = "int4-hadamard",
    weights: str = "int4",
) -> NodeLocalOptimizer:
    """Train `model`, sharded inside each node by FSDP2, over the nodes of `mesh`.

        mesh = node_mesh("cuda")                                  # dimensions ("node", "local")
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh["local"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        optimizer = node_local_optimizer(model, mesh, lambda groups: torch.optim.AdamW(groups, lr=1e-4))

    mesh: two dimensions, between nodes and inside the node. optimizer, params: as of `zero_optimizer`, with elementwise
    updates only. gradients, weights: formats of what nodes exchange; gradients are dithered.

    Keep the model in the 16-bit dtype that it computes in: master weights are kept here. Call it on all ranks, with the
    same weights on all nodes, once parameters that are not trained are frozen. Gradients are averaged over all ranks,
    as by FSDP2, and accumulate over backward passes until `zero_grad`; each pass sends them between nodes, unless
    `model.set_requires_all_reduce(False)` puts that off, or `set_requires_gradient_sync(False)` all reduction.
    `model.zero_grad()` does what the optimizer's does; that of a part of the model does nothing.

    Raises RewriterError where the model is not sharded over `mesh`'s second dimension, parameters are not sharded,
    nothing is trained, nodes hold different weights, or a format is unknown.
    """
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise RewriterError(
            f"node_local_optimizer: a mesh of {mesh.ndim} dimensions named {mesh.mesh_dim_names}, expected two with "
            "names, nodes and the ranks of a node, as rewriter.training.node_mesh makes"
        )
    formats = {
        what: known_format(name, f"node_local_optimizer: {what}", parse_format)
        for what, name in (("gradients", gradients), ("weights", weights))
    }
    return NodeLocalOptimizer(model, mesh, optimizer, params, **formats)


class NodeLocalOptimizer(MasterWeightOptimizer):
    """What `node_local_optimizer` returns: steps this rank's master weights by the given optimizer, then exchanges
    weights.

    An Optimizer of the master weights: schedulers take it, `param_groups` and `state` are those of the optimizer
    inside. After backward, gradients are in the master weights' `.grad`, and the model's parameters have none; to clip
    them use `clip_grad_norm_` here. Loading weights into the model renews the master weights.
    """

    name = "node_local_optimizer"
    place_words = "nodes, ranks of a node, and this rank's place in both"

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        optimizer: MakeOptimizer,
        params: Parameters | None,
        gradients: Format,
        weights: Format,
    ) -> None:
        self._mesh = mesh
        self._groups: list[SlicedGroup] = []
        self._seeds = SeedCounter()
        members = dist.get_process_group_ranks(mesh.get_group(1))
        for index, group in enumerate(groups_of(model, "node_local_optimizer")):
            found = dist.get_process_group_ranks(group.process_group)
            if group.mesh.ndim != 1 or found != members:
                raise RewriterError(
                    f"node_local_optimizer: {group.name} is sharded over ranks {found}, expected those of this node, "
                    f"{members}. Call fully_shard(…, mesh=mesh[{(mesh.mesh_dim_names or ('', ''))[1]!r}])"
                )
            if group.trainable:
                across = mesh[(mesh.mesh_dim_names or ("node",))[0]]
                self._groups.append(
                    SlicedGroup(group, across, gradients, weights, self._seeds, f"{group.name} {index}")
                )
        if not self._groups:
            raise RewriterError(
                f"node_local_optimizer: no parameter of {type(model).__name__.removeprefix('FSDP')} requires a "
                "gradient. Set requires_grad_(True) on what is trained"
            )
        self._check_replicas()
        super().__init__(optimizer(self._master_groups(model, params)))
        places = [(group, i) for group in self._groups for i in range(len(group.parameters))]
        parameters = [parameter for group in self._groups for parameter in group.parameters]
        self.follow(model, parameters, lambda index: places[index][0].loaded(places[index][1]))

    def _master_groups(self, model: nn.Module, params: Parameters | None) -> list[dict[str, Any]]:
        owners = {parameter: group for group in self._groups for parameter in group.parameters}
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = []
        for group in groups_of_parameters(model, params):
            weights = []
            for parameter in group["params"]:
                if parameter not in owners:
                    raise RewriterError(
                        f"node_local_optimizer: parameter {names.get(parameter, '(not of the model)')} is not one that "
                        "FSDP2 has sharded and that requires a gradient. Call fully_shard on the module that holds it"
                    )
                weights += owners[parameter].master_weights_of(parameter)
            found.append({**group, "params": weights})
        return found

    def _check_replicas(self) -> None:
        """Only differences are exchanged, so all nodes must begin with the same bits."""
        across, inside = self._mesh.get_all_groups()
        differ = differing(torch.stack([group.checksum() for group in self._groups]), across).long()
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=inside)  # so that all ranks raise
        names = [group.name for group, flag in zip(self._groups, differ.tolist(), strict=True) if flag]
        if names:
            raise RewriterError(
                f"{self.name}: nodes hold different weights in {', '.join(names[:3])} ({len(names)} of "
                f"{len(self._groups)} groups). Load the same checkpoint on all ranks, or seed them alike"
            )

    def after_step(self) -> None:
        """Exchange what the master weights differ by from what the nodes compute with."""
        sent = [group.send() for group in self._groups]
        for group, transfer in zip(self._groups, sent, strict=True):
            group.receive(transfer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for group in self._groups:
            group.kept = None  # what `set_requires_all_reduce(False)` has put off

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that the 2-norm of all of them, over all ranks, is at most `max_norm`; returns the norm.

        torch.nn.utils.clip_grad_norm_ would see this rank's part only. All ranks call it.
        """
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.zeros((), device=self._groups[0].master.device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        return clip(gradients, total, self.rank_groups(), max_norm)

    def rank_groups(self) -> list[ProcessGroup]:
        return self._mesh.get_all_groups()

    def master_weights(self) -> list[Tensor]:
        return [group.master for group in self._groups]

    def place(self) -> tuple[int, ...]:
        return (*self._mesh.shape, *(self._mesh.get_coordinate() or ()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self._seeds.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._seeds.calls = state_dict["calls"]
