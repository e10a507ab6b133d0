"""A process group whose other members may not exist: the surface of torch.distributed, in Python.

Each method turns a call into an Operation and hands it to the engine. torch reaches them in two ways: the functions of
`torch.distributed` call them as Python methods; C++ callers (DDP, functional collectives) through the trampoline of
`torch.distributed.ProcessGroup`, which knows some of them. In torch 2.13 several were renamed: both names are here.
The trampoline does not have `all_gather_single` and `reduce_scatter_single` (`_c10d_functional.…_out`, which Inductor
uses where it packs several collectives into one): torch raises "No backend type associated" for these.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.identity import Identity
from rewriter.emulation.operation import EmulatedOperation, FusedOperation, Reduction
from rewriter.emulation.work import Deferred, Together
from rewriter.fabric import Call, Kind

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)

_OBJECTS = ("broadcast_object_list", "scatter_object_list")
_WITHIN = 3  # frames of torch between its function and ours


def _reduction(op: Any) -> Reduction:
    return next((name for known, name in _REDUCTIONS if op == known), "premul_sum")


class EmulatedGroup(Identity):
    """See the head of this file. Made by `torch.distributed.init_process_group("emulated")` and `new_group`."""

    # --- collectives ---

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        op = _reduction(opts.reduceOp) if opts is not None else "sum"
        return self._start("all_reduce", _bytes(tensors), tensors, tensors, opts, reduction=op)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        root = 0 if opts is None else opts.rootRank
        if self.ranks[root] not in self.real:
            refuse_objects(self.ranks[root])
        return self._start("broadcast", _bytes(tensors), tensors, tensors, opts, root=root)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        root = 0 if opts is None else opts.rootRank
        op = _reduction(opts.reduceOp) if opts is not None else "sum"
        return self._start("reduce", _bytes(tensors), tensors, tensors, opts, root=root, reduction=op)

    def allgather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._fused("all_gather", self.size(), inputs, [[x] for x in inputs], output_lists, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        # one list of all tensors for each rank; here one list of all ranks' for each tensor
        return self.allgather([list(of_ranks) for of_ranks in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._fused("all_gather", 1, outputs, [[x] for x in inputs], [[y] for y in outputs], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def gather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        outputs = output_lists[0] if output_lists else ()
        size = self.size() * _bytes(inputs)
        return self._start("gather", size, inputs, outputs, opts, root=0 if opts is None else opts.rootRank)

    def scatter(self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        inputs = input_lists[0] if input_lists else ()
        if opts is not None and self.ranks[opts.rootRank] not in self.real:
            refuse_objects(self.ranks[opts.rootRank])
        size = self.size() * _bytes(outputs)
        return self._start("scatter", size, inputs, outputs, opts, root=0 if opts is None else opts.rootRank)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Any:
        op = _reduction(opts.reduceOp) if opts is not None else "sum"
        return self._fused(
            "reduce_scatter", self.size(), outputs, input_lists, [[y] for y in outputs], opts, reduction=op
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        op = _reduction(opts.reduceOp) if opts is not None else "sum"
        return self._fused(
            "reduce_scatter", 1, inputs, [[x] for x in inputs], [[y] for y in outputs], opts, reduction=op
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        if output_splits or input_splits:
            sizes = [list(output_splits), list(input_splits)]
            for x, split in zip((output, input), sizes, strict=True):
                split += [] if split else [x.shape[0] // self.size()] * self.size()
            return self.alltoall(output.split(sizes[0]), input.split(sizes[1]), opts)
        return self._start("all_to_all", input.nbytes, [input], [output], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._start("all_to_all", _bytes(inputs), inputs, outputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._start("barrier", 0, (), (), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    # names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> Any:
        return self._message(tensors, self.rank(), destination, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        return self._message(tensors, source, self.rank(), tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """From the next rank: the first of those that could have sent."""
        return self.recv(tensors, (self.rank() + 1) % self.size(), tag)

    def _message(self, tensors: Sequence[Tensor], source: int, destination: int, tag: int) -> Any:
        ends = (self.ranks[source], self.ranks[destination])
        receives = destination == self.rank()
        call = Call("send", _bytes(tensors), ends, _dtype(tensors))
        inputs, outputs = ((), tuple(tensors)) if receives else (tuple(tensors), ())
        found = None
        if receives:
            found = self._mailbox.receive(tensors[0])
        else:
            self._mailbox.send(tensors[0])
        # counted for each pair and direction: other ranks of the group know nothing of it
        self._messages[ends] = sequence = self._messages.get(ends, 0) + 1
        return self._submit(
            EmulatedOperation(
                call,
                self.group_name,
                sequence,
                int(receives),
                inputs,
                outputs,
                self.timeout,
                asynchronous=True,
                root=source,
                tag=tag,
                source=found,
            )
        )

    # --- several as one ---

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:
        begun, self._coalesced = self._coalesced or [], None
        for deferred in begun:
            deferred.work = self.engine.submit(deferred.operation)
            self._under_way.add(deferred.work)
        return Together([deferred.work for deferred in begun])

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # --- how they become operations ---

    def _start(
        self,
        kind: Kind,
        nbytes: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        *,
        root: int | None = None,
        reduction: Reduction = "sum",
    ) -> Any:
        return self._submit(self._operation(kind, nbytes, inputs, outputs, opts, root, reduction, self._counted()))

    def _fused(
        self,
        kind: Kind,
        times: int,
        whole: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        outputs: Sequence[Sequence[Tensor]],
        opts: Any,
        reduction: Reduction = "sum",
    ) -> Any:
        """One operation of `times` × the bytes of `whole`, where backends start one for several pairs."""
        sequence = self._counted()
        parts = tuple(
            self._operation(kind, times * x.nbytes, i, o, opts, None, reduction, sequence)
            for x, i, o in zip(whole, inputs, outputs, strict=True)
        )
        return self._submit(parts[0] if len(parts) == 1 else FusedOperation.of(parts))

    def _operation(
        self,
        kind: Kind,
        nbytes: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        root: int | None,
        reduction: Reduction,
        sequence: int,
    ) -> EmulatedOperation:
        return EmulatedOperation(
            Call(kind, nbytes, self.ranks, _dtype(outputs or inputs)),
            self.group_name,
            sequence,
            self.rank(),
            tuple(inputs),
            tuple(outputs),
            self._seconds(opts),
            bool(getattr(opts, "asyncOp", False)),
            root,
            reduction,
        )

    def _submit(self, operation: EmulatedOperation) -> Any:
        self._check()
        if self._coalesced is not None:
            deferred = Deferred(operation)
            self._coalesced.append(deferred)
            return deferred
        work = self.engine.submit(operation)
        self._under_way.add(work)
        return work


def refuse_objects(root: int) -> None:
    """Raise where torch broadcasts objects from an emulated rank, which has none: their sizes would be garbage."""
    frame = sys._getframe(2)
    for _ in range(_WITHIN):
        if frame.f_code.co_name in _OBJECTS:
            raise RewriterError(
                f"{frame.f_code.co_name}: rank {root} is emulated and has no objects. Make it real"
                " (in delay mode: wire mode carries no values)"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _dtype(tensors: Sequence[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if len(tensors) else str(torch.uint8).removeprefix("torch.")
