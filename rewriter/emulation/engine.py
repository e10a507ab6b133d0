"""What lets operations of this rank take place, and take their time."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rewriter.emulation.operation import EmulatedOperation


@runtime_checkable
class Engine(Protocol):
    """One for each process: all process groups of an emulated job share it.

    `submit` is called under the order in which this rank calls its collectives (each group counts them in
    `operation.sequence`), possibly from several threads, one for each group at a time. It returns at once a
    `torch.distributed.Work`; `EmulatedWork` is one for engines whose operations end on the CPU. When it is over, the
    outputs are written (`operation.fill()`).
    """

    def submit(self, operation: EmulatedOperation) -> Any:
        """Begin `operation`; a Work. Raises RewriterError where the engine cannot do it."""
        ...

    def close(self) -> None:
        """The job ends: stop threads, close connections. Operations under way are aborted. Twice is allowed."""
        ...
