"""Process groups, where None stands for this process alone."""

from __future__ import annotations

from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's index in `group`; 0 for None."""
    return 0 if group is None else group.rank()
