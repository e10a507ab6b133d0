"""MLPs whose projections are a layer's own children are found and split."""

from __future__ import annotations

import operator

import torch
from torch import fx

from rewriter.ir import Body, Leaf
from rewriter.ir.marks import mark
from rewriter.passes.placement.projections import chains


def linear(inputs: int, outputs: int) -> Leaf:
    return Leaf("Linear", {}, {"weight": (outputs, inputs), "bias": (outputs,)})


def activation() -> Body:
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(torch.ops.aten.relu.default, (x,))
    out.meta["val"] = torch.empty(1, 1, 6)
    graph.output(out)
    return Body("ReLU", graph, {}, {}, {})


def wiring(build):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    for node in graph.nodes:
        mark(node, layer=0)
    return graph


MODULES = {"norm": Body("Norm", fx.Graph(), {"weight": (4,)}, {}, {}), "act": activation()} | {
    "fc1": linear(4, 6),
    "gate": linear(4, 6),
    "fc2": linear(6, 4),
}


def found(build):
    return [([e.target for e in c.entries], c.exit.target) for c in chains(wiring(build), MODULES)]


def test_two_projections_with_an_activation_are_a_chain():
    assert found(lambda g, x: g.call_module("fc2", (g.call_module("act", (g.call_module("fc1", (x,)),)),))) == [
        (["fc1"], "fc2")
    ]


def test_a_gated_chain_has_two_entries():
    def gated(g, x):
        up = g.call_module("fc1", (x,))
        return g.call_module(
            "fc2", (g.call_function(operator.mul, (up, g.call_module("act", (g.call_module("gate", (x,)),)))),)
        )

    assert [(set(entries), exit) for entries, exit in found(gated)] == [({"fc1", "gate"}, "fc2")]


def test_a_norm_between_the_projections_is_no_chain():
    assert found(lambda g, x: g.call_module("fc2", (g.call_module("norm", (g.call_module("fc1", (x,)),)),))) == []


def test_a_value_that_is_used_elsewhere_is_no_chain():
    def leaking(g, x):
        inner = g.call_module("fc1", (x,))
        return g.call_function(operator.add, (g.call_module("fc2", (inner,)), inner))

    assert found(leaking) == []
