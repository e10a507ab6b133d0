"""What benchmarks/serving.py adds to vLLM's workers: every all-reduce takes longer, at one place for all models."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator

from rewriter.serving.vllm.engine import VllmEngine

_sum = GroupCoordinator._all_reduce_out_place
_begin = VllmEngine.begin
_delay = 0.0


def _delayed(self: GroupCoordinator, x: Tensor) -> Tensor:
    time.sleep(_delay)
    return _sum(self, x)


class _Late:
    """A sum that is there so long after its begin, at the earliest: as over a link that takes the delay."""

    def __init__(self, work: Any) -> None:
        self.work, self.due = work, time.perf_counter() + _delay

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


def _begun_late(self: VllmEngine, x: Tensor) -> tuple[Tensor, Any] | None:
    begun = _begin(self, x)
    return None if begun is None else (begun[0], _Late(begun[1]))


GroupCoordinator._all_reduce_out_place = _delayed
VllmEngine.begin = _begun_late


class Delay:
    """Mixed into vLLM's Worker by its `worker_extension_cls`."""

    def delay_all_reduces(self, seconds: float) -> None:
        global _delay
        _delay = seconds
