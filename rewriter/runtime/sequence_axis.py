"""The ranks over which the tokens of a sequence are sharded, and which tokens each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.ops import SequencePlan
from rewriter.runtime.attention import algorithms, decode
from rewriter.runtime.attention.mesh import DIMENSIONS, AttentionMesh, flattened
from rewriter.sequence.token_layout import LAYOUTS, indices


class SequenceAxis:
    """The ranks of a mesh's dimensions "heads", "columns" and "rows", over which `plan` shards tokens and finds keys.

    Without a mesh it is one rank, for any plan, and everything of this file is the identity. Raises RewriterError
    for a mesh whose dimensions are not those of the plan's grid.
    """

    def __init__(self, mesh: DeviceMesh | None, plan: SequencePlan) -> None:
        self.plan = plan
        self.mesh = AttentionMesh(1, 1, 1, 0, 0, 0, (), None, None, None) if mesh is None else AttentionMesh.of(mesh)
        found = (self.mesh.heads, self.mesh.rows, self.mesh.columns)
        if mesh is not None and found != plan.grid:
            raise RewriterError(
                f"SequenceAxis: the mesh is a grid of heads, rows, columns {list(found)}, but the plan {plan} has "
                f"{list(plan.grid)}. Make the mesh with rewriter.runtime.sequence_mesh(device, plan.grid)"
            )
        flat = mesh
        if mesh is not None and set(mesh.mesh_dim_names or ()) & set(DIMENSIONS):
            flat = flattened(mesh, DIMENSIONS, "sp")
        # what the operators know the axis by: torch.compile can pass on a string, but no process group
        self.key = algorithms.register(plan, self.mesh) if self.ranks > 1 else ""
        self.group: ProcessGroup | None = None if flat is None or self.ranks == 1 else flat.get_group()
        decode.register(self.key, self.group)

    @property
    def ranks(self) -> int:
        return self.mesh.ranks

    @property
    def rank(self) -> int:
        return self.mesh.rank

    def shards(self, length: int) -> Shards:
        """How a sequence of `length` tokens is sharded."""
        return Shards(self, length)

    def __repr__(self) -> str:
        return f"SequenceAxis({self.plan}, rank {self.rank} of {self.ranks})"


@dataclass(frozen=True)
class Shards:
    """How the tokens of sequences of `length` (global, without padding) are sharded over the ranks of `axis`."""

    axis: SequenceAxis
    length: int

    @property
    def count(self) -> int:
        """Tokens of each rank, padding included."""
        return LAYOUTS[self.axis.plan.layout].local_tokens(self.length, self.axis.ranks)

    @property
    def indices(self) -> Tensor:
        """int64 [count]: the position of each of this rank's tokens; `length` and above for padding."""
        return self.indices_of(self.axis.rank)

    def indices_of(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 [count]: `indices` of any rank, computed where they are needed."""
        return indices(self.axis.plan.layout, rank, self.axis.ranks, self.length, device)
