"""Node-local weights: what crosses nodes is gradients once and weight differences once per step.

ZeRO++ gathers quantized weights from all nodes in every forward: a step moves 0.5 M of weights between nodes at 8 bits
(M: bytes of the 16-bit parameters), and every rank computes with rounded weights. Here each node holds the whole model,
sharded over its ranks by FSDP2, so that no gather leaves it. Between nodes, quantized gradients are reduce-scattered,
every rank steps 1 / (nodes × local ranks) of fp32 master weights (ZeRO-1 across nodes), and the nodes exchange master −
replica, quantized: 0.25 M of gradients and 0.25 M of weights at 4 bits, once per step however many micro-batches it
has, with an error far below that of 8-bit weights, since differences are small (SDP4Bit, arXiv 2410.15526).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, dequantize_rows, parse_format, quantize_rows
from rewriter.runtime.collectives.exchange import Transfer, gather_start
from rewriter.runtime.context import checksum
from rewriter.runtime.quantized.launch import reduce_scatter
from rewriter.runtime.quantized.schedules import known_format
from rewriter.training.zero.flat import BlockLayout, OwnedPiece, accumulate_gradient, owned_pieces
from rewriter.training.zero.fsdp import ParameterGroup, groups_of, local_shard
from rewriter.training.zero.master_weights import (
    MakeOptimizer,
    MasterWeightOptimizer,
    Parameters,
    groups_of_masters,
    groups_of_parameters,
    refuse_differing,
)
from rewriter.training.zero.nodes import NODE
from rewriter.training.zero.plus_plus import SeedCounter


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
    updates only. gradients, weights: formats of what nodes exchange; gradients are dithered, so not fp8.

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
        what: known_format(name, f"node_local_optimizer: {what}", partial(parse_format, dithered=what == "gradients"))
        for what, name in (("gradients", gradients), ("weights", weights))
    }
    return NodeLocalOptimizer(model, mesh, optimizer, params, **formats)


class NodeLocalOptimizer(MasterWeightOptimizer):
    """The optimizer of `node_local_optimizer`: steps this rank's master weights by the given one, then exchanges them.

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
            ranks = dist.get_process_group_ranks(group.process_group)
            if group.mesh.ndim != 1 or ranks != members:
                raise RewriterError(
                    f"node_local_optimizer: {group.name} is sharded over ranks {ranks}, expected those of this node, "
                    f"{members}. Call fully_shard(…, mesh=mesh[{(mesh.mesh_dim_names or ('', ''))[1]!r}])"
                )
            if group.trainable:
                across = mesh[(mesh.mesh_dim_names or ("node",))[0]]
                self._groups.append(
                    SlicedGroup(group, across, gradients, weights, self._seeds, f"{group.name} {index}")
                )
        owners = {parameter: group for group in self._groups for parameter in group.parameters}
        groups = groups_of_parameters(
            self.name, model, params,
            lambda p: {"is not one that FSDP2 has sharded (call fully_shard on its module)": p not in owners},
        )  # fmt: skip
        # only differences are exchanged, so all nodes must begin with the same bits
        refuse_differing(
            torch.stack([group.checksum() for group in self._groups]), [group.name for group in self._groups],
            self.rank_groups(), "node_local_optimizer: nodes hold different weights in {names} ({count} groups). Load "
            "the same checkpoint on all ranks, or seed them alike",
        )  # fmt: skip
        super().__init__(
            optimizer(groups_of_masters(groups, lambda p: [master for q, master in owners[p].owned() if q is p]))
        )
        places = [(group, i) for group in self._groups for i in range(len(group.parameters))]
        self.follow(model, list(owners), lambda index: places[index][0].loaded(places[index][1]))

    def after_step(self) -> None:
        """Exchange what the master weights differ by from what the nodes compute with."""
        sent = [group.send() for group in self._groups]
        for group, transfer in zip(self._groups, sent, strict=True):
            group.receive(transfer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        for group in self._groups:
            group.kept = None  # what `set_requires_all_reduce(False)` has put off

    def owned(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [pair for group in self._groups for pair in group.owned()]

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


class SlicedGroup:
    """One FSDP2 parameter group of a node, sliced over nodes: fp32 masters of this rank's slice [S], with their
    gradients, and the shards that they are exchanged for.

    The shards of a node together are its replica of the group, which FSDP2 computes with. All nodes hold the same
    bits: whoever steps an element too adds what it sent, not what it holds, and so what a message rounds off comes
    again with the next difference between master and replica.

    Shape suffixes: N elements of this rank's shards as FSDP2 lays them out, M of the same in blocks, Y nodes, S of a
    node's slice: elements y · S to (y + 1) · S of M are stepped by this rank's counterpart in node y.
    """

    def __init__(
        self, group: ParameterGroup, mesh: DeviceMesh, gradients: Format, weights: Format, seeds: SeedCounter, name: str
    ) -> None:
        self.group, self.mesh, self.gradients, self.weights, self.name = group, mesh, gradients, weights, name
        self.seeds = seeds
        self.nodes, self.node = mesh.size(), mesh.get_local_rank()
        held = group.trainable
        self.parameters: list[nn.Parameter] = [p.parameter for p in held]
        self.indices = [i for i, p in enumerate(group.parameters) if p.parameter.requires_grad]
        block = max(gradients.block, weights.block)
        self.layout = BlockLayout([p.padded for p in held], block)
        self.size = -(-self.layout.m // (self.nodes * block)) * block
        self.pieces: list[list[OwnedPiece]] = [[] for _ in range(self.nodes)]  # by the node that steps them
        for i, (begin, parameter) in enumerate(zip(self.layout.starts, held, strict=True)):
            for piece in owned_pieces(i, begin, parameter.local, self.size):
                self.pieces[piece.owner].append(piece)
        device = self.parameters[0].device
        self.master = torch.zeros(self.size, device=device)
        self.gradient = torch.zeros(self.size, device=device)
        self.kept: Tensor | None = None  # gradients that the other nodes have not seen yet
        self.master_weights = [nn.Parameter(self.master[piece.place]) for piece in self.pieces[self.node]]
        self.master.copy_(self._replica())
        group.watch_reductions()
        group.module.set_all_reduce_hook(self._reduce)
        for i in range(len(self.parameters)):
            self._watch(i)

    def owned(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters with the master weights of this rank's pieces of them."""
        mine = zip(self.pieces[self.node], self.master_weights, strict=True)
        return [(self.parameters[piece.parameter], master) for piece, master in mine]

    def _watch(self, index: int) -> None:
        self.parameters[index].register_post_accumulate_grad_hook(lambda p: self._take(index, p))

    @torch.no_grad()
    def loaded(self, index: int) -> None:
        """Take the values that a parameter was loaded with, and the parameter in whose place `assign=True` put
        another."""
        before, now = self.parameters[index], self.group.parameters[self.indices[index]].parameter
        if now is not before:
            if now.dtype != before.dtype or local_shard(now).shape != local_shard(before).shape:
                raise RewriterError(
                    f"node_local_optimizer: a parameter of {self.name} was replaced by {now.dtype} {list(now.shape)}, "
                    f"expected {before.dtype} {list(before.shape)} sharded alike. Load without assign=True"
                )
            self.parameters[index] = now
            self._watch(index)
        for piece in self.pieces[self.node]:
            if piece.parameter == index:
                self.master[piece.place] = local_shard(now)[piece.source]

    def _replica(self) -> Tensor:
        """The own slice [S] of the replica, fp32."""
        slice_S = torch.zeros_like(self.master)
        for piece in self.pieces[self.node]:
            slice_S[piece.place] = local_shard(self.parameters[piece.parameter])[piece.source]
        return slice_S

    # --- gradients, in backward ---

    def _reduce(self, reduced_N: Tensor) -> None:
        """FSDP2's all-reduce hook: from the node's sum to the own slice of the sum over nodes, zeros elsewhere.

        In place, so that what FSDP2 does afterwards (division, rounding, accumulation) is done to it. Without a divide
        factor of the user's FSDP2 has averaged over the node's ranks, and nodes are averaged here; else nodes are
        summed, as HSDP does.
        """
        reduced = [id(p.parameter) for p in self.group.reduced]
        if reduced != [id(p) for p in self.parameters] or reduced_N.numel() != self.layout.n:
            raise RewriterError(
                f"node_local_optimizer: FSDP2 reduced {len(reduced)} parameters of {self.name} ({reduced_N.numel()} "
                f"numbers), expected {len(self.parameters)} ({self.layout.n}): some parameters got no gradient, or "
                "requires_grad or the parameters themselves have changed. Freeze those that take no part before "
                "node_local_optimizer, or call set_reduce_scatter_unused_params(True) (torch 2.13)"
            )
        hold(reduced_N)
        if self.kept is not None:
            reduced_N += self.kept
            self.kept = None
        if not self.group.all_reduces:
            self.kept = reduced_N.clone()
            reduced_N.zero_()
            return
        rows_YS = torch.nn.functional.pad(
            self.layout.blocked(reduced_N[None])[0], (0, self.nodes * self.size - self.layout.m)
        ).view(self.nodes, self.size)
        factor = 1.0 / self.nodes if self.group.divide_factor is None else 1.0
        mine_S = reduce_scatter(
            rows_YS, self.mesh, self.gradients, seed=self.seeds.next(), factor=factor, name=self.name
        )
        whole = reduced_N.new_zeros(self.nodes, self.size)
        whole[self.node] = mine_S
        self.layout.unblocked(whole.view(1, -1)[:, : self.layout.m], reduced_N[None])

    def _take(self, index: int, parameter: nn.Parameter) -> None:
        """Move what backward left in `.grad` to the master weights' gradients, in fp32, and free it."""
        assert parameter.grad is not None
        shard = local_shard(parameter.grad)
        hold(shard)
        for piece, master in zip(self.pieces[self.node], self.master_weights, strict=True):
            if piece.parameter == index:
                accumulate_gradient(master, self.gradient[piece.place], shard[piece.source])
        parameter.grad = None

    # --- weights, after a step ---

    def send(self) -> Transfer:
        """Begin to exchange the differences between master weights and replica."""
        payload = quantize_rows((self.master - self._replica())[None], self.weights)
        return gather_start([payload], self.mesh.get_group(), f"{self.name} weights", axis=NODE)

    def receive(self, transfer: Transfer) -> None:
        """Add all nodes' differences, the own one too, to the replica."""
        payload_YB = torch.cat([payload for (payload,) in transfer.wait()])
        delta_YS = dequantize_rows(payload_YB, self.weights, self.size, torch.float32)
        for node, pieces in enumerate(self.pieces):
            for piece in pieces:
                replica = local_shard(self.parameters[piece.parameter])[piece.source]
                replica.copy_(delta_YS[node, piece.place].add_(replica))

    def checksum(self) -> Tensor:
        """A number for the bits of this rank's shards, the same on nodes that agree: an int64 without dimensions."""
        total = torch.zeros((), dtype=torch.int64, device=self.master.device)
        for parameter in self.parameters:
            total = total * 31 + checksum(local_shard(parameter))
        return total


def hold(tensor: Tensor) -> None:
    """Keep the memory of a tensor of another CUDA stream until the current stream has passed this point.

    FSDP2 allocates what it reduces on one stream, and calls hooks on another.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
