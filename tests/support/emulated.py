"""Emulated jobs of one real rank in the test's own process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rewriter.emulation import EmulationConfig  # registers the backend
from rewriter.emulation.rendezvous import Rendezvous
from rewriter.emulation.work import Engine
from rewriter.fabric import Call, Delay


class Constant:
    """Every operation takes `seconds`; what was asked for is remembered."""

    def __init__(self, seconds: float = 1e-4, **delay: Any) -> None:
        self.answer = Delay(seconds, **{"transfer": seconds, "links": ("nic",), **delay})
        self.calls: list[Call] = []

    def delay(self, call: Call) -> Delay:
        self.calls.append(call)
        return self.answer

    @property
    def kinds(self) -> list[str]:
        return [call.kind for call in self.calls]


class Modelled(EmulationConfig):
    """In which everything takes `seconds`."""

    seconds: float = 1e-4

    def delay_model(self) -> Constant:
        return Constant(self.seconds)


def together(make: Callable[[Rendezvous], Engine], real: tuple[int, ...]) -> dict[int, Engine]:
    """An engine for each real rank of a job, in this process."""
    store, engines = dist.HashStore(), {}

    def connect(rank: int) -> None:
        engines[rank] = make(Rendezvous(store, real, rank, 300))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in real]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return {rank: engines[rank] for rank in real}


@contextlib.contextmanager
def job(ranks: int, model: Any = None, rank: int = 0, **options: Any):
    """An emulated job of this process alone; gives the model of its delays."""
    model = Constant() if model is None else model
    dist.init_process_group(
        "emulated", rank=rank, world_size=ranks, store=dist.HashStore(), pg_options=model, **options
    )
    try:
        yield model
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
