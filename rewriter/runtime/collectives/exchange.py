"""Messages between ranks that are started now and waited for later.

Every function packs what it is given into one message per peer and counts the bytes exactly
(`rewriter.runtime.record_events`, kind "wire"; `axis` is the mesh's name for the group, where it has one). Tensors of
several dtypes share a message: they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.gradients import identity, with_gradient
from rewriter.runtime.collectives.log import annotated, observe
from rewriter.runtime.collectives.process_groups import RankSet
from rewriter.runtime.torch_marks import register_node

Tensors = tuple[Tensor, ...]

_VECTOR = 16  # bytes that CUDA's attention kernels read at a time

# into one buffer: gathering into a list of tensors makes NCCL copy twice. Renamed in torch 2.13
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


def pack(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None, out: Tensor | None = None) -> Tensor:
    """One uint8 vector of the bytes of `tensors`, one after the other, rounded to `dtypes`; in `out` where it is given.

    Each is read once, with any strides, and written once, in its place. Without `out`, a single contiguous tensor
    of its dtype is not copied: it must not change while it is on its way.
    """
    dtypes = [t.dtype for t in tensors] if dtypes is None else dtypes
    if out is None:
        if len(tensors) == 1 and tensors[0].dtype == dtypes[0] and tensors[0].is_contiguous():
            return _bytes(tensors[0])
        size = sum(t.numel() * dtype.itemsize for t, dtype in zip(tensors, dtypes, strict=True))
        out = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    places = out.split([t.numel() * dtype.itemsize for t, dtype in zip(tensors, dtypes, strict=True)])
    for place, t, dtype in zip(places, tensors, dtypes, strict=True):
        if place.storage_offset() % dtype.itemsize == 0:
            place.view(dtype).view(t.shape).copy_(t)
        else:  # it follows a tensor of smaller elements
            place.copy_(_bytes(t.to(dtype)))
    return out


def _bytes(x: Tensor) -> Tensor:
    flat = x.contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous with any stride, but cannot be viewed as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def shapes(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Tensors:
    """Tensors on the meta device that `unpack` takes for what `pack` makes of these."""
    return tuple(torch.empty_like(t, dtype=dtype, device="meta") for t, dtype in zip(tensors, dtypes, strict=True))


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> Tensors:
    """Tensors of the shapes and dtypes of `like` from their bytes: contiguous, views of `buffer` where it can be."""
    parts = buffer.split([t.nbytes for t in like])
    return tuple(_aligned(p).view(t.dtype).view(t.shape) for p, t in zip(parts, like, strict=True))


def _aligned(part: Tensor) -> Tensor:
    """`part`, copied where neither its dtype nor kernels' vectors of 16 bytes could be read from its place."""
    return part if part.storage_offset() % _VECTOR == 0 else part.clone()


def gather_start(tensors: Sequence[Tensor], group: ProcessGroup | None, name: str, axis: str = "") -> Transfer:
    """Every rank's `tensors` (equal shapes); `wait` gives a list with one tuple per rank of `group`, in rank order.

    The own ones are those that were given.
    """
    mine = tuple(tensors)
    if group is None:
        return Transfer([], lambda: [mine])
    size, own = sum(t.nbytes for t in mine), group.rank()
    rows = torch.empty(group.size(), size, dtype=torch.uint8, device=mine[0].device)
    pack(mine, out=rows[own])
    arriving = gather_rows_start(rows, group, name, axis)
    return Transfer([arriving], lambda: [mine if r == own else unpack(row, mine) for r, row in enumerate(rows)])


def gather_rows_start(rows_PB: Tensor, group: ProcessGroup, name: str, axis: str = "") -> Transfer:
    """Bytes [P, B] of which this rank has filled in its own row; `wait` gives the same memory, with all rows.

    No rank may touch its own until then.
    """
    rows, own = rows_PB.unbind(), group.rank()
    others = rows[own].nbytes * (len(rows) - 1)
    observe("wire", name, rows[own], group, others, others, axis)
    if rows_PB.is_cuda:
        works = [all_gather_flat(rows_PB.view(-1), rows[own].view(-1), group=group, async_op=True)]
    else:  # gloo's passes blocks on from rank to rank, and a pair of ranks sends in turns; see `_start`
        works = _all_to_all([rows[own]] * len(rows), rows, group)
    return Transfer(works, lambda: rows_PB)


def all_to_all_uneven_start(
    sent_ND: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup, name: str, axis: str = ""
) -> Transfer:
    """Rows of [N, D] to the ranks of `group`: the first `sends[0]` to rank 0, and so on; N is their sum.

    `wait` gives the rows that arrived, [Σ receives, D], in rank order; `receives[r]` is what rank r sends here. One's
    own do not travel, and are not counted.
    """
    own, row = group.rank(), sent_ND[:1].nbytes
    sent_ND = sent_ND.contiguous()
    received_ND = sent_ND.new_empty(sum(receives), *sent_ND.shape[1:])
    to = [0 if r == own else rows * row for r, rows in enumerate(sends)]
    others = (sum(receives) - receives[own]) * received_ND[:1].nbytes
    observe("wire", name, sent_ND, group, sum(to), others, axis, to)
    if sent_ND.is_cuda:
        work = dist.all_to_all_single(received_ND, sent_ND, list(receives), list(sends), group=group, async_op=True)
        return Transfer([work], lambda: received_ND, (sent_ND,))
    leaving, arriving = sent_ND.split(list(sends)), received_ND.split(list(receives))
    arriving[own].copy_(leaving[own])
    works = _all_to_all([_bytes(rows) for rows in leaving], [_bytes(rows) for rows in arriving], group)
    return Transfer(works, lambda: received_ND, (sent_ND,))


