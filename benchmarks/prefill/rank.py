"""One rank of benchmarks/prefill/times.py, which starts it at its end of the link: outputs timed in turns.

The spec names the output directories, and prompts by their lengths; a time is that of `begin` and `prefill` of a
`DecodeStep`: all that happens before the first token is known. With `largest`, collectives of up to so many bytes are
measured instead.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.link_ranks import main
from rewriter.predict.calibration import COLLECTIVES, calibrated
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling, decode_step
from rewriter.runtime.loading import load

CALLS = 200


@torch.no_grad()
def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds to the first token by output and length, `repetitions` each in turns, and the tokens themselves; of a
    decode step by output, at the longest prompt. Or the YAML of a fabric of this link."""
    if "largest" in spec:
        return {"fabric": calibrated(Path("link.yaml"), spec["largest"], CALLS, COLLECTIVES)[0]}
    dtype = getattr(torch, spec["dtype"])
    models = {name: load(Path(place), dtype=dtype, compile=False) for name, place in spec["outputs"].items()}
    vocabulary = spec["vocabulary"]
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    steps: dict[str, list[float]] = {name: [] for name in models}
    chosen: dict[str, dict[str, int]] = {name: {} for name in models}
    for length in spec["lengths"]:
        ids = torch.randint(2, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
        for repetition in range(spec["warm_up"] + spec["repetitions"]):
            for name, model in models.items():
                state = decode_step(model, 1, length + spec["steps"] + 1, dist.group.WORLD)
                taken, token = prefilled(state, ids)
                chosen[name][str(length)] = token
                if repetition >= spec["warm_up"]:
                    seconds[name].setdefault(str(length), []).append(taken)
                if length == spec["lengths"][-1] and spec["steps"]:
                    taken = stepped(state, spec["steps"])
                    if repetition >= spec["warm_up"]:
                        steps[name].append(taken)
    return {"seconds": seconds, "steps": steps, "tokens": chosen}


def prefilled(state: DecodeStep, ids: torch.Tensor) -> tuple[float, int]:
    """(seconds, first token)."""
    dist.barrier()
    begin = time.perf_counter()
    state.begin(ids.shape[1], None, Sampling(), 0, (), 0)
    state.prefill(ids)
    token = int(state.choice)
    return time.perf_counter() - begin, token


def stepped(state: DecodeStep, count: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        state.take()
        state.next()
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main(measure)
