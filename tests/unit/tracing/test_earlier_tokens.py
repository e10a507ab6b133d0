"""Zeros in front of a model's tokens: which forms are known, and that others are not taken for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from rewriter.ir import Body, ops
from rewriter.ir.states import state_of
from rewriter.tracing.export import BodyTracer, Example
from rewriter.tracing.interception import Recorded
from rewriter.tracing.meta_model import TRACE_DTYPE
from rewriter.tracing.token_mixing import mixing_operator

WIDTH, HEADS = 8, 2


class Mixer(nn.Module):
    """`of` computes on what convolutions, and a projection with a bias, give it."""

    def __init__(self, of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.of = of
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)
        self.by_head = nn.Conv1d(WIDTH, WIDTH, 3, groups=HEADS)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) + self.of(self, x)


def convolved(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.by_head(m.depthwise(F.pad(x.transpose(1, 2), (3, 0)))).transpose(1, 2)


def delayed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """By two tokens, behind a bias."""
    return torch.cat([m.project(x.new_zeros(x.shape[0], 2, WIDTH)), m.project(x)[:, :-2]], 1)


def shifted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x - torch.cat([x.new_zeros(x.shape[0], 1, WIDTH), x[:, :-1]], 1)


def joined(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.depthwise(torch.cat([x.new_zeros(x.shape[0], WIDTH, 1), x.transpose(1, 2)], 2)).transpose(1, 2)


def two_windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    behind = F.pad(x.transpose(1, 2), (2, 0))
    return (m.depthwise(behind)[:, :, 1:] * behind[:, :, :-2]).transpose(1, 2)


def from_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.depthwise(F.pad(x.transpose(1, 2), (0, 1))).transpose(1, 2)


def around(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.by_head(F.pad(x.transpose(1, 2), (1, 1))).transpose(1, 2)


def behind_ones(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_ones(x.shape[0], 1, WIDTH), x[:, :-1]], 1)


def padded_with_ones(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.depthwise(F.pad(x.transpose(1, 2), (1, 0), value=1.0)).transpose(1, 2)


def centred(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.same(F.pad(x.transpose(1, 2), (2, 0)))[:, :, 2:].transpose(1, 2)


def last_one(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, -1:] * x


def traced(of: Callable[[Any, torch.Tensor], torch.Tensor]) -> Body:
    example = Example()
    x = torch.empty(example.batch, example.length, WIDTH, dtype=TRACE_DTYPE, device="meta")
    module = Mixer(of).to("meta", TRACE_DTYPE).eval()
    body = BodyTracer({}, {}, example).trace("mixer", module, Recorded((x,), {}, x))
    assert isinstance(body, Body)
    return body


def run(body: Body, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> Any:
    """A body node by node, without the simulator."""
    env: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        args: Any = fx.map_arg(node.args, env.__getitem__)
        if node.op == "placeholder":
            env[node] = x if node.target == "x" else None
        elif node.op == "get_attr":
            env[node] = weights[str(node.target)]
        elif node.op == "call_module":
            env[node] = F.linear(args[0], weights[f"{node.target}.weight"], weights[f"{node.target}.bias"])
        elif node.op == "call_function":
            env[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
    [result] = body.graph.output_node().all_input_nodes
    return env[result]


@pytest.mark.parametrize(
    ("of", "counts"), [(convolved, [3]), (delayed, [2]), (shifted, [1]), (joined, [1]), (two_windows, [2])]
)
def test_zeros_in_front_of_tokens_are_what_came_before(of: Any, counts: list[int]) -> None:
    body = traced(of)
    calls = [n for n in body.graph.nodes if n.target is ops.preceded]
    assert [n.kwargs["count"] for n in calls] == counts
    assert [n.kwargs["slot"] for n in calls] == [0]
    assert [state_of(n).shape for n in calls] == [(WIDTH, counts[0])]
    assert not state_of(calls[0]).fp32
    assert mixing_operator(body) is None
    module, x = Mixer(of), torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(run(body, x, dict(module.named_parameters())), module(x))


@pytest.mark.parametrize(
    "of", [from_later, around, behind_ones, padded_with_ones, centred, last_one], ids=lambda of: of.__name__
)
def test_what_reads_later_tokens_or_no_zeros_is_not_taken_for_it(of: Any) -> None:
    assert mixing_operator(traced(of)) is not None