def all_to_all_start(
    parts: Sequence[Sequence[Tensor]],
    group: ProcessGroup | None,
    name: str,
    dtypes: Sequence[torch.dtype] | None = None,
    axis: str = "",
) -> Transfer:
    """`parts[r]` goes to rank r of `group`; `wait` gives what each rank sent here, in rank order.

    The parts for others have equal shapes and dtypes, and travel in `dtypes` where these are given. The own part does
    not travel and is given back as it is: it may be a sum that only others need rounded.
    """
    if group is None:
        return Transfer([], lambda: [tuple(parts[0])])
    own, ranks = group.rank(), group.size()
    given = parts[(own + 1) % ranks]
    dtypes = [t.dtype for t in given] if dtypes is None else dtypes
    sent = pack([t for r, part in enumerate(parts) if r != own for t in part], [*dtypes] * (ranks - 1))
    received = torch.empty_like(sent)
    splits = [0 if r == own else sent.nbytes // (ranks - 1) for r in range(ranks)]
    leaving, arriving = sent.split(splits), received.split(splits)
    observe("wire", name, sent, group, sent.nbytes, sent.nbytes, axis)
    works = _all_to_all(leaving, arriving, group)
    like = shapes(given, dtypes)

    def finish() -> list[Tensors]:
        return [tuple(parts[own]) if r == own else unpack(row, like) for r, row in enumerate(arriving)]

    return Transfer(works, finish, (sent,))


def exchange_start(tensors: Sequence[Tensor], to: int, source: int, name: str, group: ProcessGroup | None) -> Transfer:
    """Send `tensors` to global rank `to`; `wait` gives those, of the same shapes and dtypes, that `source` sent here.

    All ranks that exchange at one time call this together.
    """
    like = tuple(tensors)
    sent = pack(like)
    arriving = torch.empty(sum(t.nbytes for t in like), dtype=torch.uint8, device=sent.device)
    observe("wire", name, sent, None, sent.nbytes, arriving.nbytes)
    works = _start({to: sent}, {source: arriving}, group)
    return Transfer(works, lambda: unpack(arriving, like), (sent,))


def _all_to_all(leaving: Sequence[Tensor], arriving: Sequence[Tensor], group: ProcessGroup) -> list[Any]:
    """Begin messages to and from the other ranks of `group`, except empty ones; the next rank first, so that each is
    some rank's first."""
    members, own = dist.get_process_group_ranks(group), group.rank()
    others = [(own + step) % len(members) for step in range(1, len(members))]
    return _start(
        {members[r]: leaving[r] for r in others if leaving[r].numel()},
        {members[r]: arriving[r] for r in others if arriving[r].numel()},
        group,
    )


def _start(sends: dict[int, Tensor], receives: dict[int, Tensor], group: ProcessGroup | None) -> list[Any]:
    """Begin messages to and from global ranks: receives first.

    Gloo tells the sender of a receive on the connection on which it sends. Said after a send has begun, that waits
    until all of its bytes are out, and only then the other direction begins: two ranks that exchange messages would
    take twice as long as their link does. (Its own all-to-all sends first.)
    """
    operations = [dist.P2POp(dist.irecv, buffer, rank, group) for rank, buffer in receives.items()]
    operations += [dist.P2POp(dist.isend, buffer, rank, group) for rank, buffer in sends.items()]
    return dist.batch_isend_irecv(operations) if operations else []


@dataclass(eq=False)
class Pending:
    """An all-reduce on its way. `value` is readable only through `all_reduce_wait`.

    A pytree node whose only leaf is the tensor, and a dataclass: hooks on a module's inputs and outputs (checkpointing;
    FSDP2, which looks into dataclasses since torch 2.13) see the tensor and keep the handle.
    """

    value: Tensor
    work: Any = None  # None once it has been waited for, or when there is nothing to wait for
    name: str = ""
    group: RankSet | None = None


register_node(Pending, ("value",), ("work", "name", "group"))


def all_reduce_wait(pending: Pending | Tensor) -> Tensor:
    """The sum that `all_reduce_start` or `quantized_all_reduce_start` began; gradient: identity. Waiting twice is
    allowed; a plain tensor is returned as it is.

    On CUDA the current stream waits, not the host.
    """
    if isinstance(pending, Tensor):
        return pending
    if pending.work is not None:
        with annotated("all_reduce_wait", pending.name):
            observe("wait", pending.name, pending.value, pending.group)
            arrived = pending.work.wait()
        if isinstance(pending.work, Transfer):  # others sum in the memory of `value`
            pending.value = with_gradient(pending.value, lambda _: identity(arrived))
        pending.work = None
    return pending.value


_interrupted: list[str] = []  # the errors that ended calls of this process


@contextmanager
def messages_under_way(what: str) -> Iterator[None]:
    """Messages of `what` are under way within it. After an error, a later call would take what has yet to arrive for
    its own: from then on RewriterError is raised instead, for all that uses this, in all threads."""
    if _interrupted:
        raise RewriterError(
            f"{what}: an earlier call in this process ended in {_interrupted[0]} with messages under way, which later "
            "calls would take for theirs. Start all processes again"
        )
    try:
        yield
    except BaseException as error:
        _interrupted.append(f"{type(error).__name__}({error})")
        raise
