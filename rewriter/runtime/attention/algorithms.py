"""What a rank runs for each kind of plan, and the ranks on which it runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, parse_format
from rewriter.ops import SequenceKind, SequencePlan
from rewriter.runtime.attention import attention2d_gathered, attention2d_overlap, ring
from rewriter.runtime.attention.attention_call import RankAttention
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.quantized_kv import QuantizedKV
from rewriter.runtime.known_format import known_format

# For each kind (the algorithm, that with overlap), after the exchange of heads, of which Ulysses consists.
ALGORITHMS: Mapping[SequenceKind, tuple[RankAttention, RankAttention]] = {
    "ring": (ring, ring),
    "ulysses": (attention2d_gathered, attention2d_gathered),
    "attention2d": (attention2d_gathered, attention2d_overlap),
}


@dataclass(frozen=True)
class AttentionAxis:
    """A rank's place on a sequence axis, and what runs on it. `format`: of keys and values that travel."""

    mesh: AttentionMesh
    plan: SequencePlan
    format: Format | None

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
        """Whether some rank's keys move before they are gathered. The same on all ranks, so that their graphs are."""
        return self.mesh.rows > 1 and self.mesh.columns > 1


_axes: dict[str, AttentionAxis] = {}


def register(plan: SequencePlan, mesh: AttentionMesh) -> str:
    """The key by which `sequence_attention` finds the axis.

    The same plan on the same ranks has the same key, in every run, so that compiled graphs can be cached; its groups
    are those of the last registration. Raises RewriterError for a mesh of other sizes than the plan's, and for a format
    that does not exist.
    """
    sizes = mesh.heads, mesh.rows, mesh.columns
    if sizes != plan.grid:
        raise RewriterError(
            f"{plan}: the mesh is a grid of {list(sizes)} (heads, rows, columns). Make it with "
            f"sequence_mesh(device, {plan.grid})"
        )
    format = None if plan.quantized is None else known_format(plan.quantized, str(plan), parse_format)
    by_heads = (mesh.rank,) if mesh.by_heads is None else tuple(dist.get_process_group_ranks(mesh.by_heads))
    place = f"{mesh.head_index} {mesh.row} {mesh.column} {by_heads} {mesh.members}"
    key = f"{plan} {hashlib.sha256(place.encode()).hexdigest()[:12]}"
    known = _axes.get(key)  # which may be of an earlier job in this process, with groups that are gone
    if mesh.in_grid is not None and (known is None or known.mesh.in_grid is not mesh.in_grid):
        _connect(mesh.in_grid)
    _axes[key] = AttentionAxis(mesh, plan, format)
    return key


def _connect(group: ProcessGroup) -> None:
    """NCCL connects a group in its first call, in which all ranks must take part: where keys and values change places,
    those whose own stay send nothing."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def axis(key: str) -> AttentionAxis:
    """What was registered under `key`."""
    if key not in _axes:
        raise RewriterError(f"sequence axis {key!r} is not registered in this process: call register first")
    return _axes[key]
