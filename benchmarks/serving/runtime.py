"""One variant of benchmarks/serving/run.py in this project's own runtime: the first rank, which starts the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.serving.workload import PROMPT, STEPS, Asked, Late, Tokens, asked, prompts, serve

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor

import rewriter
from rewriter.runtime.collectives import differentiable
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling

_delay = 0.0
_start = differentiable.small_sum_start


def late_start(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any] | None:
    begun = _start(x, group)
    return None if begun is None else (begun[0], Late(begun[1], _delay))


@torch.no_grad()
def main(given: Asked) -> None:
    differentiable.small_sum_start = late_start
    torch.set_num_threads(1)
    model = rewriter.load(given.directory, compile=given.compiled)
    batch = torch.tensor(prompts())
    step = DecodeStep(model, len(batch), PROMPT + STEPS + 1, dist.group.WORLD)

    def run(delay: float) -> tuple[float, Tokens]:
        global _delay
        _delay = agreed(delay)
        step.begin(PROMPT, None, Sampling(), 0, (), 0)
        step.prefill(batch)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step.run()
        seconds = (time.perf_counter() - begin) / STEPS
        return seconds, torch.cat([step.produced[:STEPS], step.choice[None]]).T.tolist()

    tokens = run(0.0)[1]
    if dist.get_rank() == 0:
        serve(given, tokens, run)
        agreed(-1.0)
    while _delay >= 0:
        run(0.0)


def agreed(delay: float) -> float:
    """The first rank's delay."""
    told = torch.tensor([delay], dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.item()


def start_others(given: Asked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(given.ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(given.ranks)
    for rank in range(1, given.ranks):
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.runtime", *sys.argv[1:]],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}


if __name__ == "__main__":
    if "RANK" not in os.environ:
        start_others(asked())
    main(asked())
