"""Process groups, where None stands for this process alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class MadeOnce(Generic[_Given, _Made]):
    """`make`, called once for each object as long as it lives, not for those that it equals: a mesh equals one that was
    made of other process groups."""

    def __init__(self, make: Callable[[_Given], _Made]) -> None:
        self.make = make
        self.found: dict[int, tuple[weakref.ref[_Given], _Made]] = {}

    def __call__(self, given: _Given) -> _Made:
        place = id(given)
        if place not in self.found:
            made = self.make(given)  # first: it may refuse what nothing can refer to
            self.found[place] = weakref.ref(given, lambda _: self.found.pop(place, None)), made
        return self.found[place][1]


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
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def new_groups(
    members: Sequence[Sequence[int]], among: Sequence[ProcessGroup], backend: str | None = None
) -> list[ProcessGroup]:
    """A new process group for each of `members`, lists of global ranks that hold this process.

    All ranks of `among` call it at the same point, with their own lists, equally many; other ranks need not. `among` is
    one group, or those of a mesh's dimensions, in the same order on all ranks; the first one's timeout is theirs too.
    """
    _level(among)
    timeout, backend = _timeout(among[0]), _backend(among[0], backend)
    return [
        dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
        for ranks in members
    ]


def _level(among: Sequence[ProcessGroup]) -> None:
    """Let all ranks of `among` belong to equally many groups, with groups of one rank.

    Torch makes the name by which the ranks of such a group find each other of their numbers and of how many groups the
    process belongs to. Ranks that belong to different numbers of them would wait for each other for ever.
    """
    count = torch.tensor(_memberships(), device=_device(among[0]))
    for group in among:
        dist.all_reduce(count, dist.ReduceOp.MAX, group)
    while _memberships() < count:
        dist.new_group([dist.get_rank()], backend=_backend(among[0], "gloo"), use_local_synchronization=True)


def _backend(group: ProcessGroup, backend: str | None) -> str | None:
    """`backend` for a group among the ranks of `group`. Of an emulated one, others are emulated too: who else is
    there?"""
    return "emulated" if dist.get_backend(group) == "emulated" else backend


def _memberships() -> int:
    """Of how many groups torch says that this process belongs to them: what it makes names of, and tells nobody."""
    return len(dist.distributed_c10d._world.pg_names)


def _device(group: ProcessGroup) -> torch.device:
    backend = dist.get_backend(group)  # as it was given: "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"
    return torch.device("cuda" if "nccl" in backend and "cpu" not in backend else "cpu")


def _timeout(group: ProcessGroup) -> timedelta | None:
    """How long its messages may take, which torch sets but does not say; None, for the default, where it has none."""
    options = getattr(group._get_backend(_device(group)), "options", None)
    return None if options is None else options._timeout
