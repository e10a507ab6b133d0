"""Section decode-step of `run.py`: the step that is captured in a CUDA graph beside the same step run eagerly.

The tiny model that ships; prompts of one length and of two (padding at the left), greedy and drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.report import Row, Scale, short
from benchmarks.gpu.runtime import models
from rewriter.runtime.collectives.log import record_events
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling
from rewriter.runtime.generation.generate import left_pad

PROMPTS = {"one prompt": (17,), "three prompts": (3, 17, 9)}  # tokens of each
SEED = 5


def steps(scale: Scale) -> None:
    count = scale.pick(64, 4)
    table = scale.table(
        f"A decode step in a CUDA graph: {count} tokens of the tiny model, beside the same step run eagerly",
        ("prompts × tokens", "how", "that differ", "result"),
    )
    for dtype in (torch.float32, torch.bfloat16):
        _, model = models(scale, dtype)
        for name, lengths in PROMPTS.items():
            for sampling in (Sampling(), Sampling(temperature=1.0)):
                what = f"{name} × {count}, {short(dtype)}, {'greedy' if sampling.greedy else 'drawn'}"
                table.attempt(what, functools.partial(step_row, scale, model, lengths, sampling, count))
        waits = functools.partial(waits_row, scale, model, count)
        table.attempt(f"one prompt × 8, {short(dtype)}, the host waits for nothing", waits)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(200, (length,), generator=random).tolist() for length in lengths]


def begin(scale: Scale, step: DecodeStep, lengths: tuple[int, ...], sampling: Sampling) -> None:
    ids, first_valid = left_pad(prompts(lengths), 0)
    first_valid = None if first_valid is None else first_valid.to(scale.device)
    step.begin(ids.shape[1], first_valid, sampling, SEED, (), 0)
    step.prefill(ids.to(scale.device))


def generated(step: DecodeStep, count: int) -> Any:
    """Tokens by row, of which each but the first comes from a step; a NaN among the logits raises."""
    for _ in range(count - 1):
        step.run()
    step.take()
    if step.broken.any():
        raise ValueError("logits are NaN")
    return step.produced[:count].T.tolist()


def eagerly(step: DecodeStep) -> DecodeStep:
    """`step`, which stays eager: while events are recorded none is captured, and it is prepared once."""
    with record_events():
        step.run()
    return step


def step_row(scale: Scale, model: nn.Module, lengths: tuple[int, ...], sampling: Sampling, count: int) -> Row:
    batch, capacity = len(lengths), max(lengths) + count + 1
    eager, captured = (DecodeStep(model, batch, capacity) for _ in range(2))
    begin(scale, eager, lengths, sampling)
    eagerly(eager)
    found = []
    for step in (eager, captured, captured):  # its second generation replays the graph of the first
        begin(scale, step, lengths, sampling)
        found.append(generated(step, count))
    expected = found[0]
    differ = sum(int((torch.tensor(other) != torch.tensor(expected)).sum()) for other in found[1:])
    wrong = [f"{differ} tokens differ"] if differ else []
    if captured.how != (how := "captured" if scale.cuda else "eager"):
        wrong.append(f"{captured.how}, expected {how}")
    if len({tuple(row) for row in expected}) == 1 and len(expected) > 1:
        wrong.append("all prompts are continued alike")
    return (captured.how, differ), ", ".join(wrong)


def waits_row(scale: Scale, model: nn.Module, count: int) -> Row:
    """Eager steps in which whatever makes the host wait for the GPU is an error of torch's."""
    step = DecodeStep(model, 1, 32 + count)
    begin(scale, step, (17,), Sampling())
    eagerly(step)
    with no_waits(scale):
        for _ in range(scale.pick(8, 1)):
            step.run()
    return (step.how, "–"), ""


@contextmanager
def no_waits(scale: Scale) -> Iterator[None]:
    if not scale.cuda:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
