"""The ranks that hold the same parameters: data-parallel replicas, and the sequence-parallel ranks within each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.runtime.attention.grid import DIMENSIONS


def flattened(mesh: DeviceMesh | None, names: Sequence[str], name: str) -> DeviceMesh | None:
    """Those dimensions `names` that `mesh` has as one called `name`, the first slowest; None where that is one rank.

    It exists because a reduction over several dimensions wants one group, for which DeviceMesh has no public method
    yet. Every rank of the mesh calls it.
    """
    present = tuple(n for n in names if mesh is not None and n in (mesh.mesh_dim_names or ()) and mesh[n].size() > 1)
    if mesh is None or not present:
        return None
    return mesh[present[0]] if len(present) == 1 else mesh[present]._flatten(name)


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
