"""Nodes: the ranks that share one, and the two groups of each rank, inside its node and between nodes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.process_groups import new_groups

NODE, LOCAL = "node", "local"


def node_groups(group: ProcessGroup, local: int, device_type: str) -> DeviceMesh:
    """The ranks of a group as a mesh ("node", "local"): rank y · local + x of the group is rank x of node y.

    A mesh of new groups that hold this rank, so that ranks of other groups (the shard groups of other tensor-parallel
    ranks) need not take part. Every rank of `group` calls it; `local` divides its size.
    """
    members = dist.get_process_group_ranks(group)
    own = group.rank()
    first = own - own % local
    groups = new_groups([members[own % local :: local], members[first : first + local]], group)
    layout = torch.tensor(members).view(-1, local)
    return DeviceMesh.from_group(groups, device_type, mesh=layout, mesh_dim_names=(NODE, LOCAL))


def ranks_per_node(group: ProcessGroup, node: int | None, secondary: int | None) -> int:
    """The number of neighbours of `group` that share a node: `node`, or what LOCAL_WORLD_SIZE says (torchrun sets it),
    or `secondary`. At most the group's size.

    Raises RewriterError where nothing says it, where it does not divide the group, or where nodes hold unequal numbers
    of the group's ranks.
    """
    members = dist.get_process_group_ranks(group)
    if node is not None:
        return divides("node", node, len(members))
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is not None:
        where = [rank // int(text) for rank in members]
        count = where.count(where[0])
        if where != sorted(where) or any(where.count(n) != count for n in where):
            raise RewriterError(
                f"node: with LOCAL_WORLD_SIZE={text} the shard group's ranks {members} lie on nodes {where}, expected "
                "equally many of each node, one after the other. Build the mesh so, or pass node="
            )
        return count
    if secondary is not None:
        return divides("secondary", secondary, len(members))
    raise RewriterError(
        "node: the number of ranks per node is unknown: LOCAL_WORLD_SIZE is not set (torchrun sets it). Pass node="
    )


def divides(name: str, value: int, ranks: int) -> int:
    """`value`, if groups of that many ranks make up `ranks`; RewriterError else."""
    if value < 1 or ranks % value:
        options = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise RewriterError(
            f"{name}={value} does not divide the {ranks} ranks that parameters are sharded over: {options}"
        )
    return value


def node_mesh(device_type: str, node: int | None = None) -> DeviceMesh:
    """All processes as a mesh of ("node", "local"); `node`: ranks per node, where LOCAL_WORLD_SIZE does not say it."""
    world = dist.get_world_size()
    size = ranks_per_node(dist.group.WORLD, node, None) if dist.group.WORLD is not None else 1
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=(NODE, LOCAL))
