"""Which wiring values a gradient flows through: everything downstream of a parameter by value."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from rewriter.analysis.placement_state import differentiable
from rewriter.ir import Body, Module, Program, parameters_of, placeholders


def with_constant_inputs(program: Program) -> dict[str, Module]:
    """The modules of `program`, where bodies name the inputs that need no gradient. Alike bodies stay shared."""
    flows: dict[fx.Node, bool] = {}
    done: dict[tuple[int, frozenset[str]], Body] = {}
    modules = dict(program.modules)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            flows[node] = False
        elif node.op == "call_module":
            module = program.modules[str(node.target)]
            if not isinstance(module, Body):
                flows[node] = True
                continue
            inputs = zip(placeholders(module.graph), node.args, strict=True)
            constant = frozenset(p.name for p, source in inputs if not flows[source])
            key = (id(module), constant)
            if key not in done:
                done[key] = replace(module, constant_inputs=constant)
            modules[str(node.target)] = done[key]
            flows[node] = _output_flows(done[key])
        else:
            flows[node] = any(flows[n] for n in node.all_input_nodes)
    return modules


def _output_flows(body: Body) -> bool:
    outputs = body.graph.output_node().all_input_nodes
    return next(parameters_of(body), None) is not None or any(differentiable(n, body) for n in outputs)
