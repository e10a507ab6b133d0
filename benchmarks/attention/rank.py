"""One rank of benchmarks/attention, which starts it at its port of the bridge and tells it line by line what to do.

    python -m benchmarks.attention.rank SPEC.json RANK

SPEC names a directory with `HEADS-KV_HEADS.safetensors` (whole q, k, v, the output's gradient do, and the expected o,
dq, dk, dv) and the cases. A line of standard input is an order, the same for all ranks, and the answer a line of
standard output:

    {"do": "check" | "attention", "case": number}
    {"do": "exchange", "heads": of all ranks, "tokens": of this rank, "head_dim": D, "times": number,
     "way": "one" | "at once" | "in turn"}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.ir.sequence_plan import take_tokens
from rewriter.runtime import record_events, sequence_mesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.collectives.exchange import Transfer, all_to_all_start

DIRECTIONS = ("sent", "received")
RESULTS = ("o", "dq", "dk", "dv")


def main() -> None:
    spec_path, rank_text = sys.argv[1:]
    spec, rank = json.loads(Path(spec_path).read_text()), int(rank_text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=spec["ranks"], store=dist.FileStore(spec["store"]))
    worker = Worker(spec, rank)
    for line in sys.stdin:
        order = json.loads(line)
        action = {"check": worker.check, "attention": worker.attention, "exchange": worker.exchange}[order["do"]]
        print(json.dumps(action(order)), flush=True)


class Worker:
    """A rank's meshes and its part of the data, made when a case first needs them."""

    def __init__(self, spec: dict[str, Any], rank: int) -> None:
        self.spec, self.rank, self.ranks = spec, rank, spec["ranks"]
        self.statistics = Path("/sys/class/net", spec["interface"], "statistics")
        self.meshes: dict[tuple[int, int, int] | None, DeviceMesh] = {}
        self.parts: dict[tuple[int, int, str], dict[str, Tensor]] = {}

    def attention(self, order: dict[str, Any]) -> dict[str, Any]:
        """One forward and backward pass, measured."""
        step, _ = self.layer(order["case"])
        return self.measured(step)

    def check(self, order: dict[str, Any]) -> dict[str, Any]:
        """The largest relative error of the pass's results."""
        step, own = self.layer(order["case"])
        return {"error": max(error(x, own[name]) for name, x in step().items())}

    def layer(self, number: int) -> tuple[Callable[[], dict[str, Tensor]], dict[str, Tensor]]:
        """A case's forward and backward pass, and this rank's tokens of what it needs and should return."""
        case = self.spec["cases"][number]
        plan = SequencePlan(case["kind"], tuple(case["grid"]), case["overlap"])
        own = self.tokens(case["heads"], case["kv_heads"], plan.layout)
        inputs = [own[name].requires_grad_() for name in ("q", "k", "v")]
        key = SequenceAxis(self.mesh(plan.grid), plan).key
        length, scale = inputs[0].shape[2] * self.ranks, inputs[0].shape[3] ** -0.5

        def step() -> dict[str, Tensor]:
            o = sequence_attention(*inputs, key, mask=MaskSpec("causal"), scale=scale, length=length)
            gradients = torch.autograd.grad(o, inputs, own["do"])
            return dict(zip(RESULTS, [o.detach(), *gradients], strict=True))

        return step, own

    def tokens(self, heads: int, kv_heads: int, layout: str) -> dict[str, Tensor]:
        """This rank's tokens of every tensor."""
        key = heads, kv_heads, layout
        if key not in self.parts:
            whole = load_file(Path(self.spec["directory"], f"{heads}-{kv_heads}.safetensors"))
            self.parts[key] = {n: take_tokens(x, 2, layout, self.rank, self.ranks) for n, x in whole.items()}
        return self.parts[key]

    def exchange(self, order: dict[str, Any]) -> dict[str, Any]:
        """The exchange of heads before Ulysses: q, k, v in one all-to-all, or in three (started at once, or in
        turn)."""
        x = torch.randn(1, order["heads"] // self.ranks, order["tokens"], order["head_dim"])
        group = self.mesh(None).get_group()

        def start(*tensors: Tensor) -> Transfer:
            return all_to_all_start([tensors] * self.ranks, group, "heads")

        def once() -> None:
            if order["way"] == "one":
                start(x, x, x).wait()
            elif order["way"] == "at once":
                for transfer in [start(x), start(x), start(x)]:
                    transfer.wait()
            else:
                for _ in range(3):
                    start(x).wait()

        def step() -> None:
            for _ in range(order["times"]):
                once()

        return self.measured(step)

    def mesh(self, grid: tuple[int, int, int] | None) -> DeviceMesh:
        """Of a grid, or of one dimension."""
        if grid not in self.meshes:
            self.meshes[grid] = init_device_mesh("cpu", (self.ranks,)) if grid is None else sequence_mesh("cpu", grid)
        return self.meshes[grid]

    def measured(self, step: Callable[[], Any]) -> dict[str, Any]:
        """When it began and ended (of a clock that all ranks of this machine share), the bytes counted at the
        collectives, and those that passed the interface, the barriers' included."""
        dist.barrier()
        before = self.passed()
        dist.barrier()
        with record_events() as events:
            begin = time.perf_counter()
            step()
            end = time.perf_counter()
        dist.barrier()
        after = self.passed()
        wire = [event for event in events if event.kind == "wire"]
        return {
            "begin": begin,
            "end": end,
            "counted": {way: sum(getattr(event, way) for event in wire) for way in DIRECTIONS},
            "interface": {way: after[way] - before[way] for way in DIRECTIONS},
        }

    def passed(self) -> dict[str, int]:
        files = {"sent": "tx_bytes", "received": "rx_bytes"}
        return {way: int((self.statistics / file).read_text()) for way, file in files.items()}


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


if __name__ == "__main__":
    main()
