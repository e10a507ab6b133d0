"""The ranks over which the tokens of a sequence are sharded: which tokens each holds, and what runs on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import SequenceKind, SequencePlan
from rewriter.ir.sequence_plan import LAYOUTS, indices
from rewriter.kernels import Format, parse_format
from rewriter.runtime.attention.attention2d import GATHERED, OVERLAPPED
from rewriter.runtime.attention.attention_call import QuantizedKV, RankAttention
from rewriter.runtime.attention.mesh import DIMENSIONS, AttentionMesh, flattened
from rewriter.runtime.attention.ring import RING
from rewriter.runtime.quantized.schedules import known_format

# For each kind (the algorithm, that with overlap), after the exchange of heads, of which Ulysses consists.
ALGORITHMS: Mapping[SequenceKind, tuple[RankAttention, RankAttention]] = {
    "ring": (RING, RING),
    "ulysses": (GATHERED, GATHERED),
    "attention2d": (GATHERED, OVERLAPPED),
}


class SequenceAxis:
    """The ranks of a mesh's dimensions "heads", "columns" and "rows", over which `plan` shards tokens and finds keys.

    `key` is the string by which operators find the axis (`axis_of`): torch.compile can pass on a string, but no process
    group. The same plan on the same ranks has the same key, in every run, so that compiled graphs can be cached; it
    stands for the axis that was made last. `format` is that of keys and values that travel; `group` are all ranks.

    Without a mesh it is one rank, for any plan, and everything of this file is the identity. Raises RewriterError
    for a mesh whose dimensions are not those of the plan's grid, and for a format that does not exist.
    """

    def __init__(self, mesh: DeviceMesh | AttentionMesh | None, plan: SequencePlan) -> None:
        self.plan, self.key = plan, ""
        self.format: Format | None = None
        self.group: ProcessGroup | None = None
        if mesh is None:
            self.mesh = AttentionMesh(1, 1, 1, 0, 0, 0, (), None, None, None)
            return
        self.mesh = mesh if isinstance(mesh, AttentionMesh) else AttentionMesh.of(mesh)
        sizes = self.mesh.heads, self.mesh.rows, self.mesh.columns
        if sizes != plan.grid:
            raise RewriterError(
                f"{plan}: the mesh is a grid of {list(sizes)} (heads, rows, columns). Make it with "
                f"rewriter.runtime.sequence_mesh(device, {plan.grid})"
            )
        if plan.quantized is not None:
            self.format = known_format(plan.quantized, str(plan), parse_format)
        if isinstance(mesh, DeviceMesh) and self.ranks > 1:
            flat = flattened(mesh, DIMENSIONS, "sp") if set(mesh.mesh_dim_names or ()) & set(DIMENSIONS) else mesh
            self.group = None if flat is None else flat.get_group()
        by_heads, in_grid = self.mesh.by_heads, self.mesh.in_grid
        exchanging = (self.rank,) if by_heads is None else tuple(dist.get_process_group_ranks(by_heads))
        place = f"{self.mesh.head_index} {self.mesh.row} {self.mesh.column} {exchanging} {self.mesh.members}"
        self.key = f"{plan} {hashlib.sha256(place.encode()).hexdigest()[:12]}"
        known = _axes.get(self.key)  # which may be of an earlier job in this process, with groups that are gone
        if in_grid is not None and (known is None or known.mesh.in_grid is not in_grid):
            _connect(in_grid)
        _axes[self.key] = self

    @property
    def ranks(self) -> int:
        return self.mesh.ranks

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def algorithm(self) -> RankAttention:
        return ALGORITHMS[self.plan.kind][self.plan.overlap and self.mesh.rows * self.mesh.columns > 1]

    @property
    def exchanges_heads(self) -> bool:
        return self.mesh.heads > 1

    @property
    def moves_keys(self) -> bool:
        """True if some rank's keys move before they are gathered. The same on all ranks, so that their graphs are."""
        return self.mesh.rows > 1 and self.mesh.columns > 1

    def quantized(self, k_BKSD: Tensor, v_BKSE: Tensor) -> QuantizedKV | None:
        """The way these keys and values travel; None if exactly. Equal on all ranks, which hold equally many tokens."""
        if self.format is None or (self.plan.min_bytes and k_BKSD.nbytes + v_BKSE.nbytes < self.plan.min_bytes):
            return None
        return QuantizedKV(self.format, k_BKSD.shape[3], v_BKSE.shape[3], k_BKSD.dtype)

    def shards(self, length: int) -> Shards:
        """Sharding of a sequence of `length` tokens."""
        return Shards(self, length)

    def __repr__(self) -> str:
        return f"SequenceAxis({self.plan}, rank {self.rank} of {self.ranks})"


_axes: dict[str, SequenceAxis] = {}


def axis_of(key: str) -> SequenceAxis:
    """The axis with this `key`. Raises RewriterError without one."""
    if key not in _axes:
        raise RewriterError(f"sequence axis {key!r} is not registered in this process: make its SequenceAxis first")
    return _axes[key]


def _connect(group: ProcessGroup) -> None:
    """NCCL connects a group in its first call, in which all ranks must take part: where keys and values change places,
    those whose own stay send nothing."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


@dataclass(frozen=True)
class Shards:
    """Sharding of sequences of `length` (global, without padding) tokens over the ranks of `axis`."""

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
