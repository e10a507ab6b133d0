"""Bodies with fewer matrix products: projections of one value made one, and two bodies that read one value made one."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import fx

from rewriter.ir import Body, Leaf, Module, Parameter, args_of, bypass, copy_graph, ops, placeholders
from rewriter.ir.marks import mark
from rewriter.passes.placement.projections import is_entry, outputs_layout, resized
from rewriter.weights.expressions import Concat

aten = torch.ops.aten


@dataclass(frozen=True)
class Fusion:
    """Projections of a body that became one, by their paths in it; their outputs are `dim` of the weight."""

    name: str
    parts: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Fused:
    """A body after fusion, what was fused, and in words what was left apart."""

    body: Body
    fusions: tuple[Fusion, ...] = ()
    notes: tuple[str, ...] = ()


def fuse_entries(body: Body, parameters: Mapping[str, Parameter]) -> Fused:
    """`body` where the projections of one value are one projection and a split; also inside of its children.

    `parameters` are those of the body by their names in it.
    """
    graph, _ = copy_graph(body.graph)
    modules: dict[str, Module] = dict(body.modules)
    fusions: list[Fusion] = []
    notes: list[str] = []
    for calls in entry_groups(graph, modules):
        if reason := why_apart([_leaf(modules, c) for c in calls]):
            names = ", ".join(str(c.target) for c in calls)
            notes.append(f"{names} stay apart: {reason}")
            continue
        fusions.append(_fuse(graph, modules, calls, parameters))
    for path, child in body.modules.items():
        if isinstance(child, Body):
            inner = fuse_entries(child, below(parameters, path))
            modules[path] = inner.body
            fusions += [Fusion(f"{path}.{f.name}", tuple(f"{path}.{p}" for p in f.parts), f.dim) for f in inner.fusions]
            notes += [f"{path}: {note}" for note in inner.notes]
    if not fusions:
        return Fused(body, (), tuple(notes))
    return Fused(replace(body, graph=graph, modules=modules), tuple(fusions), tuple(notes))


def below(parameters: Mapping[str, Parameter], path: str) -> dict[str, Parameter]:
    """The parameters under `path`, by their names there."""
    return {name.removeprefix(f"{path}."): p for name, p in parameters.items() if name.startswith(f"{path}.")}


def entry_groups(graph: fx.Graph, modules: Mapping[str, Module]) -> Iterator[list[fx.Node]]:
    """Per value that several projections read: their calls, of each kind of projection, in order."""
    called = [str(n.target) for n in graph.nodes if n.op == "call_module"]
    groups: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and called.count(str(node.target)) == 1:
            module = modules[str(node.target)]
            if is_entry(module):
                groups.setdefault((args_of(node)[0], module.kind), []).append(node)
    yield from (calls for calls in groups.values() if len(calls) > 1)


def why_apart(leaves: Sequence[Leaf]) -> str | None:
    """Reason why projections of one value cannot be one; None when they can."""
    if len({leaf.kind for leaf in leaves}) > 1:
        return f"they are {' and '.join(sorted({leaf.kind for leaf in leaves}))}"
    if len({"bias" in leaf.parameters for leaf in leaves}) > 1:
        return "some have a bias and some have not"
    key, _ = outputs_layout(leaves[0])
    if len({str(sorted((k, v) for k, v in leaf.options.items() if k not in (key, "shared"))) for leaf in leaves}) > 1:
        return "their options differ"
    return None


def _leaf(modules: Mapping[str, Module], call: fx.Node) -> Leaf:
    leaf = modules[str(call.target)]
    assert isinstance(leaf, Leaf)
    return leaf


def _fuse(
    graph: fx.Graph, modules: dict[str, Module], calls: Sequence[fx.Node], parameters: Mapping[str, Parameter]
) -> Fusion:
    """Replace `calls` by one call and a split; the modules likewise."""
    paths = [str(c.target) for c in calls]
    leaves = [_leaf(modules, c) for c in calls]
    key, dim = outputs_layout(leaves[0])
    sizes = [leaf.options[key] for leaf in leaves]
    weight = concatenated({p: parameters[f"{p}.weight"] for p in paths}, dim)
    options = {k: v for k, v in leaves[0].options.items() if k != "shared"} | {key: sum(sizes)}
    if weight.shared:
        assert weight.full_shape is not None
        options["shared"] = (weight.full_shape[dim], weight.ranges)
    shapes = {"weight": weight.shape}
    if "bias" in leaves[0].parameters:
        shapes["bias"] = (sum(sizes),)
    name = fused_name(paths, [*modules, *(str(n.target) for n in graph.nodes if n.op == "get_attr")])
    modules[name] = Leaf(leaves[0].kind, options, shapes)
    values = [c.meta["val"] for c in calls]
    with graph.inserting_before(calls[0]):
        fused = graph.call_module(name, (args_of(calls[0])[0],))
        # not torch.cat: bodies that were traced apart know their sizes by other symbols
        fused.meta["val"] = values[0].new_empty((*values[0].shape[:-1], sum(int(v.shape[-1]) for v in values)))
        split = graph.call_function(aten.split_with_sizes.default, (fused, sizes, -1))
        split.meta["val"] = tuple(values)
        for index, call in enumerate(calls):
            piece = graph.call_function(operator.getitem, (split, index))
            piece.meta = dict(call.meta)
            mark(piece, role=str(call.target).rpartition(".")[2].removesuffix("_proj"))
            call.replace_all_uses_with(piece)
    for call in calls:
        graph.erase_node(call)
        del modules[str(call.target)]
    return Fusion(name, tuple(paths), dim)


def fused_name(paths: Sequence[str], taken: Sequence[str]) -> str:
    """q_proj, k_proj and v_proj as qkv_proj; gate_proj and up_proj as gate_up_proj; below their common parent."""
    parents = {path.rpartition(".")[0] for path in paths}
    parent = f"{parents.pop()}." if len(parents) == 1 and "" not in parents else ""
    names = [path.rpartition(".")[2] for path in paths]
    suffix = "_proj" if all(n.endswith("_proj") for n in names) else ""
    stems = [n.removesuffix(suffix) for n in names]
    base = stems[0]
    for before, stem in pairwise(stems):  # letters stand together: q, k, v, gate, up as qkv_gate_up
        base += stem if len(before) == len(stem) == 1 else f"_{stem}"
    name = base = f"{parent}{base}{suffix}"
    number = 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def concatenated(parts: Mapping[str, Parameter], dim: int) -> Parameter:
    """Parameters (by name) one after the other along `dim`, on each rank its parts of them."""
    values = list(parts.values())
    names = tuple(name for key, p in parts.items() for name in (p.parts or (key,)))
    sizes = [(p.full_shape or p.shape)[dim] for p in values]
    full = resized(values[0].full_shape or values[0].shape, dim, sum(sizes))
    expressions = [p.expression for p in values if p.expression is not None]
    expression = Concat(tuple(expressions), dim) if len(expressions) == len(values) else None
    if all(p.ranges is None for p in values):
        return Parameter(full, expression, dim=dim, parts=names)
    ranks = next(len(p.ranges) for p in values if p.ranges is not None)
    ranges = []
    for rank in range(ranks):
        held: list[tuple[int, int]] = []
        for p, size, offset in zip(values, sizes, accumulate(sizes, initial=0), strict=False):
            held += [(offset + a, offset + b) for a, b in (p.ranges[rank] if p.ranges else ((0, size),))]
        ranges.append(tuple(held))
    shape = resized(full, dim, sum(p.shape[dim] for p in values))
    shared = any(p.shared for p in values)
    return Parameter(shape, expression, full, dim, tuple(ranges), shared, names)


# --- two bodies as one -----------------------------------------------------------------------------------------------


def entries(body: Body, index: int) -> list[Leaf]:
    """The projections that read input `index` of `body`, directly or where it enters rank-local computation."""
    given = placeholders(body.graph)[index]
    values = [given, *(n for n in given.users if n.target is ops.copy_to_group)]
    readers = [user for value in values for user in value.users]
    leaves = [body.modules[str(u.target)] for u in readers if u.op == "call_module"]
    return [leaf for leaf in leaves if is_entry(leaf)]


def merge_bodies(bodies: Mapping[str, Body], inputs: Mapping[str, Sequence[Any]]) -> tuple[Body, list[Any]]:
    """(one body that computes all of `bodies`, its inputs): a tuple of their results, in order.

    `inputs` are the values that each is called with; equal ones become one input, `ctx` the last. What belongs to a
    body is named after it: its projection `o_proj` is `self_attn.o_proj`.
    """
    graph = fx.Graph()
    given: dict[Any, fx.Node] = {}
    context: list[Any] = []
    given_to = {name: placeholders(b.graph) for name, b in bodies.items()}
    for name in bodies:
        for node, value in zip(given_to[name], inputs[name], strict=True):
            if node.target == "ctx":
                context = [(node, value)]
            elif value not in given:
                given[value] = graph.node_copy(node)
    for node, value in context:
        given[value] = graph.node_copy(node)
    results = []
    for name, body in bodies.items():
        env = {n: given[v] for n, v in zip(given_to[name], inputs[name], strict=True)}
        results.append(_append(graph, name, body, env))
    graph.output(tuple(results))
    _unify(graph)
    differentiated = {
        value
        for name, body in bodies.items()
        for node, value in zip(given_to[name], inputs[name], strict=True)
        if node.name not in body.constant_inputs
    }
    first = next(iter(bodies.values()))
    merged = Body(
        class_name=_class_name([b.class_name for b in bodies.values()]),
        graph=graph,
        parameters={f"{n}.{k}": v for n, b in bodies.items() for k, v in b.parameters.items()},
        buffers={f"{n}.{k}": v for n, b in bodies.items() for k, v in b.buffers.items()},
        modules={f"{n}.{k}": v for n, b in bodies.items() for k, v in b.modules.items()},
        outputs=len(bodies),
        kept=first.kept,
        dropout=max(b.dropout for b in bodies.values()),
        constant_inputs=frozenset(p.name for value, p in given.items() if value not in differentiated),
        shared={f"{n}.{k}": v for n, b in bodies.items() for k, v in b.shared.items()},
        merged=tuple(bodies),
    )
    return merged, list(given)


def _append(graph: fx.Graph, name: str, body: Body, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy the nodes of `body` to the end of `graph`; returns its result."""
    for node in body.graph.nodes:
        if node in env:
            continue
        if node.op == "output":
            return env[args_of(node)[0]]
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op in ("call_module", "get_attr"):
            env[node].target = f"{name}.{node.target}"
    raise AssertionError("a graph without output")


def _unify(graph: fx.Graph) -> None:
    """One `copy_to_group` per value, and one node per size."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in (ops.copy_to_group, aten.sym_size.int):
            first = seen.setdefault((node.target, *node.args), node)
            if first is not node:
                bypass(node, first)


def _class_name(names: Sequence[str]) -> str:
    """LlamaAttention and LlamaMLP as LlamaAttentionMLP."""
    first, *others = names
    for other in others:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
        while shared and not other[shared : shared + 1].isupper():
            shared -= 1
        first += other[shared:]
    return first
