"""A process group whose other members may not exist: the surface of torch.distributed, in Python.

Each method turns a call into an EmulatedOperation and hands it to the engine. torch calls them in two ways: the
functions of `torch.distributed` as Python methods; C++ callers (DDP, functional collectives) through the trampoline of
`torch.distributed.ProcessGroup`, which knows some of them. In torch 2.13 several were renamed: both names are here.
The trampoline does not have `all_gather_single` and `reduce_scatter_single` (`_c10d_functional.…_out`, which Inductor
uses where it packs several collectives into one): torch raises "No backend type associated" for these.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.operation import EmulatedOperation, Reduction, fused
from rewriter.emulation.socket_sums import EmulatedSums, MeetingSums
from rewriter.emulation.values import Mailbox
from rewriter.emulation.work import CollectiveAborted, Deferred, Engine, Together
from rewriter.fabric import Call, DelayModel, Kind
from rewriter.runtime.collectives.small_sums import socket_sums

NAME = "emulated"
_OBJECTS = ("broadcast_object_list", "scatter_object_list")
_WITHIN = 3  # frames of torch between its function and ours
_Part = tuple[int, Sequence[Tensor], Sequence[Tensor]]  # (bytes, inputs, outputs)


def _reduction(opts: Any) -> Reduction:
    if opts is None:
        return "sum"
    known = (name for name in get_args(Reduction) if opts.reduceOp == getattr(dist.ReduceOp, name.upper()))
    return next(known, "premul_sum")


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """`ranks` as a range where they have one distance, so that a large group costs no more than a small one."""
    if isinstance(ranks, range):
        return ranks
    if len(ranks) > 1 and (step := ranks[1] - ranks[0]):
        even = range(ranks[0], ranks[0] + step * len(ranks), step)
        if all(rank == expected for rank, expected in zip(ranks, even, strict=True)):
            return even
    return tuple(ranks)


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs list overloads that torch does not call


class EmulatedGroup(_ProcessGroup):
    """See the head of this file. Made by `torch.distributed.init_process_group("emulated")` and `new_group`.

    `ranks`: global ranks; `real`: those of the job that are. `timeout`: seconds. `on_shutdown`: called once, when the
    group is destroyed.
    """

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
        self._told = 0

    def small_sums(self) -> EmulatedSums | None:
        """A stand-in for the runtime's own sums. None where a part of the ranks are real, more than one."""
        if not isinstance(getattr(self.engine, "model", None), DelayModel):
            return None
        model = partial(getattr, self.engine, "model")
        own = self.ranks[self.rank()]
        others = [rank for rank in self.real if rank != own and rank in self.ranks]
        if not others:
            return EmulatedSums(self.ranks, model)
        met = socket_sums(self.rank(), self._of_all) if len(others) == self.size() - 1 else None
        return None if met is None else MeetingSums(self.ranks, model, met=met)

    def _of_all(self, own: Any) -> list[Any]:
        """`own` of every rank, all of which are real and call it together; any objects that can be pickled."""
        self._told += 1
        self._store.set(f"rewriter/told/{self._told}/{self.rank()}", pickle.dumps(own))
        every = (self._store.get(f"rewriter/told/{self._told}/{rank}") for rank in range(self.size()))
        return [pickle.loads(one) for one in every]

    # --- collectives ---

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        parts = [(_bytes(tensors), tensors, tensors)]
        return self._start("all_reduce", parts, opts, reduction=_reduction(opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._start("broadcast", [(_bytes(tensors), tensors, tensors)], opts, self._giver(opts))

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._start("reduce", [(_bytes(tensors), tensors, tensors)], opts, _root(opts), _reduction(opts))

    def allgather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        pairs = zip(inputs, output_lists, strict=True)
        return self._start("all_gather", [(self.size() * x.nbytes, [x], outputs) for x, outputs in pairs], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        # one list of all tensors for each rank; here one list of all ranks' for each tensor
        return self.allgather([list(of_ranks) for of_ranks in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allgather([[y] for y in outputs], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.allgather([[output]], [input], opts)

    def gather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        outputs = output_lists[0] if output_lists else ()
        return self._start("gather", [(self.size() * _bytes(inputs), inputs, outputs)], opts, _root(opts))

    def scatter(self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        inputs = input_lists[0] if input_lists else ()
        return self._start("scatter", [(self.size() * _bytes(outputs), inputs, outputs)], opts, self._giver(opts))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Any:
        parts = [(self.size() * y.nbytes, inputs, [y]) for y, inputs in zip(outputs, input_lists, strict=True)]
        return self._start("reduce_scatter", parts, opts, reduction=_reduction(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter(outputs, [[x] for x in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [[input]], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        if not output_splits and not input_splits:
            return self._start("all_to_all", [(input.nbytes, [input], [output])], opts)
        outputs, inputs = (
            x.split(list(split) or [x.shape[0] // self.size()] * self.size())
            for x, split in ((output, output_splits), (input, input_splits))
        )
        return self.alltoall(outputs, inputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._start("all_to_all", [(_bytes(inputs), inputs, outputs)], opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._start("barrier", [(0, (), ())], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    allreduce_coalesced = allreduce
    # names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> Any:
        return self._message(tensors, self.rank(), destination)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        return self._message(tensors, source, self.rank())

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """From the next rank: the first of those that could have sent."""
        return self.recv(tensors, (self.rank() + 1) % self.size())

    def _message(self, tensors: Sequence[Tensor], source: int, destination: int) -> Any:
        ends = (self.ranks[source], self.ranks[destination])
        receives = destination == self.rank()
        call = Call("send", _bytes(tensors), ends, _dtype(tensors))
        inputs, outputs = ((), tuple(tensors)) if receives else (tuple(tensors), ())
        if not receives:
            self._mailbox.send(tensors[0])
        # counted for each pair and direction: other ranks of the group know nothing of it
        self._messages[ends] = sequence = self._messages.get(ends, 0) + 1
        return self._submit(
            EmulatedOperation(
                call, self.group_name, sequence, int(receives), inputs, outputs, self.timeout,
                asynchronous=True, root=source, mailbox=self._mailbox if receives else None,
            )
        )  # fmt: skip

    # --- several as one ---

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:
        begun, self._coalesced = self._coalesced or [], None
        for deferred in begun:
            deferred.works = (self.engine.submit(deferred.operation),)
            self._under_way.add(deferred.works[0])
        return Together(begun)

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # --- how they become operations ---

    def _start(
        self, kind: Kind, parts: Sequence[_Part], opts: Any, root: int | None = None, reduction: Reduction = "sum"
    ) -> Any:
        """One operation of all `parts`, where backends start one for several tensors."""
        self._sequence += 1
        operations = tuple(
            EmulatedOperation(
                Call(kind, nbytes, self.ranks, _dtype(o or i)), self.group_name, self._sequence, self.rank(),
                tuple(i), tuple(o), self._seconds(opts), bool(getattr(opts, "asyncOp", False)), root, reduction,
            )
            for nbytes, i, o in parts
        )  # fmt: skip
        return self._submit(fused(operations))

    def _submit(self, operation: EmulatedOperation) -> Any:
        self._check()
        if self._coalesced is not None:
            deferred = Deferred(operation)
            self._coalesced.append(deferred)
            return deferred
        work = self.engine.submit(operation)
        self._under_way.add(work)
        return work

    def _giver(self, opts: Any) -> int:
        """The root of an operation, whose values the others get. Raises RewriterError where torch broadcasts objects
        from an emulated rank, which has none: their sizes would be garbage."""
        root = _root(opts)
        if self.ranks[root] not in self.real:
            for frame, _ in islice(walk_stack(sys._getframe(2)), _WITHIN):
                if (name := frame.f_code.co_name) in _OBJECTS:
                    raise RewriterError(
                        f"{name}: rank {self.ranks[root]} is emulated and has no objects. Make it real"
                        " (in delay mode: wire mode carries no values)"
                    )
        return root

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

    name = _get_backend_name = getBackendName
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

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

    # --- others from it ---

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> Any:
        """Global `ranks` as another group; None where this process is not one of them. torch 2.13 and later
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
        """`ranks` of this group as another group; None where this process is not one of them."""
        self._splits += 1
        name = group_name or f"{self.group_name}:split:{self._splits}"
        return self.new_group([self.ranks[r] for r in ranks], timeout, opts, name, group_desc)

    splitGroup = split_group  # as C++ calls it

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


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _dtype(tensors: Sequence[Tensor]) -> str:
    return str(tensors[0].dtype if len(tensors) else torch.uint8).removeprefix("torch.")
