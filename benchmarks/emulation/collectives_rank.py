"""One rank of benchmarks/emulation/collectives.py: an unmodified program, real or under the emulated launcher.

    python emulation_collectives_rank.py SPEC.json RESULT.json      with RANK and WORLD_SIZE as torchrun sets them

Times blocks of collectives that follow each other, each block after a barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    spec_path, result_path = sys.argv[1:]
    spec, rank = json.loads(Path(spec_path).read_text()), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    results = []
    for kind in spec["kinds"]:
        for nbytes in spec["sizes"]:
            found = measured(collective(kind, nbytes), spec["block_seconds"], spec["interface"])
            results.append({"kind": kind, "nbytes": nbytes, **found})
    Path(result_path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def collective(kind: str, nbytes: int) -> Callable[[], Any]:
    """One call; `nbytes` as nccl-tests counts them."""
    whole = torch.zeros(nbytes // 4)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        # into one tensor: into a list, gloo allocates another first, which from 32 MB on is mapped anew each time
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        shard = torch.zeros(nbytes // 4 // dist.get_world_size())
        return lambda: gather(whole, shard)
    raise ValueError(kind)


def measured(call: Callable[[], Any], block_seconds: float, interface: str, blocks: int = 7) -> dict[str, float]:
    """Seconds, CPU seconds, and bytes sent by a call: medians over blocks of calls that follow each other."""
    call()
    # all ranks must choose the same numbers: the slower one's
    begin = time.perf_counter()
    call()
    each = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(each, op=dist.ReduceOp.MAX)
    count = max(1, min(300, round(block_seconds / each.item())))
    if each > 0.1:
        blocks = 3
    seconds, cpu, sent = [], [], []
    for _ in range(blocks):
        dist.barrier()
        before = sent_bytes(interface)
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        seconds.append((time.perf_counter() - begin) / count)
        cpu.append((time.process_time() - busy) / count)
        sent.append((sent_bytes(interface) - before) / count)
    middle = blocks // 2
    return {
        "seconds": sorted(seconds)[middle],
        "cpu_seconds": sorted(cpu)[middle],
        "sent_bytes": sorted(sent)[middle],
    }


def sent_bytes(interface: str) -> int:
    """What this end of the link has sent, with headers and acknowledgements."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
