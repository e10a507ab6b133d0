"""The part of a model that keys and values need: all that no cache needs is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from rewriter.ir import Body, Module, Program, args_of, copy_graph, nodes_inside, ops, placeholders

STORE_KEYS = "store_keys"  # the method of a body that stores its keys and values, and computes nothing else


def keys_alone(program: Program) -> tuple[Program, dict[int, Body]]:
    """(`program` as far as caches need it, what it calls of bodies whose result nobody needs, by the id of the body).

    Such a body is called at its path and STORE_KEYS. The wiring returns nothing.
    """
    graph, _ = copy_graph(program.graph)
    made: dict[int, tuple[Body, list[int]]] = {}
    modules = _cut(graph, program.modules, made)
    return program.with_(graph=graph, modules={**program.modules, **modules}), {k: v[0] for k, v in made.items()}


def _cut(graph: fx.Graph, modules: Any, made: dict[int, tuple[Body, list[int]]]) -> dict[str, Module]:
    """Leave of `graph` what stores keys and values, and what that needs; returns the modules that it calls anew."""
    called: dict[str, Module] = {}
    graph.erase_node(graph.output_node())
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "placeholder":
            continue
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.target is ops.attention and not node.kwargs.get("stored"):  # a reader's keys are there already
            _, k, v, ctx = args_of(node)[:4]
            node.target, node.args, node.kwargs = ops.store_keys, (k, v, ctx), {"slot": node.kwargs["slot"]}
        elif node.target in ops.CACHED:
            continue  # its state is what it has seen
        elif isinstance(module, Body) and _stores(module):
            if id(module) not in made:
                made[id(module)] = _body(module, made)
            part, kept = made[id(module)]
            node.target = f"{node.target}.{STORE_KEYS}"
            node.args = tuple(node.args[i] for i in kept)
            called[node.target] = part
        else:
            graph.erase_node(node)
    graph.output(())
    return called


def _body(body: Body, made: dict[int, tuple[Body, list[int]]]) -> tuple[Body, list[int]]:
    """(`body` as far as its caches need it, the inputs that it still has)."""
    graph, _ = copy_graph(body.graph)
    modules = _cut(graph, body.modules, made)
    kept = []
    for index, node in enumerate(placeholders(graph)):
        if node.users:
            kept.append(index)
        else:
            graph.erase_node(node)
    return replace(body, graph=graph, modules={**body.modules, **modules}, outputs=0), kept


def _stores(module: Module) -> bool:
    return any(node.target in ops.CACHED and not node.kwargs.get("stored") for _, node in nodes_inside(module))
