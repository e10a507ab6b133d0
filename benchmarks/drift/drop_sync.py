"""How long does `drop-sync` measure what each layer's drop costs, on a checkpoint's weights and the packaged text?

    python -m benchmarks.drift.drop_sync DIR --tp 3

Prints seconds beside CPU seconds, since only an idle machine makes these the seconds of each core, and those of one
forward pass. Exits with 1 above 45 s, the goal for a model of 135 million parameters on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from rewriter.check.drift import calibration_tokens, windows
from rewriter.check.sensitivity import sensitivity
from rewriter.ir.simulate import load_weights, simulate
from rewriter.tracing import trace

LIMIT = 45.0


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds, CPU seconds of all threads, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - cpu, result


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    options = parser.parse_args()
    program = trace(options.model)
    tokens, text = calibration_tokens(program)
    weights = load_weights(program, torch.float32)
    pieces = windows(program, tokens)
    simulate(program, pieces[0][None], weights=weights)  # warms the weights
    one, one_cpu, _ = timed(lambda: [simulate(program, piece[None], weights=weights) for piece in pieces])
    wall, cpu, costs = timed(lambda: sensitivity(program, tokens, options.tp, weights=weights))
    print(f"{len(tokens)} tokens ({text}) in {len(pieces)} windows, {torch.get_num_threads()} threads")
    print(f"one forward pass: {one:.1f} s ({one_cpu:.1f} s of CPU)")
    print(f"{sum(cost is not None for cost in costs)} layers' drops: {wall:.1f} s ({cpu:.1f} s of CPU)")
    print("nats per token: " + " ".join("–" if cost is None else f"{cost:.4g}" for cost in costs))
    return int(wall > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
