"""What benchmarks/serving.py adds to vLLM's workers: every all-reduce takes longer, at one place for all models."""

from __future__ import annotations

import time

from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator

_sum = GroupCoordinator._all_reduce_out_place
_delay = 0.0


def _delayed(self: GroupCoordinator, x: Tensor) -> Tensor:
    time.sleep(_delay)
    return _sum(self, x)


GroupCoordinator._all_reduce_out_place = _delayed


class Delay:
    """Mixed into vLLM's Worker by its `worker_extension_cls`."""

    def delay_all_reduces(self, seconds: float) -> None:
        global _delay
        _delay = seconds
