"""Ranks as threads of this process, with an all-reduce between them: for references, not for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        results: list[Any] = [None] * self.ranks
        errors: list[Exception] = []
        enabled = torch.is_grad_enabled()

        def body(rank: int) -> None:
            with self._running, torch.set_grad_enabled(enabled):
                try:
                    results[rank] = function(rank)
                except threading.BrokenBarrierError:
                    pass  # another rank failed first
                except Exception as error:
                    errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
