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
from rewriter.ir.token_layout import LAYOUTS, indices
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


@dataclass(frozen=True)
class AttentionAxis:
    """A rank's place on a sequence axis, and what runs on it. `format`: of keys and values that travel; `group`: all
    ranks of the axis."""

    mesh: AttentionMesh
    plan: SequencePlan
    format: Format | None
    group: ProcessGroup | None

    def quantized(self, k_BKSD: Tensor, v_BKSE: Tensor) -> QuantizedKV | None:
        """How these keys and values travel; None where exactly. Alike on all ranks, which hold equally many tokens."""
        if self.format is None or (self.plan.min_bytes and k_BKSD.nbytes + v_BKSE.nbytes < self.plan.min_bytes):
            return None
        return QuantizedKV(self.format, k_BKSD.shape[3], v_BKSE.shape[3], k_BKSD.dtype)

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


_axes: dict[str, AttentionAxis] = {}


def register(plan: SequencePlan, mesh: AttentionMesh, group: ProcessGroup | None = None) -> str:
    """The key by which operators find the axis: torch.compile can pass on a string, but no process group.

    The same plan on the same ranks has the same key, in every run, so that compiled graphs can be cached; its groups
    are those of the last registration. Raises RewriterError for a mesh of other sizes than the plan's, and for a format
    that does not exist.
    """
    sizes = mesh.heads, mesh.rows, mesh.columns
    if sizes != plan.grid:
        raise RewriterError(
            f"{plan}: the mesh is a grid of {list(sizes)} (heads, rows, columns). Make it with "
            f"rewriter.runtime.sequence_mesh(device, {plan.grid})"
        )
    format = None if plan.quantized is None else known_format(plan.quantized, str(plan), parse_format)
    by_heads = (mesh.rank,) if mesh.by_heads is None else tuple(dist.get_process_group_ranks(mesh.by_heads))
    place = f"{mesh.head_index} {mesh.row} {mesh.column} {by_heads} {mesh.members}"
    key = f"{plan} {hashlib.sha256(place.encode()).hexdigest()[:12]}"
    known = _axes.get(key)  # which may be of an earlier job in this process, with groups that are gone
    if mesh.in_grid is not None and (known is None or known.mesh.in_grid is not mesh.in_grid):
        _connect(mesh.in_grid)
    _axes[key] = AttentionAxis(mesh, plan, format, group)
    return key


def _connect(group: ProcessGroup) -> None:
    """NCCL connects a group in its first call, in which all ranks must take part: where keys and values change places,
    those whose own stay send nothing."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def axis(key: str) -> AttentionAxis:
    """What was registered under `key`."""
    if key not in _axes:
        raise RewriterError(f"sequence axis {key!r} is not registered in this process: make its SequenceAxis first")
    return _axes[key]


class SequenceAxis:
    """The ranks of a mesh's dimensions "heads", "columns" and "rows", over which `plan` shards tokens and finds keys.

    Without a mesh it is one rank, for any plan, and everything of this file is the identity. Raises RewriterError
    for a mesh whose dimensions are not those of the plan's grid.
    """

    def __init__(self, mesh: DeviceMesh | None, plan: SequencePlan) -> None:
        self.plan = plan
        self.mesh = AttentionMesh(1, 1, 1, 0, 0, 0, (), None, None, None) if mesh is None else AttentionMesh.of(mesh)
        flat = mesh
        if mesh is not None and set(mesh.mesh_dim_names or ()) & set(DIMENSIONS):
            flat = flattened(mesh, DIMENSIONS, "sp")
        self.group: ProcessGroup | None = None if flat is None or self.ranks == 1 else flat.get_group()
        self.key = "" if mesh is None else register(plan, self.mesh, self.group)

    @property
    def ranks(self) -> int:
        return self.mesh.ranks

    @property
    def rank(self) -> int:
        return self.mesh.rank

    def shards(self, length: int) -> Shards:
        """Sharding of a sequence of `length` tokens."""
        return Shards(self, length)

    def __repr__(self) -> str:
        return f"SequenceAxis({self.plan}, rank {self.rank} of {self.ranks})"


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
