"""Section serving of `run.py`: the operators of the vLLM plugin that begin and end sums, in a stream of their own,
captured, or compiled; beside sums that are waited for. Ranks are emulated: a sum takes a given time and is a multiple.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.report import CYCLES_PER_SECOND, Row, Scale, Table
from rewriter.runtime.serving.vllm import engine, sums

BLOCKS = 32
RANKS = 2
SUM_MICROSECONDS = 20.0


class EmulatedRanks:
    """Ranks that all hold the same parts. A sum keeps its stream, or its thread, for about so many `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ranks(self) -> int:
        return RANKS

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * RANKS

    def all_reduce_now(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(int(self.seconds * CYCLES_PER_SECOND))
        else:
            time.sleep(self.seconds)
        return x.mul_(RANKS)

    def begin(self, x: Tensor) -> None:
        return None

    def in_pieces(self) -> bool:
        return False


def serving(scale: Scale) -> Table:
    rows, width = scale.pick((16, 4096), (2, 64))
    torch.manual_seed(0)
    weight = (torch.randn(width, width, device=scale.device) / width**0.5).bfloat16()
    x = torch.randn(rows, width, device=scale.device).bfloat16()
    engine.use(EmulatedRanks(SUM_MICROSECONDS * 1e-6))
    table = scale.table(
        f"{BLOCKS} blocks, bf16 [{rows}, {width}] @ [{width}, {width}], their sums taking {SUM_MICROSECONDS:.0f} µs",
        ("how", "sums", "µs", "of waiting", "result"),
    )
    ways: dict[str, Callable[[Callable[[], Tensor]], Callable[[], Tensor]]] = {
        "eager": lambda run: run,
        "captured": lambda run: replayed(scale, run),
        "compiled and captured": lambda run: replayed(scale, torch.compile(run, fullgraph=True, dynamic=False)),
    }
    for how, made in ways.items():
        waited: list[float] = []
        for name, model in (("waited for", in_turn), ("overlapped with the next block", overlapped)):
            row = functools.partial(sum_row, scale, made, functools.partial(model, x, weight), waited)
            table.attempt(how, functools.partial(with_name, name, row))
    return table


def with_name(name: str, row: Callable[[], Row]) -> Row:
    cells, wrong = row()
    return (name, *cells), wrong


def sum_row(
    scale: Scale,
    made: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
    model: Callable[[], Tensor],
    waited: list[float],
) -> Row:
    """The time of a pass beside that where sums are `waited` for; wrong where a replay gives another result."""
    expected = model()
    run = made(model)
    for _ in range(3):
        found = run()
    off = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    seconds = scale.seconds(run)
    waited.append(seconds)
    return (f"{seconds * 1e6:.0f}", f"{seconds / waited[0]:.0%}"), "" if off < 0.05 else f"{off:.1%} off"


def in_turn(x: Tensor, weight: Tensor) -> Tensor:
    """Every block reads what all before it have added."""
    stream = x
    for _ in range(BLOCKS):
        token, stream = sums.begin(block(stream, weight), stream)
        stream = stream + sums.finish(token, stream)
    return stream


def overlapped(x: Tensor, weight: Tensor) -> Tensor:
    """Every block but the first reads the stream one block late."""
    token, stream = sums.begin(block(x, weight), x)
    for _ in range(BLOCKS - 1):
        last, token = sums.step(block(stream, weight), token)
        stream = stream + last
    return stream + sums.finish(token, stream)


def block(stream: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.rms_norm(stream, stream.shape[-1:]) @ weight)


def replayed(scale: Scale, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run` as a CUDA graph, which leaves its result where it is captured."""
    results: list[Tensor] = []
    replay = scale.graph(lambda: results.append(run()))

    def again() -> Tensor:
        replay()
        return results[-1]

    return again
