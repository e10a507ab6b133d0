"""The ranks of a sequence axis as a grid of heads × rows × columns, and the groups that talk to each other.

A DeviceMesh names the dimensions "heads", "columns", "rows", in this order (row index fastest), so that a rank's place
in the flattened mesh is its place in the cyclic layout: rank (a, i, j) is a · r · c + j · r + i, the column-major order
of the paper (arXiv 2503.15758, section 3.2). `sequence_mesh` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rewriter.common.errors import RewriterError

DIMENSIONS = ("heads", "columns", "rows")


def sequence_mesh(
    device_type: str, grid: tuple[int, int, int], *, data_parallel: int = 1, tensor_parallel: int = 1
) -> DeviceMesh:
    """The mesh over all processes for a grid of (heads, rows, columns): dimensions "dp", "heads", "columns", "rows",
    "tp".

    Tensor-parallel ranks are neighbours, then the ranks of a column of the grid. Raises RewriterError if there is no
    process group yet, or if the number of processes is not the product.
    """
    if not dist.is_initialized():
        raise RewriterError(
            "sequence_mesh: there is no process group. Start the program with torchrun, and first call "
            'torch.distributed.init_process_group("gloo"), or on GPUs ("nccl", device_id=…)'
        )
    heads, rows, columns = grid
    shape = (data_parallel, heads, columns, rows, tensor_parallel)
    needed, world = int(torch.tensor(shape).prod()), dist.get_world_size()
    if needed != world:
        raise RewriterError(
            f"sequence_mesh: dp {data_parallel} × grid {list(grid)} × tp {tensor_parallel} needs {needed} processes, "
            f"but {world} run. Start torchrun with --nproc-per-node {needed}, or choose another grid"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp", *DIMENSIONS, "tp"))


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
class AttentionMesh:
    """This rank's place in the grid, and its groups.

    rank: its place a · r · c + j · r + i in the flattened sequence axis.
    members: global ranks of the r × c ranks with the same heads, in the order of their cyclic class i + r · j.
    by_heads: the ranks with the same (i, j), which exchange heads. in_row: the same (a, i), which gather queries.
    in_column: the same (a, j), which gather keys and values. None for a group of one rank. in_grid: the same a, among
    which keys and values change places; None where there is one row or one column, and nothing moves.
    """

    heads: int
    rows: int
    columns: int
    head_index: int
    row: int
    column: int
    members: tuple[int, ...]
    by_heads: ProcessGroup | None
    in_row: ProcessGroup | None
    in_column: ProcessGroup | None
    in_grid: ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return self.heads * self.rows * self.columns

    @property
    def rank(self) -> int:
        return (self.head_index * self.columns + self.column) * self.rows + self.row

    @classmethod
    def of(cls, mesh: DeviceMesh) -> AttentionMesh:
        """The grid of a mesh with (some of) the dimensions heads, columns, rows; others may stand around them.

        A mesh of one unnamed or otherwise named dimension is a column: (1, P, 1). Raises RewriterError for a mesh of
        several dimensions of which none is named so.
        """
        names = mesh.mesh_dim_names or ()
        if not set(names) & set(DIMENSIONS):
            if mesh.ndim != 1:
                raise RewriterError(
                    f"mesh dimensions {list(names) or mesh.ndim}: expected {', '.join(DIMENSIONS)}, as "
                    "rewriter.runtime.sequence_mesh names them, or a mesh of one dimension"
                )
            index, size = mesh.get_local_rank(), mesh.size()
            group = None if size == 1 else mesh.get_group()
            return cls(1, size, 1, 0, index, 0, tuple(mesh.mesh.tolist()), None, None, group)
        axes = [mesh[name] if name in names else None for name in ("heads", "rows", "columns")]
        heads, rows, columns = (1 if axis is None else axis.size() for axis in axes)
        head_index, row, column = (0 if axis is None else axis.get_local_rank() for axis in axes)
        groups = (None if axis is None or axis.size() == 1 else axis.get_group() for axis in axes)
        by_heads, in_column, in_row = groups  # a rank's column is the ranks along "rows"
        moves = rows > 1 and columns > 1
        grid = flattened(mesh, [n for n in names if n in ("columns", "rows")], "grid") if moves else None
        in_grid, members = None if grid is None else grid.get_group(), _members(mesh)
        return cls(heads, rows, columns, head_index, row, column, members, by_heads, in_row, in_column, in_grid)


def _members(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of this rank's columns × rows, rows fastest."""
    kept = tuple(name for name in mesh.mesh_dim_names or () if name in ("columns", "rows"))
    ranks = mesh[kept].mesh if kept else torch.tensor([dist.get_rank()])
    return tuple((ranks.T if kept == ("rows", "columns") else ranks).flatten().tolist())
