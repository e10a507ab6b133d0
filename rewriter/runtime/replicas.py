"""The ranks that hold the same parameters: data-parallel replicas, and the sequence-parallel ranks within each."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.runtime.attention.mesh import DIMENSIONS, flattened


@dataclass(frozen=True)
class Replicas:
    """The mesh dimensions "dp", "heads", "columns" and "rows" as one, or None for a single rank.

    data_parallel: how many replicas see different rows; the other ranks see different tokens of the same rows.
    own: the ranks of this rank's replica, tensor-parallel ones included; None for a single rank.
    """

    mesh: DeviceMesh | None = None
    data_parallel: int = 1
    own: ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Replicas:
        """Those of this rank. Every rank of the mesh calls it."""
        rows, own = flattened(mesh, ["dp"], "dp"), flattened(mesh, [*DIMENSIONS, "tp"], "sp_tp")
        return cls(
            flattened(mesh, ["dp", *DIMENSIONS], "dp_sp"),
            1 if rows is None else rows.size(),
            None if own is None else own.get_group(),
        )

    @property
    def group(self) -> ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group()
