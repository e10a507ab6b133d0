"""What a process group is, besides what it does: its ranks, names, timeout, and how others are made from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rewriter.common.errors import RewriterError
from rewriter.emulation.engine import Engine
from rewriter.emulation.messages import Mailbox
from rewriter.emulation.work import CollectiveAborted, Deferred

NAME = "emulated"


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """`ranks` as a range where they have one distance, so that a large group costs no more than a small one."""
    if isinstance(ranks, range):
        return ranks
    if len(ranks) > 1 and (step := ranks[1] - ranks[0]):
        even = range(ranks[0], ranks[0] + step * len(ranks), step)
        if all(found == expected for found, expected in zip(ranks, even, strict=True)):
            return even
    return tuple(ranks)


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs list overloads that torch does not call


class Identity(_ProcessGroup):
    """`ranks`: global ranks; `real`: those of the job that are. `timeout`: seconds. `on_shutdown`: called once, when
    the group is destroyed."""

    def __init__(
        self,
        ranks: tuple[int, ...] | range,
        rank: int,
        engine: Engine,
        timeout: float,
        store: Any,
        real: tuple[int, ...],
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self.engine = engine
        self.timeout = timeout
        self.real = real
        self._store = store
        self._on_shutdown = on_shutdown
        self._name = self._description = ""
        self._sequence = 0
        self._coalesced: list[Deferred] | None = None
        self._under_way: weakref.WeakSet[Any] = weakref.WeakSet()
        self._messages: dict[tuple[int, int], int] = {}  # counted by sender and receiver
        self._mailbox = Mailbox()
        self._fate: str | None = None

    # --- names and numbers ---

    # C++ calls these by camel-case names

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _get_backend_name = getBackendName
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def name(self) -> str:
        return NAME

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _counted(self) -> int:
        self._sequence += 1
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Counting begins with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        return given.total_seconds() if given is not None and given > timedelta(0) else self.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- as the backend of a device, which it is itself, for all devices ---

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=timedelta(seconds=self.timeout), global_ranks_in_group=list(self.ranks))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: Any = None) -> None:
        """There is nobody to connect to."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Other ranks make a group without this one."""

    def comm_split_count(self) -> int:
        return self._splits

    _splits = 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in list(self._under_way):
            work.wait()

    # --- others from it ---

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> Any:
        """Global `ranks` as a group of their own; None where this process is not one of them. torch 2.13 and later
        makes all groups of a job with it, no matter which backend they name."""
        own = self.ranks[self.rank()]
        if own not in ranks:
            return None
        seconds = self.timeout if timeout is None else timeout.total_seconds()
        made = type(self)(compact(ranks), list(ranks).index(own), self.engine, seconds, self._store, self.real)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """`ranks` of this group as a group of their own; None where this process is not one of them."""
        self._splits += 1
        name = group_name or f"{self.group_name}:split:{self._splits}"
        return self.new_group([self.ranks[r] for r in ranks], timeout, opts, name, group_desc)

    splitGroup = split_group  # as C++ calls it

    def merge_remote_group(self, *args: Any, **options: Any) -> Any:
        raise RewriterError("emulated groups cannot be merged: all ranks of a job are known when it starts")

    # --- its end ---

    def _check(self) -> None:
        if self._fate is not None:
            raise CollectiveAborted(f"group {self.group_name!r} was {self._fate}. Make another with new_group")

    def abort(self) -> None:
        """Whoever waits for one of its operations gets CollectiveAborted, and so does who begins another."""
        self._end("aborted")

    def shutdown(self) -> None:
        """As `abort`, when the group is destroyed; the job ends with its default group."""
        if self._fate is None:
            self._end("destroyed")

    def _end(self, fate: str) -> None:
        self._fate = fate
        for work in list(self._under_way):
            if not work.is_completed() and hasattr(work, "finish"):
                work.finish(CollectiveAborted(f"{work.operation.title}: the group was {fate} meanwhile"))
        if self._on_shutdown is not None:
            self._on_shutdown()
            self._on_shutdown = None
