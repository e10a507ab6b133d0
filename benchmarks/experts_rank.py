"""The ranks of one node of benchmarks/experts.py, which starts it: training steps of a small mixture of experts.

python experts_rank.py DIRECTORY NODE
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expert_traffic import expert_traffic
from transformers import MixtralConfig, MixtralForCausalLM

from rewriter.runtime import record_events
from rewriter.training import ExpertParallel, expert_mesh, shard_experts


def main() -> None:
    directory, node = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((directory / "spec.json").read_text())
    context = multiprocessing.get_context("fork")  # what is imported is imported once for the node
    ranks = range(node * spec["local"], (node + 1) * spec["local"])
    processes = [context.Process(target=run, args=(spec, directory, rank)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def run(spec: dict[str, Any], directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = spec["interface"]
    world = spec["nodes"] * spec["local"]
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(f"{directory}/store", world))
    built = {order: build(spec, order) for order in spec["orders"]}
    found = []
    for phase in range(2):
        if phase == 1:
            dist.barrier()
            if rank == 0:
                (directory / "ready").touch()
                while not (directory / "go").exists():
                    time.sleep(0.02)
            dist.barrier()
        found.append({order: measured(spec, *system) for order, system in built.items()})
    (directory / f"result-{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build(spec: dict[str, Any], order: str) -> tuple[ExpertParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = MixtralConfig(
        **spec["sizes"], num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2
    )
    model = MixtralForCausalLM(config)
    world = spec["nodes"] * spec["local"]
    parallel = shard_experts(model, expert_mesh(world // spec["ep"], spec["ep"], order, "cpu"))
    return parallel, torch.optim.AdamW(model.parameters(), lr=1e-4)


def measured(spec: dict[str, Any], parallel: ExpertParallel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Medians over the repetitions. The first step finds connections that know another rate."""
    taken = [step(spec, parallel, optimizer) for _ in range(1 + spec["repetitions"])][1:]
    return {key: statistics.median(each[key] for each in taken) for key in taken[0]}


def step(spec: dict[str, Any], parallel: ExpertParallel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    ids = torch.randint(0, spec["sizes"]["vocab_size"], (1, spec["tokens"]))
    dist.barrier()  # nobody sends before all have read
    before, begin = sent(spec["interface"]), time.perf_counter()
    dist.barrier()
    with record_events() as events:
        optimizer.zero_grad()
        parallel.model(input_ids=ids, labels=ids).loss.backward()
        dist.barrier()
        between = sent(spec["interface"])
        dist.barrier()
        parallel.reduce_gradients()
        optimizer.step()
    dist.barrier()
    seconds, after = time.perf_counter() - begin, sent(spec["interface"])
    counted = expert_traffic(events, spec["local"], dist.get_rank())
    return {
        "seconds": seconds,
        "tokens sent": between - before,
        "gradients sent": after - between,
        "experts": counted.experts,
        "others": counted.others,
        "tokens": counted.tokens,
    }


def sent(interface: str) -> int:
    """Bytes that have left this network namespace by `interface`, headers of frames and segments included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
