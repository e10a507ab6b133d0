"""Process groups, where None stands for this process alone."""

from __future__ import annotations

from typing import Protocol

from torch.distributed import ProcessGroup


class Ranks(Protocol):
    """A ProcessGroup, or several that make up one set of ranks."""

    def size(self) -> int: ...


def group_size(group: Ranks | None) -> int:
    """Ranks of `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's index in `group`; 0 for None."""
    return 0 if group is None else group.rank()
