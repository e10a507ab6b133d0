"""Which wiring values a gradient flows through: everything downstream of a parameter by value."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from rewriter.analysis.placement_state import differentiable
from rewriter.ir import Body, Module, Program, args_of, parameters_of


def with_constant_inputs(program: Program) -> dict[str, Module]:
    """The modules of `program`, each body with the names of its inputs that need no gradient. Alike bodies stay
    shared."""
    flows: dict[fx.Node, bool] = {}
    done: dict[tuple[int, frozenset[str]], Module] = {}
    modules = dict(program.modules)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            flows[node] = False
        elif node.op == "call_module":
            module = program.modules[str(node.target)]
            if not isinstance(module, Body):
                flows[node] = True
                continue
            inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
            constant = frozenset(p.name for p, source in zip(inputs, node.args, strict=True) if not flows[source])
            key = (id(module), constant)
            if key not in done:
                done[key] = replace(module, constant_inputs=constant)
            modules[str(node.target)] = done[key]
            flows[node] = _output_flows(done[key])
        else:
            flows[node] = any(flows[n] for n in node.all_input_nodes)
    return modules


def _output_flows(body: Module) -> bool:
    assert isinstance(body, Body)
    if next(parameters_of(body), None):
        return True
    result = args_of(body.graph.output_node())[0]
    outputs = [result] if isinstance(result, fx.Node) else list(result)
    return any(isinstance(n, fx.Node) and differentiable(n, body) for n in outputs)
