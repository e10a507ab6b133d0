"""The engine of delays for whatever device an operation's tensors are on."""

from __future__ import annotations

from typing import Any

from rewriter.fabric import DelayModel
from rewriter.runtime.emulated.delay_cpu import DelayEngine
from rewriter.runtime.emulated.meetings import Meetings
from rewriter.runtime.emulated.operation import Operation


class DelayEngines:
    """A DelayEngine for tensors on the CPU."""

    def __init__(self, model: DelayModel, meetings: Meetings | None = None) -> None:
        self._cpu = DelayEngine(model, meetings)

    def submit(self, operation: Operation) -> Any:
        return self._cpu.submit(operation)

    def close(self) -> None:
        self._cpu.close()
