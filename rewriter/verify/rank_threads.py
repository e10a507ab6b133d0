"""Ranks as threads of this process, with an all-reduce between them: for references, not for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Group:
    """Threads that stand for ranks. One runs at a time; they wait for each other in `all_reduce`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._parts: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, self._sum)
        self._running = threading.Lock()
        self._total: Any = None

    def all_reduce(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """The sum of what every rank gives, the same tensor on all."""
        self._parts[rank] = part
        self._running.release()
        try:
            self._barrier.wait()
        finally:
            self._running.acquire()
        total: torch.Tensor = self._total
        return total

    def _sum(self) -> None:
        self._total = sum(self._parts[1:], self._parts[0])

    def run(self, function: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """`function` of every rank. Raises what a rank raised."""
        enabled = torch.is_grad_enabled()

        def body(rank: int) -> torch.Tensor:
            with self._running, torch.set_grad_enabled(enabled):
                try:
                    return function(rank)
                except Exception:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(self.ranks) as threads:
            results = [threads.submit(body, rank) for rank in range(self.ranks)]
        errors = [error for result in results if (error := result.exception()) is not None]
        # the others could not go on
        if first := next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None):
            raise first
        return [result.result() for result in results]
