"""How much memory distributed attention needs on a rank, for plans on the same ranks and tokens.

    python -m benchmarks.attention.memory [--ranks 4] [--tokens 16384] [--heads 16 16] [--head-dim 64] [--json]

Real ranks (gloo, loopback), bf16, causal, one layer, forward and backward through the functions that users call. Three
figures, each of the rank that needs most:

    saved       what autograd keeps from forward to backward: q, k, v, o and lse of as many tokens as a rank holds
    forward     the most that is allocated at one time during forward, beside its arguments
    backward    the same during backward, beside what was saved and the gradient that comes in

They are PyTorch's allocations on the rank's own thread, as the profiler's trace lists them: tensors, messages, and what
kernels allocate. What gloo allocates on its threads is not among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.local_ranks import largest
from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.runtime import sequence_mesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention


@dataclass(frozen=True)
class Shape:
    """One attention on all ranks; D is the size of all heads."""

    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; see above."""

    saved: int
    forward: int
    backward: int


def plans(ranks: int, query_heads: int) -> list[SequencePlan]:
    """A ring, each grid of the ranks with and without overlap, and Ulysses where heads divide."""
    grids = [(1, rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
    found = [SequencePlan("ring", (1, ranks, 1))]
    found += [SequencePlan("attention2d", grid, overlap) for grid in grids for overlap in (False, True)]
    if query_heads % ranks == 0:
        found.append(SequencePlan("ulysses", (ranks, 1, 1)))
    return found


def measure(plan: SequencePlan, shape: Shape) -> Memory:
    """On every rank of a process group of `plan.ranks`: what this one needs."""
    key = SequenceAxis(sequence_mesh("cpu", plan.grid), plan).key
    tokens = -(-shape.tokens // plan.multiple) * plan.multiple // plan.ranks
    q, k, v = (
        torch.randn(1, heads, tokens, shape.head_dim).to(shape.dtype).requires_grad_()
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    saved: dict[int, int] = {}  # by address: a tensor that is saved twice is there once

    def keep(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.nbytes
        return x

    def attend() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            return sequence_attention(
                q, k, v, key, mask=MaskSpec("causal"), scale=shape.head_dim**-0.5, length=shape.tokens
            )

    torch.autograd.grad(attend().sum(), (q, k, v))  # what is allocated once, such as gloo's connections
    saved.clear()
    with peak() as forward:
        o = attend()
    do = torch.randn_like(o)
    with peak() as backward:
        torch.autograd.grad(o, (q, k, v), do)
    return Memory(sum(saved.values()), forward(), backward())


@contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """The most bytes allocated at one time by PyTorch on this thread's behalf within the block, for after it."""
    found: list[int] = []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says on stderr that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: found[0]
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    allocated = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    total, most = 0, 0
    for _, size in sorted(allocated, key=lambda event: event[0]):
        total += size
        most = max(most, total)
    found.append(most)


def figures(ranks: int, shape: Shape) -> list[dict[str, int]]:
    """Of every plan, on this rank."""
    return [dataclasses.asdict(measure(plan, shape)) for plan in plans(ranks, shape.query_heads)]


def on_ranks(ranks: int, shape: Shape) -> dict[SequencePlan, Memory]:
    """Every plan on real ranks: for each figure that of the rank that needs most."""
    found = [Memory(**row) for row in largest(ranks, figures, ranks, shape)]
    return dict(zip(plans(ranks, shape.query_heads), found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 16), metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shape = Shape(given.tokens, *given.heads, given.head_dim)
    found = on_ranks(given.ranks, shape)
    if given.json:
        rows: list[dict[str, Any]] = [
            {"plan": str(plan), **dataclasses.asdict(memory)} for plan, memory in found.items()
        ]
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{given.ranks} ranks, {given.tokens} tokens, {given.heads[0]}:{given.heads[1]} heads of {given.head_dim}, bf16"
    )
    print(f"{'plan':32}{'saved':>12}{'forward':>12}{'backward':>12}   MB on the rank that needs most")
    for plan, memory in found.items():
        print(f"{plan!s:32}" + "".join(f"{size / 1e6:12.2f}" for size in dataclasses.astuple(memory)))


if __name__ == "__main__":
    main()
