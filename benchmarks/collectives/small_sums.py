"""All-reduces between ranks of this machine: by gloo, and through sockets of their own.

    python -m benchmarks.collectives.small_sums [--ranks 2] [--rounds 20]

Microseconds of one sum by size, of many in a row; the median over rounds in which the ways take turns, of the slower
rank. Sockets speak over loopback. One thread per rank; a machine with fewer cores than ranks measures something else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.local_ranks import largest
from rewriter.runtime.collectives.small_sums import connect_small_sums, small_sum_start

SIZES = (576, 2304, 4608, 16_384, 65_536, 262_144)  # bytes; 2,304 are a token of SmolLM2 in fp32
IN_A_ROW = 50


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert connect_small_sums(group, torch.device("cpu")), "no connection"

    def by_sockets(x: torch.Tensor) -> bool:
        """False where the backend takes it."""
        work = small_sum_start(x, group)
        return work is not None and work.wait()

    ways: dict[str, Callable[[torch.Tensor], Any]] = {"gloo": lambda x: dist.all_reduce(x, group=group)}
    rows = []
    for x in (torch.ones(size // 4) for size in SIZES):
        rows.append(timed(x, ways | ({"sockets": by_sockets} if by_sockets(x.clone()) else {}), rounds))
    return rows


def timed(x: torch.Tensor, ways: Mapping[str, Callable[[torch.Tensor], Any]], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(IN_A_ROW):
                run(x.clone())
            seconds[name].append((time.perf_counter() - begin) / IN_A_ROW)
    return {"bytes": x.nbytes, **{name: 1e6 * statistics.median(found) for name, found in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print(f"{'bytes':>8}  gloo, µs  sockets, µs")
    for row in largest(asked.ranks, measure, asked.rounds):
        sockets = f"{row['sockets']:.0f}" if "sockets" in row else "by gloo"  # a rank would send more than LARGEST
        print(f"{row['bytes']:8d}  {row['gloo']:8.0f}  {sockets:>11}")


if __name__ == "__main__":
    main()
