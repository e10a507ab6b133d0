"""Process groups, where None stands for this process alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class RankSet(Protocol):
    """A ProcessGroup, or several that make up one set of ranks."""

    def size(self) -> int: ...


def group_size(group: RankSet | None) -> int:
    """Ranks of `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's index in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def of_all(group: ProcessGroup, own: Any) -> list[Any]:
    """`own` of every rank of `group`, in their order; any objects that can be pickled."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return every


def new_groups(members: Sequence[Sequence[int]], group: ProcessGroup) -> list[ProcessGroup]:
    """A new process group for each of `members`, lists of global ranks that hold this process, with `group`'s timeout.

    All ranks of `group` call it at the same point, with their own lists, equally many; other ranks need not.
    """
    emulated = "emulated" if dist.get_backend(group) == "emulated" else None  # others of its ranks do not exist
    _level(group, emulated or "gloo")
    timeout = _timeout(group)
    return [
        dist.new_group(list(ranks), timeout=timeout, backend=emulated, use_local_synchronization=True)
        for ranks in members
    ]


def _level(group: ProcessGroup, backend: str) -> None:
    """Let all ranks of `group` belong to equally many groups, with groups of one rank.

    Torch makes the name by which the ranks of such a group find each other of their numbers and of the number of groups
    that the process belongs to. Ranks that belong to different numbers of them would wait for each other for ever.
    """
    count = torch.tensor(_memberships(), device=_device(group))
    dist.all_reduce(count, dist.ReduceOp.MAX, group)
    while _memberships() < count:
        dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)


def _memberships() -> int:
    """Number of process groups that torch has registered for this process, for which it has no public function."""
    return len(dist.distributed_c10d._world.pg_names)


def _device(group: ProcessGroup) -> torch.device:
    backend = dist.get_backend(group)  # as it was given: "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"
    return torch.device("cuda" if "nccl" in backend and "cpu" not in backend else "cpu")


def _timeout(group: ProcessGroup) -> timedelta | None:
    """Time that messages of `group` may take, which torch sets but does not say; None, for the default, without one."""
    options = getattr(group._get_backend(_device(group)), "options", None)
    return None if options is None else options._timeout
