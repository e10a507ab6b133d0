"""One FSDP2 parameter group of a node, sliced over nodes: who steps which elements, and what nodes exchange.

Shape suffixes: N elements of this rank's shards as FSDP2 lays them out, M of the same in blocks, Y nodes, S of a node's
slice: elements y · S to (y + 1) · S of M are stepped by this rank's counterpart in node y.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, dequantize_rows, quantize_rows
from rewriter.runtime.collectives.exchange import Transfer, gather_start
from rewriter.runtime.context import checksum
from rewriter.runtime.quantized.launch import reduce_scatter_start
from rewriter.training.zero.comm_hooks import SeedCounter
from rewriter.training.zero.flat import accumulate
from rewriter.training.zero.flat_layout import BlockLayout, OwnedPiece, owned_pieces
from rewriter.training.zero.fsdp import ParameterGroup, local_shard
from rewriter.training.zero.nodes import NODE


class SlicedGroup:
    """Masters in fp32 of this rank's slice [S], with their gradients, and the shards that they are exchanged for.

    The shards of a node together are its replica of the group, which FSDP2 computes with. All nodes hold the same
    bits: whoever steps an element too adds what it sent, not what it holds, and so what a message rounds off comes
    again with the next difference between master and replica.
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

    def master_weights_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """What this rank steps of a parameter: one piece or none."""
        mine = zip(self.pieces[self.node], self.master_weights, strict=True)
        return [master for piece, master in mine if self.parameters[piece.parameter] is parameter]

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
        mine_S = reduce_scatter_start(
            rows_YS, self.mesh, self.gradients, seed=self.seeds.next(), factor=factor, name=self.name, wait=True
        ).wait()
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
                accumulate(master, self.gradient[piece.place], shard[piece.source])
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
        """Of the bits of this rank's shards; nodes that agree have the same. An int64 without dimensions."""
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
