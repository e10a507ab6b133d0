"""Ranks that get an equal share of this machine's cores each, where there are fewer cores than ranks.

    with CpuShares(3) as shares:                       # on two cores: 0.6 of a core for each of three
        subprocess.Popen([*shares.inside(0), "python", "rank.py"])

Control groups limit each rank to its share of every two milliseconds, so that a rank is as fast beside its peers as
alone. Linux and root. The groups are deleted when the block is left.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.support.namespaces import LinkError

PERIOD = 2000  # µs: half of it is the least that the kernel takes for a quota
LEFT = 0.1  # of the cores, for the kernel and all else


class CpuShares:
    """A context manager. `share`: the part of a core that a rank gets; whole cores are not limited."""

    def __init__(self, ranks: int) -> None:
        cores = len(os.sched_getaffinity(0))
        self.share = min(1.0, (1 - LEFT) * cores / ranks) if ranks > cores else 1.0
        v1 = Path("/sys/fs/cgroup/cpu")
        self.root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
        self.groups = [self.root / f"rewriter-{os.getpid()}-{rank}" for rank in range(ranks)]

    def inside(self, rank: int) -> list[str]:
        """The words to put before a command that is to run as this rank."""
        if self.share == 1.0:
            return []
        return ["sh", "-c", f'echo $$ > {self.groups[rank]}/cgroup.procs && exec "$@"', "sh"]

    def __enter__(self) -> Self:
        if self.share < 1.0:
            quota = round(self.share * PERIOD)
            try:
                for group in self.groups:
                    group.mkdir()
                    if self.root.name == "cpu":
                        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                        (group / "cpu.cfs_quota_us").write_text(str(quota))
                    else:
                        (group / "cpu.max").write_text(f"{quota} {PERIOD}")
            except OSError as error:
                self._delete()
                raise LinkError(f"ranks get no share of a core: {error}. Take as many ranks as cores") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete()

    def _delete(self) -> None:
        for group in self.groups:
            if group.is_dir():
                group.rmdir()
