"""In a ladder's backward, each block's input-gradient reduction is on its way while the other block computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from ranks import run_ranks

from rewriter.runtime import Context, mark, record_events
from rewriter.runtime import load as load_rank
from rewriter.runtime.collectives.gradients import copy_to_group
from rewriter.training import shard_parameters


def tell(name: str, block: Any, args: Any, output: torch.Tensor) -> None:
    """Mark the moment at which backward enters a block."""
    output.register_hook(lambda gradient: mark(name))


def backward_of(group: Any, directory: Path) -> list[tuple[str, str]]:
    """What backward does, in order: starts and waits of gradients' sums, and where it enters a block."""
    model = load_rank(directory, dtype=torch.float32)
    for index, layer in enumerate(model.model.layers):
        for name in ("self_attn", "mlp"):
            block = getattr(layer, name)
            # the output of a block, before it is reduced: backward comes to it first
            block.register_forward_hook(functools.partial(tell, f"{name} {index}"))
    ids = torch.arange(16).reshape(2, 8)
    loss = model(ids, ctx=Context()).float().logsumexp(-1).sum()
    with record_events() as events:
        loss.backward()
    kinds = {"gradient start": "start", "gradient wait": "wait", "mark": "block"}
    return [(kinds[e.kind], e.name) for e in events if e.kind in kinds]


def overlapped(events: list[tuple[str, str]]) -> list[str]:
    """The blocks whose backward begins while the sum of another's gradient is on its way."""
    found, pending = [], 0
    for kind, name in events:
        pending += {"start": 1, "wait": -1}.get(kind, 0)
        if kind == "block" and pending:
            found.append(name)
    assert pending == 0
    return found


@pytest.mark.parametrize(
    ("recipe", "expected"), [("ladder", 7), pytest.param("tensor-parallel", 0, marks=pytest.mark.slow)]
)
def test_the_sum_of_a_gradient_is_hidden_by_the_other_block(recipe: str, expected: int) -> None:
    """Of a ladder's eight blocks all but the first that backward comes to; of the standard wiring's none."""
    events = run_ranks(backward_of, 2, adapted.directory(recipe, 2))
    assert events[0] == events[1], "ranks start their sums in one order"
    assert len(overlapped(events[0])) >= expected if expected else overlapped(events[0]) == []
    blocks = [name for kind, name in events[0] if kind == "block"]
    assert len(blocks) == 8


def sums(group: Any, anomaly: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a replicated value that enters twice, and of a parameter, after two backward passes."""
    x = torch.arange(4.0).requires_grad_()
    weight = torch.ones(4, requires_grad=True)
    with torch.autograd.set_detect_anomaly(anomaly):
        for _ in range(2):
            y = x * 2
            rank = group.rank() + 1
            total = (copy_to_group(y, group) * rank).sum() + (
                copy_to_group(y, group) * copy_to_group(weight, group) * 10 * rank
            ).sum()
            total.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


@pytest.mark.parametrize("anomaly", [False, True])
def test_entering_sums_gradients_over_ranks(anomaly: bool) -> None:
    for x, weight in run_ranks(sums, 2, anomaly):
        assert torch.equal(x, torch.full((4,), 2 * (1 + 2 + 10 + 20) * 2.0))
        assert torch.equal(weight, 2 * 2 * torch.arange(4.0) * 30)


def sharded(group: Any, directory: Path) -> dict[str, float]:
    """By parameter, by how much FSDP2's gradients differ from those of whole parameters, relative to the largest."""
    found = []
    for shards in (False, True):
        model = load_rank(directory, dp=2, dtype=torch.float32)
        if shards:
            shard_parameters(model)
        ids = torch.arange(16).reshape(2, 8) + group.rank() // 2
        model(ids, ctx=Context()).float().logsumexp(-1).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    whole, parts = found
    return {n: float((parts[n].full_tensor() - g).abs().max() / g.abs().max()) for n, g in whole.items()}


@pytest.mark.parametrize("family", [pytest.param("olmo2", marks=pytest.mark.slow), "mixtral"])
def test_sharded_parameters_have_the_gradients_of_whole_ones(family: str) -> None:
    """Of a ladder whose norms follow a sum that the next layer waits for, and of sums that are views."""
    for errors in run_ranks(sharded, 4, adapted.directory("ladder", 2, family)):
        assert max(errors.values()) <= 1e-5, errors
