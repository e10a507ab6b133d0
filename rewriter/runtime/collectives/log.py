"""Log of collectives in program order, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from rewriter.runtime.collectives.process_groups import RankSet, group_size


@dataclass(frozen=True)
class Event:
    """One step of a collective as this rank's Python code reached it; `bytes` is the tensor's size on this rank.

    `sent` and `received` are what it sends to other ranks and receives from them, where the algorithm is ours and the
    numbers are exact (kind "wire"); 0 for others. `axis` is the mesh's name of the axis that they travel, where known.
    `members` are the global ranks of the group, and `to` what each of them is sent, where they are not sent equally
    much.
    """

    kind: str  # "start", "wait", "reduce", "all_gather", "wire", "mark"
    name: str
    bytes: int
    ranks: int
    sent: int = 0
    received: int = 0
    axis: str = ""
    members: tuple[int, ...] = ()
    to: tuple[int, ...] = ()


_observers: list[list[Event]] = []
_NOTHING = nullcontext()


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collect every collective's start, wait and gather while the block runs, in program order.

    `mark(name)` adds an entry of the caller's own, so that computation can be placed between them.
    """
    events: list[Event] = []
    _observers.append(events)
    try:
        yield events
    finally:
        _observers[:] = [other for other in _observers if other is not events]


def is_recording() -> bool:
    """True if any `record_events` is running."""
    return bool(_observers)


def mark(name: str) -> None:
    """Add an event of kind "mark" to every running `record_events`."""
    for events in _observers:
        events.append(Event("mark", name, 0, 1))


def annotated(what: str, name: str) -> AbstractContextManager[object]:
    """A range "rewriter::WHAT NAME" in a profile; without a profiler nothing, which costs two dispatches less."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"rewriter::{what} {name}".rstrip())


def observe(
    kind: str,
    name: str,
    x: Tensor,
    group: RankSet | None,
    sent: int = 0,
    received: int = 0,
    axis: str = "",
    to: Sequence[int] = (),
) -> None:
    """Add an event to every running `record_events`."""
    if not _observers:
        return
    members = tuple(dist.get_process_group_ranks(group)) if isinstance(group, ProcessGroup) else ()
    event = Event(kind, name, x.nbytes, group_size(group), sent, received, axis, members, tuple(to))
    for events in _observers:
        events.append(event)
