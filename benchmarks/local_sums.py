"""All-reduces between ranks of this machine: through gloo's sockets and through memory that they share.

    python benchmarks/local_sums.py [--ranks 2] [--rounds 20]

Microseconds of one sum by size, of many in a row; the median over rounds in which both ways take turns, of the slower
rank. One thread
per rank; a machine with fewer cores than ranks measures something else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_ranks import largest

from rewriter.runtime.collectives import all_reduce
from rewriter.runtime.small_sums import choose_small_sums

SIZES = (576, 2304, 4608, 16_384, 65_536, 262_144)  # bytes; 2,304 are a token of SmolLM2 in fp32
IN_A_ROW = 50


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    way = choose_small_sums(group, torch.device("cpu"))
    assert way == "shared memory", way
    return [timed(torch.ones(size // 4), rounds) for size in SIZES]


def timed(x: torch.Tensor, rounds: int) -> dict[str, Any]:
    group = dist.group.WORLD
    ways: dict[str, Callable[[], Any]] = {
        "gloo": lambda: dist.all_reduce(x.clone(), group=group),
        "shared": lambda: all_reduce(x.clone(), group),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(IN_A_ROW):
                run()
            seconds[name].append((time.perf_counter() - begin) / IN_A_ROW)
    return {"bytes": x.nbytes, **{name: 1e6 * statistics.median(found) for name, found in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print(f"{'bytes':>8}  gloo, µs  shared memory, µs")
    for row in largest(asked.ranks, measure, asked.rounds):
        print(f"{row['bytes']:8d}  {row['gloo']:8.0f}  {row['shared']:17.0f}")


if __name__ == "__main__":
    main()
