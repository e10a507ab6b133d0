"""The ranks of a quantized collective: one group, or nodes × the ranks of each.

Rank y · X + x of Y nodes × X local ranks is local rank x of node y, the order of a DeviceMesh whose last dimension is
the one inside the node.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives import exchange
from rewriter.runtime.collectives.process_groups import group_rank, group_size
from rewriter.runtime.torch_marks import assume_constant_result


@dataclass(frozen=True)
class CollectiveAxis:
    """One step's ranks; `name` is the mesh's, for counting bytes. Torch keeps the group, until it is destroyed."""

    held: weakref.ref[ProcessGroup] | None = None
    name: str = ""

    @property
    def group(self) -> ProcessGroup | None:
        """None where there is one rank."""
        if self.held is None:
            return None
        group = self.held()
        if group is None:
            raise RewriterError("quantized collectives: their process group was destroyed. Pass one that exists")
        return group

    @property
    def ranks(self) -> int:
        return group_size(self.group)

    @property
    def rank(self) -> int:
        return group_rank(self.group)

    @property
    def place(self) -> str:
        """The ranks, and the names of their group: the same in every run that makes its groups in the same order."""
        group = self.group
        if group is None:
            return f"{dist.get_rank() if dist.is_initialized() else 0} {self.name}"
        return f"{dist.get_process_group_ranks(group)} {self.name} {group.group_name}"

    def all_to_all_start(self, sent_PB: Tensor, name: str) -> exchange.Transfer:
        """Row r goes to rank r; see `exchange.all_to_all_rows_start`."""
        group = self.group
        assert group is not None
        return exchange.all_to_all_rows_start(sent_PB, group, name, self.name)

    def gather_start(self, rows_PB: Tensor, name: str) -> exchange.Transfer:
        """The rows of all ranks, in place; see `exchange.gather_rows_start`."""
        group = self.group
        assert group is not None
        return exchange.gather_rows_start(rows_PB, group, name, self.name)

    @classmethod
    def of(cls, group: ProcessGroup | None, name: str = "") -> CollectiveAxis:
        return cls(None if group is None or group.size() == 1 else weakref.ref(group), name)


@dataclass(frozen=True)
class Topology:
    """`intra`: the ranks of this node. `inter`: those with this rank's place in every node. One group is `intra`, and
    `inter` has one rank; `nodes` tells it from a mesh of nodes × ranks of a node, of which there may be one too."""

    intra: CollectiveAxis
    inter: CollectiveAxis = CollectiveAxis()
    nodes: bool = False

    @property
    def ranks(self) -> int:
        return self.inter.ranks * self.intra.ranks

    @property
    def rank(self) -> int:
        return self.inter.rank * self.intra.ranks + self.intra.rank

    @cached_property
    def key(self) -> str:
        """The same for the same groups in every run, so that compiled graphs can be cached."""
        place = f"{self.inter.place} {self.intra.place}"
        return f"{self.inter.ranks}x{self.intra.ranks} {hashlib.sha256(place.encode()).hexdigest()[:12]}"

    def size(self) -> int:
        """As a ProcessGroup has it."""
        return self.ranks


def topology_of(mesh_or_group: Topology | DeviceMesh | ProcessGroup | None) -> Topology:
    """The topology of a group, of a mesh of one dimension, or of a mesh (nodes, ranks of a node).

    None is one rank. Raises RewriterError for meshes of more dimensions, and for anything else.
    """
    if isinstance(mesh_or_group, Topology):
        return mesh_or_group
    if mesh_or_group is None or isinstance(mesh_or_group, ProcessGroup):
        return Topology(CollectiveAxis.of(mesh_or_group))
    if not isinstance(mesh_or_group, DeviceMesh):
        raise RewriterError(
            f"quantized collectives: expected a ProcessGroup or a DeviceMesh, not {type(mesh_or_group).__name__}"
        )
    names = mesh_or_group.mesh_dim_names or ("",) * mesh_or_group.ndim
    axes = [CollectiveAxis.of(mesh_or_group.get_group(dim), names[dim]) for dim in range(mesh_or_group.ndim)]
    if len(axes) == 1:
        return Topology(axes[0])
    if len(axes) == 2:
        return Topology(intra=axes[1], inter=axes[0], nodes=True)
    shape = ", ".join(f"{name or 'dimension'} {size}" for name, size in zip(names, mesh_or_group.shape, strict=True))
    raise RewriterError(
        f"quantized collectives: a mesh of {mesh_or_group.ndim} dimensions ({shape}). Give one of one dimension, or of "
        'two: nodes, then the ranks of a node, as mesh["node", "local"]'
    )


_by_key: dict[str, Topology] = {}


def topology_key(mesh_or_group: Topology | DeviceMesh | ProcessGroup | None) -> str:
    """The string by which operators find the topology."""
    if isinstance(mesh_or_group, ProcessGroup):  # which torch.compile has no more of than its name
        return _key_of_group(mesh_or_group.group_name)
    return _key(mesh_or_group)


@assume_constant_result
def _key(mesh_or_group: Topology | DeviceMesh | ProcessGroup | None) -> str:
    """When compiling, called once while tracing."""
    topology = topology_of(mesh_or_group)
    _by_key[topology.key] = topology
    return topology.key


@assume_constant_result
def _key_of_group(name: str) -> str:
    """torch has no public function that finds a group by its name."""
    return _key(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined, arg-type]


def by_key(key: str) -> Topology:
    """What `topology_key` was called with last."""
    if key not in _by_key:
        raise RewriterError(
            f"quantized collectives: ranks {key!r} are not known in this process: call them eagerly once"
        )
    return _by_key[key]
