"""MLPs whose projections are a layer's own children are found and split."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from rewriter.ir import Body, Leaf
from rewriter.ir.marks import mark
from rewriter.passes.placement.projections import chains


def linear(inputs: int, outputs: int) -> Leaf:
    return Leaf("Linear", {}, {"weight": (outputs, inputs), "bias": (outputs,)})


def activation() -> Body:
    graph = fx.Graph()
    out = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    out.meta["val"] = torch.empty(1, 1, 6)
    graph.output(out)
    return Body("ReLU", graph, {}, {}, {})


NORM = Body("Norm", fx.Graph(), {"weight": (4,)}, {}, {})
MODULES = {"norm": NORM, "act": activation(), "fc1": linear(4, 6), "gate": linear(4, 6), "fc2": linear(6, 4)}


def called(graph: fx.Graph, x: fx.Node, *names: str) -> fx.Node:
    for name in names:
        x = graph.call_module(name, (x,))
    return x


def gated(g: fx.Graph, x: fx.Node) -> fx.Node:
    return called(g, g.call_function(operator.mul, (called(g, x, "fc1"), called(g, x, "gate", "act"))), "fc2")


def leaking(g: fx.Graph, x: fx.Node) -> fx.Node:
    inner = called(g, x, "fc1")
    return g.call_function(operator.add, (called(g, inner, "fc2"), inner))


@pytest.mark.parametrize(
    ("build", "entries"),
    [
        (lambda g, x: called(g, x, "fc1", "act", "fc2"), {"fc1"}),
        (gated, {"fc1", "gate"}),
        (lambda g, x: called(g, x, "fc1", "norm", "fc2"), None),
        (leaking, None),
    ],
    ids=["an activation between", "gated", "a norm between", "a value that is used elsewhere"],
)
def test_projections_with_channels_of_their_own_between_them_are_a_chain(build, entries):
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    for node in graph.nodes:
        mark(node, layer=0)
    found = [({e.target for e in c.entries}, c.exit.target) for c in chains(graph, MODULES)]
    assert found == ([] if entries is None else [(entries, "fc2")])
