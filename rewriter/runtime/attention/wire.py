"""What travels between the ranks of a grid. Every function packs what it is given into one message per peer, counts the
bytes exactly (`rewriter.runtime.record_events`, kind "wire"), and can be started now and waited for later.

Tensors of several dtypes share a message: they travel as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives import observe

Tensors = tuple[Tensor, ...]


@dataclass
class Transfer:
    """Something on its way. `wait` gives what arrived, and may be called again."""

    works: list[Any]
    finish: Callable[[], Any]
    keep: tuple[Any, ...] = ()  # buffers that must live until the transfer is done
    result: Any = None
    done: bool = False

    def wait(self) -> Any:
        if not self.done:
            for work in self.works:
                work.wait()
            self.result, self.done, self.keep = self.finish(), True, ()
        return self.result


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One uint8 vector of the bytes of `tensors`, one after the other."""
    return torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors])


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> Tensors:
    """Tensors of the shapes and dtypes of `like` from their bytes; contiguous, and copies."""
    parts = buffer.split([t.nbytes for t in like])
    # a part may begin where its dtype is not aligned, hence the copy
    return tuple(p.clone().view(t.dtype).view(t.shape) for p, t in zip(parts, like, strict=True))


def gather_start(tensors: Sequence[Tensor], group: ProcessGroup | None, name: str) -> Transfer:
    """Every rank's `tensors` (equal shapes); `wait` gives a list with one tuple per rank of `group`, in rank order."""
    mine = tuple(tensors)
    if group is None:
        return Transfer([], lambda: [mine])
    packed = pack(mine)
    others = packed.nbytes * (group.size() - 1)
    observe("wire", name, packed, group, others, others)
    found = [torch.empty_like(packed) for _ in range(group.size())]
    work = dist.all_gather(found, packed, group=group, async_op=True)
    own = group.rank()
    return Transfer([work], lambda: [mine if r == own else unpack(f, mine) for r, f in enumerate(found)], (packed,))


def all_to_all_start(parts: Sequence[Sequence[Tensor]], group: ProcessGroup | None, name: str) -> Transfer:
    """`parts[r]` goes to rank r of `group`; `wait` gives what each rank sent here, in rank order.

    Every part has the shapes and dtypes of the others.
    """
    own = tuple(parts[0 if group is None else group.rank()])
    if group is None:
        return Transfer([], lambda: [own])
    sent = torch.stack([pack(part) for part in parts])
    received = torch.empty_like(sent)
    others = sent[0].nbytes * (group.size() - 1)
    observe("wire", name, sent, group, others, others)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return Transfer([work], lambda: [unpack(row, own) for row in received], (sent,))


def exchange_start(
    tensors: Sequence[Tensor],
    to: int | None,
    like: Sequence[Tensor],
    source: int | None,
    name: str,
    group: ProcessGroup | None = None,
) -> Transfer:
    """Send `tensors` to global rank `to` and receive tensors as `like` from `source`; None for neither.

    `wait` gives what arrived, or an empty tuple. All ranks that exchange at one time call this together.
    """
    operations: list[dist.P2POp] = []
    sent: Tensor | None = None
    arriving: Tensor | None = None
    if to is not None:
        sent = pack(tensors)
        operations.append(dist.P2POp(dist.isend, sent, to, group))
    if source is not None:
        size = sum(math.prod(t.shape) * t.element_size() for t in like)
        arriving = torch.empty(size, dtype=torch.uint8, device=like[0].device)
        operations.append(dist.P2POp(dist.irecv, arriving, source, group))
    there, here = 0 if sent is None else sent.nbytes, 0 if arriving is None else arriving.nbytes
    if operations:
        buffer = sent if sent is not None else arriving
        assert buffer is not None
        observe("wire", name, buffer, None, there, here)
    works = dist.batch_isend_irecv(operations) if operations else []
    like = tuple(like)
    return Transfer(works, lambda: () if arriving is None else unpack(arriving, like), (sent, arriving))
