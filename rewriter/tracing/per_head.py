"""A list of small modules, each for its own piece of a value (one norm per head), as one module over all pieces.

The calls `cat([norms[i](piece) for i, piece in enumerate(split(x, 1))])` become one of the list itself, whose body
computes with the stacked parameters: no more than one node of a graph, and ranks can split it by heads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rewriter.ir import Body, Leaf, Module, args_of, drop_dead_nodes
from rewriter.ir.op_semantics import argument, aten, is_pointwise, is_sum, kind_of
from rewriter.tracing.functionalize import computed


def join_pieces(graph: fx.Graph, children: MutableMapping[str, Module]) -> None:
    """Replace such calls in `graph` in place, and the modules in `children`. What does not fit stays as it is."""
    for cat in [n for n in graph.nodes if n.target is aten.cat.default]:
        calls = args_of(cat)[0]
        value, dim = cat.meta["val"], argument(cat, "dim") % cat.meta["val"].dim()
        name = str(getattr(calls[0], "target", "")).rpartition(".")[0] if isinstance(calls[0], fx.Node) else ""
        source = _split(calls, dim)
        if not name or source is None or [n.target for n in calls] != [f"{name}.{i}" for i in range(len(calls))]:
            continue
        first = _as_body(children[f"{name}.0"])
        alike = all(_is_alike(children[f"{name}.{i}"], children[f"{name}.0"]) for i in range(len(calls)))
        if first is None or not alike or dim > value.dim() - 2 or not _fits(first):
            continue
        with graph.inserting_before(cat):
            joined = graph.call_module(name, (source,))
        joined.meta = dict(cat.meta)
        cat.replace_all_uses_with(joined)
        children[name] = _stacked(first, len(calls), source.meta["val"], dim)
        for i in range(len(calls)):
            del children[f"{name}.{i}"]
        drop_dead_nodes(graph)


def _split(calls: Any, dim: int) -> fx.Node | None:
    """The value whose pieces of size 1 along `dim`, all and in order, are what `calls` are given."""
    pieces = [args_of(n)[0] for n in calls if n.op == "call_module" and len(n.args) == 1 and len(n.users) == 1]
    if len(pieces) != len(calls) or len(pieces) < 2 or any(p.target is not operator.getitem for p in pieces):
        return None
    split = args_of(pieces[0])[0]
    source = args_of(split)[0]
    ordered = [args_of(p) for p in pieces] == [(split, i) for i in range(len(pieces))]
    if split.target is not aten.split.Tensor or not ordered or any(len(p.users) > 1 for p in pieces):
        return None
    along = argument(split, "dim") % source.meta["val"].dim()
    return source if along == dim and args_of(split)[1] == 1 and source.meta["val"].shape[dim] == len(pieces) else None


def _as_body(module: Module) -> Body | None:
    """The inside of a child, if it is known."""
    if isinstance(module, Body):
        return module
    if not isinstance(module, Leaf) or module.kind != "LayerNorm":
        return None
    graph = fx.Graph()
    x, weight, bias = graph.placeholder("input"), graph.get_attr("weight"), graph.get_attr("bias")
    sizes = [module.options["normalized_shape"]]
    graph.output(graph.call_function(aten.layer_norm.default, (x, sizes, weight, bias, module.options["eps"])))
    return Body("LayerNorm", graph, module.parameters, {}, {})


def _is_alike(one: Module, other: Module) -> bool:
    if isinstance(one, Body) and isinstance(other, Body):
        return str(one.graph) == str(other.graph) and replace(one, graph=other.graph) == other
    return one == other


def _fits(body: Body) -> bool:
    """True where a body works along the last dimension, with parameters along it, and can do so for several at once."""
    if body.buffers or body.modules or body.stored or body.outputs != 1 or body.kept != (0,):
        return False
    vectors = all(len(shape) == 1 for shape in body.parameters.values())
    return vectors and all(n.op != "call_function" or _is_along_last(n) for n in body.graph.nodes)


def _is_along_last(node: fx.Node) -> bool:
    if kind_of(node) == "normalization":
        return node.target is aten.layer_norm.default and len(args_of(node)[1]) == 1
    return is_pointwise(node) or (is_sum(node) and argument(node, "dim") == [-1] and bool(argument(node, "keepdim")))


def _stacked(body: Body, count: int, value: Any, dim: int) -> Body:
    """`body` for all pieces of a value: its parameters are `count` ones, called `0.weight` and so on."""
    graph, env = fx.Graph(), {}
    between = [1] * (value.dim() - dim - 2)

    made = functools.partial(computed, graph)

    def parameter(name: str) -> fx.Node:
        """All of them: [count, 1, …, size], to be applied to [..., count, …, size]."""
        own = [graph.get_attr(f"{i}.{name}") for i in range(count)]
        for node in own:
            with value.fake_mode:
                node.meta["val"] = torch.empty(body.parameters[name], dtype=value.dtype, device=value.device)
        return made(aten.reshape.default, made(aten.stack.default, own), [count, *between, *body.parameters[name]])

    for node in body.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(str(node.target))
            env[node].meta["val"] = value
        elif node.op == "get_attr":
            env[node] = parameter(str(node.target))
        elif node.op == "output":
            graph.output(env[args_of(node)[0]])
        elif kind_of(node) == "normalization":
            x, sizes, weight, bias, *rest = args_of(node)
            env[node] = made(node.target, env[x], sizes, None, None, *rest)
            if weight is not None:
                env[node] = made(aten.mul.Tensor, env[node], env[weight])
            if bias is not None:
                env[node] = made(aten.add.Tensor, env[node], env[bias])
        else:
            env[node] = made(node.target, *fx.map_arg(node.args, env.__getitem__), **node.kwargs)
    parameters: Mapping[str, tuple[int, ...]] = {
        f"{i}.{name}": shape for i in range(count) for name, shape in body.parameters.items()
    }
    return replace(body, class_name=f"{body.class_name}PerHead", graph=graph, parameters=parameters)
