"""The ranks of a quantized collective: one group, or nodes × the ranks of each.

Rank y · X + x of Y nodes × X local ranks is local rank x of node y, the order of a DeviceMesh whose last dimension is
the one inside the node.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

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
    """One step's ranks, by the name that torch has for their process group; "" is one rank. `name` is the mesh's, for
    counting bytes."""

    group_name: str = ""
    name: str = ""

    @property
    def group(self) -> ProcessGroup | None:
        """None where there is one rank."""
        # torch has no public function that finds a group by its name
        return dist.distributed_c10d._resolve_process_group(self.group_name) if self.group_name else None  # type: ignore[attr-defined, arg-type]

    @property
    def ranks(self) -> int:
        return group_size(self.group)

    @property
    def rank(self) -> int:
        return group_rank(self.group)

    def all_to_all_start(self, sent_PB: Tensor, name: str) -> exchange.Transfer:
        """Row r goes to rank r; see `exchange.all_to_all_uneven_start`."""
        group, one_each = self.group, [1] * self.ranks
        assert group is not None
        return exchange.all_to_all_uneven_start(sent_PB, one_each, one_each, group, name, self.name)

    def gather_start(self, rows_PB: Tensor, name: str) -> exchange.Transfer:
        """The rows of all ranks, in place; see `exchange.gather_rows_start`."""
        group = self.group
        assert group is not None
        return exchange.gather_rows_start(rows_PB, group, name, self.name)

    @classmethod
    def of(cls, group: ProcessGroup | None, name: str = "") -> CollectiveAxis:
        return cls("" if group is None or group.size() == 1 else group.group_name, name)


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

    def size(self) -> int:
        """Number of ranks, as of a ProcessGroup."""
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


def topology_key(mesh_or_group: Topology | DeviceMesh | ProcessGroup | None) -> str:
    """A string that stands for the topology: the same in every run that makes its groups in the same order."""
    if isinstance(mesh_or_group, ProcessGroup):  # which torch.compile has no more of than its name
        return _key_of_group(mesh_or_group.group_name)
    return _key(mesh_or_group)


@assume_constant_result
def _key(mesh_or_group: Topology | DeviceMesh | ProcessGroup | None) -> str:
    return json.dumps(astuple(topology_of(mesh_or_group)))


@assume_constant_result
def _key_of_group(name: str) -> str:
    return _key(CollectiveAxis(name).group)


def by_key(key: str) -> Topology:
    """The topology of `topology_key`."""
    intra, inter, nodes = json.loads(key)
    return Topology(CollectiveAxis(*intra), CollectiveAxis(*inter), nodes)
