"""One collective or message of this rank, as engines get it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from rewriter.emulation.values import Mailbox, uniform
from rewriter.fabric import Call

Tensors = tuple[Tensor, ...]

Reduction = Literal["sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum"]


@dataclass(frozen=True, eq=False)
class EmulatedOperation:
    """An operation that a process group was asked for: the `call` that a model of delays sees, and this rank's part.

    | kind                | inputs                               | outputs                              |
    |---------------------|--------------------------------------|--------------------------------------|
    | all_reduce, reduce, | the tensor                           | the same tensor, in place            |
    | broadcast           |                                      |                                      |
    | all_gather          | the shard                            | one tensor of all shards, or n       |
    | gather              | the shard                            | n tensors on the root, else none     |
    | reduce_scatter      | one tensor of n shards, or n         | the shard                            |
    | scatter             | n tensors on the root, else none     | the shard                            |
    | all_to_all          | one tensor of n equal parts, or n    | one tensor of n equal parts, or n    |
    | send                | the message, on the sender           | the message, on the receiver         |
    | barrier             | none                                 | none                                 |

    `rank`: this process's index in `call.ranks`; of a send, `call.ranks` are (sender, receiver). `root`: index in
    `call.ranks` of the one rank that a broadcast, reduce, gather or scatter has; of a message, its sender's in the
    group. `group` and `sequence`: the process group's name, and the number of operations that it had before: what
    identifies an operation, the same on all real ranks.
    `timeout`: seconds. `asynchronous`: the caller goes on meanwhile.
    """

    call: Call
    group: str
    sequence: int
    rank: int
    inputs: Tensors
    outputs: Tensors
    timeout: float
    asynchronous: bool = False
    root: int | None = None
    reduction: Reduction = "sum"
    mailbox: Mailbox | None = None  # for a message that this rank receives
    parts: tuple[EmulatedOperation, ...] = ()  # of a fused one
    called: float = field(default_factory=time.monotonic)  # when this rank came to it, seconds of `time.monotonic`

    @property
    def receives(self) -> bool:
        """True for the receiver of a message."""
        return self.call.kind == "send" and self.rank == 1

    @property
    def own(self) -> int:
        return self.call.ranks[self.rank]

    @property
    def output_bytes(self) -> int:
        return sum(t.nbytes for t in self.outputs)

    @property
    def title(self) -> str:
        """For messages: which one it is."""
        size = f"of {self.call.nbytes} bytes " if self.call.nbytes else ""
        if self.call.kind == "send":
            what = f"send {size}from rank {self.call.ranks[0]} to rank {self.call.ranks[1]}"
        else:
            what = f"{self.call.kind} {size}among {self.call.size} ranks"
        return f"group {self.group!r}, operation {self.sequence}: {what}"

    def fill(self) -> None:
        """Write what the collective gives if all ranks hold what this one holds: finite where the inputs are.

        Tensors keep their autograd history and version, as with other backends. See `values`.
        """
        if self.parts:
            for part in self.parts:
                part.fill()
        elif self.mailbox is not None:
            with torch.no_grad():
                for x in self.outputs:
                    self.mailbox.write(x)
        else:
            uniform(self.call.kind, self.inputs, self.outputs, self.call.size, self.rank, self.root, self.reduction)


def fused(parts: tuple[EmulatedOperation, ...]) -> EmulatedOperation:
    """Several operations of one kind, at least one, that backends start as one: its call has the bytes of all."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        call=replace(first.call, nbytes=sum(part.call.nbytes for part in parts)),
        inputs=tuple(x for part in parts for x in part.inputs),
        outputs=tuple(x for part in parts for x in part.outputs),
        parts=parts,
    )
