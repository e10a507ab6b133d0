"""The ranks over which the tokens of a sequence are sharded, and which tokens each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.ops import SequencePlan
from rewriter.runtime.attention import decode, sequence_op, token_runs
from rewriter.runtime.attention.mesh import DIMENSIONS, Grid, flattened
from rewriter.runtime.attention.token_runs import Run


class SequenceAxis:
    """The ranks of a mesh's dimensions "heads", "columns" and "rows", over which `plan` deals tokens and finds keys.

    Without a mesh it is one rank, whatever the plan, and everything of this file is the identity. Raises RewriterError
    for a mesh whose dimensions are not those of the plan's grid.
    """

    def __init__(self, mesh: DeviceMesh | None, plan: SequencePlan) -> None:
        self.plan = plan
        self.grid = Grid(1, 1, 1, 0, 0, 0, (), None, None, None) if mesh is None else Grid.of(mesh)
        found = (self.grid.heads, self.grid.rows, self.grid.columns)
        if mesh is not None and found != plan.grid:
            raise RewriterError(
                f"SequenceAxis: the mesh is a grid of heads, rows, columns {list(found)}, but the plan {plan} has "
                f"{list(plan.grid)}. Make the mesh with rewriter.runtime.sequence_mesh(device, plan.grid)"
            )
        line = mesh
        if mesh is not None and set(mesh.mesh_dim_names or ()) & set(DIMENSIONS):
            line = flattened(mesh, DIMENSIONS, "sp")
        # what the operators know the axis by: torch.compile can pass on a string, but no process group
        self.key = sequence_op.register(plan, self.grid) if self.ranks > 1 else ""
        self.group: ProcessGroup | None = None if line is None or self.ranks == 1 else line.get_group()
        decode.register(self.key, self.group)

    @property
    def ranks(self) -> int:
        return self.grid.ranks

    @property
    def rank(self) -> int:
        return self.grid.rank

    def shards(self, length: int) -> Shards:
        """How a sequence of `length` tokens lies on the ranks."""
        return Shards(self, length)

    def __repr__(self) -> str:
        return f"SequenceAxis({self.plan}, rank {self.rank} of {self.ranks})"


@dataclass(frozen=True)
class Shards:
    """The tokens of sequences of `length` (whole, without padding) as they lie on the ranks of `axis`."""

    axis: SequenceAxis
    length: int

    @property
    def runs(self) -> tuple[Run, ...]:
        """The positions of this rank's tokens."""
        return self._runs(self.axis.rank)

    @property
    def count(self) -> int:
        """Tokens of each rank, padding included."""
        return sum(run.count for run in self.runs)

    @property
    def indices(self) -> Tensor:
        """int64 [count]: the position of each of this rank's tokens; `length` and above for padding."""
        return self.indices_of(self.axis.rank)

    def indices_of(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 [count]: `indices` of any rank."""
        return torch.cat([run.positions(device) for run in self._runs(rank)])

    def _runs(self, rank: int) -> tuple[Run, ...]:
        return token_runs.runs(self.axis.plan.layout, rank, self.axis.ranks, self.length)
