"""All-reduces between ranks of this machine: by gloo, through sockets of their own, and through memory that they share.

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
from rewriter.runtime.collectives import socket_sum
from rewriter.runtime.collectives.shared_memory_sum import SharedMemorySums

SIZES = (576, 2304, 4608, 16_384, 65_536, 262_144)  # bytes; 2,304 are a token of SmolLM2 in fp32
IN_A_ROW = 50


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    sockets, shared = socket_sum.connect(group), SharedMemorySums(group)
    assert sockets is not None, "no connection"
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "gloo": lambda x: dist.all_reduce(x, group=group),
        "sockets": lambda x: sockets.start(x)[1].wait(),
        "shared": lambda x: shared.start(x)[1].wait(),
    }
    found = []
    for x in (torch.ones(size // 4) for size in SIZES):
        taken = [name for name in ways if name != "sockets" or sockets.takes(x)]
        found.append(timed(x, {name: ways[name] for name in taken}, rounds))
    return found


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
    print(f"{'bytes':>8}  gloo, µs  sockets, µs  shared memory, µs")
    for row in largest(asked.ranks, measure, asked.rounds):
        sockets = f"{row['sockets']:.0f}" if "sockets" in row else "by gloo"  # a rank would send more than LARGEST
        print(f"{row['bytes']:8d}  {row['gloo']:8.0f}  {sockets:>11}  {row['shared']:17.0f}")


if __name__ == "__main__":
    main()
