"""One rank of benchmarks/experts/run.py, which starts it: training steps of a small mixture of experts."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.experts.traffic import expert_traffic
from benchmarks.support.link_ranks import main, passed_bytes
from rewriter.runtime import record_events
from rewriter.training import ExpertParallel, expert_mesh, shard_experts


def measure(spec: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    directory = Path(spec["scratch"])
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
    return found


def build(spec: dict[str, Any], order: str) -> tuple[ExpertParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = MixtralConfig(
        **spec["sizes"], num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2
    )
    model = MixtralForCausalLM(config)
    world = spec["ranks"]
    parallel = shard_experts(model, expert_mesh(world // spec["ep"], spec["ep"], order, "cpu"))
    return parallel, torch.optim.AdamW(model.parameters(), lr=1e-4)


def measured(spec: dict[str, Any], parallel: ExpertParallel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Medians over the repetitions. The first step finds connections that know another rate."""
    taken = [step(spec, parallel, optimizer) for _ in range(1 + spec["repetitions"])][1:]
    return {key: statistics.median(each[key] for each in taken) for key in taken[0]}


def step(spec: dict[str, Any], parallel: ExpertParallel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    ids = torch.randint(0, spec["sizes"]["vocab_size"], (1, spec["tokens"]))
    dist.barrier()  # nobody sends before all have read
    before, begin = passed_bytes(spec["interface"]), time.perf_counter()
    dist.barrier()
    with record_events() as events:
        optimizer.zero_grad()
        parallel.model(input_ids=ids, labels=ids).loss.backward()
        dist.barrier()
        between = passed_bytes(spec["interface"])
        dist.barrier()
        parallel.reduce_gradients()
        optimizer.step()
    dist.barrier()
    seconds, after = time.perf_counter() - begin, passed_bytes(spec["interface"])
    counted = expert_traffic(events, spec["local"], dist.get_rank())
    return {
        "seconds": seconds,
        "tokens sent": between - before,
        "gradients sent": after - between,
        "experts": counted.experts,
        "others": counted.others,
        "tokens": counted.tokens,
    }


if __name__ == "__main__":
    main(measure)
