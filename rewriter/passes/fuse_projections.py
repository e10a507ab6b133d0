"""Projections of one value become one matrix product, in bodies that read one value made one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any, ClassVar

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import (
    Body,
    Leaf,
    Module,
    Parameter,
    Program,
    args_of,
    bypass,
    called_module,
    copy_graph,
    ops,
    placeholders,
)
from rewriter.ir.marks import mark, marks, set_marks
from rewriter.ir.phases import prompt_phase
from rewriter.passes.base import Effect, Pass, Scope, record, with_paths
from rewriter.passes.placement.projections import is_entry, outputs_layout, resized
from rewriter.weights.expressions import Concat


@dataclass(frozen=True)
class FuseProjections(Pass):
    """(W_q x, W_k x, W_v x) = split([W_q; W_k; W_v] x), and gate and up likewise: one product where there were several.

    Bodies of one block that read the same value are made one first: in a parallel block whose one norm serves both
    halves, queries, keys, values, gate and up are one fused entry projection (PaLM, arXiv 2204.02311, section 2). Each
    rank holds its parts of the fused weight, one after the other; heads that several ranks hold stay shared.

    Exact. Projections stay apart, with a note, where only some have a bias. Raises RewriterError before
    `tensor_parallel` or after `overlap`.
    """

    name: ClassVar[str] = "fuse_projections"
    effect: ClassVar[Effect] = "exact"
    routine: ClassVar[bool] = True
    scope: ClassVar[Scope] = "runtime"

    def apply(self, program: Program) -> Program:
        if program.mesh.get("tp", 1) > 1 and all(r.name != "tensor_parallel" for r in program.history):
            raise RewriterError("fuse_projections: put tensor_parallel before it, which splits projections one by one")
        if any(n.target is ops.all_reduce_start for n in program.graph.nodes):
            raise RewriterError("fuse_projections: the reductions are scheduled already. Put overlap after it")
        fuser = _Fuser(program)
        fuser.merge()
        fuser.fuse()
        notes = with_paths(fuser.apart)
        if not fuser.counts:
            return record(program, self, "no projections that could be one read the same value", notes, False)
        made = ", ".join(f"{n} × {name}" for name, n in fuser.counts.items())
        return record(
            program, self, f"fused: {made}", notes,
            graph=fuser.graph, modules=fuser.modules, parameters=fuser.parameters,
        )  # fmt: skip


class _Fuser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph, _ = program.edit()
        self.modules: dict[str, Module] = dict(program.modules)
        self.parameters: dict[str, Parameter] = dict(program.parameters)
        self.counts: Counter[str] = Counter()
        self.apart: dict[str, list[str]] = {}

    # --- two bodies as one

    def merge(self) -> None:
        """Make bodies of one block that read the same value one, where their projections can be one."""
        groups: dict[tuple[fx.Node, int, int | None], list[fx.Node]] = {}
        apart = self._exact_blocks()
        for node in self.graph.nodes:
            body = called_module(node, self.modules)
            block = marks(node).block
            if isinstance(body, Body) and body.outputs == 1 and not body.stored and block is not None:
                for index, value in enumerate(node.all_input_nodes):
                    if entries(body, index):
                        groups.setdefault((value, block, apart.get(str(node.target))), []).append(node)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        done: dict[tuple[object, ...], Body] = {}
        for (value, *_), calls in groups.items():
            first = order[calls[0]]
            if len(calls) < 2 or any(order[n] > first for c in calls for n in c.all_input_nodes):
                continue
            bodies = ((self.modules[str(call.target)], call.all_input_nodes.index(value)) for call in calls)
            if reason := why_apart([leaf for b, i in bodies if isinstance(b, Body) for leaf in entries(b, i)]):
                names = " and ".join(str(c.target).rpartition(".")[2] for c in calls)
                layer = str(calls[0].target).rpartition(".")[0]
                self.apart.setdefault(f"its {names} stay apart: {reason}", []).append(layer)
            else:
                self._merge(calls, done)

    def _exact_blocks(self) -> dict[str, int | None]:
        """By path, the block of a module as traced, where exact tokens keep that: they call its bodies one by one."""
        if prompt_phase(self.program) is None:
            return {}
        traced = (self.program.origin or self.program).graph.nodes
        return {str(n.target): marks(n).block for n in traced if n.op == "call_module"}

    def _merge(self, calls: Sequence[fx.Node], done: dict[tuple[object, ...], Body]) -> None:
        paths = [str(c.target) for c in calls]
        names = [p.rpartition(".")[2] for p in paths]
        bodies = {n: self.modules[p] for n, p in zip(names, paths, strict=True)}
        inputs = {n: c.all_input_nodes for n, c in zip(names, calls, strict=True)}
        merged, values = merge_bodies({n: b for n, b in bodies.items() if isinstance(b, Body)}, inputs)
        places = [[values.index(v) for v in inputs[n]] for n in names]
        key = (*map(id, bodies.values()), *names, str(places))  # alike layers stay alike
        merged = done.setdefault(key, merged)
        path = f"{paths[0].rpartition('.')[0]}.{'_'.join(names)}"
        self.modules = {
            path if p == paths[0] else p: merged if p == paths[0] else m
            for p, m in self.modules.items()
            if p not in paths[1:]
        }
        for child, old in zip(names, paths, strict=True):
            for name in [n for n in self.parameters if n.startswith(f"{old}.")]:
                spec = self.parameters.pop(name)
                parts = spec.parts or (name,)
                self.parameters[f"{path}.{child}.{name.removeprefix(f'{old}.')}"] = replace(
                    spec, parts=parts, dim=spec.dim or 0
                )
        with self.graph.inserting_before(calls[0]):
            both = self.graph.call_module(path, tuple(values))
            set_marks(both, marks(calls[0]).only("layer", "block"))
            for index, (call, child) in enumerate(zip(calls, names, strict=True)):
                result = self.graph.call_function(operator.getitem, (both, index))
                result.meta = dict(call.meta)
                mark(result, role=child)
                call.replace_all_uses_with(result)
        for call in calls:
            self.graph.erase_node(call)
        self.counts[" + ".join(names)] += 1

    # --- the projections

    def fuse(self) -> None:
        """Fuse inside of every body of a layer; alike layers share the result."""
        done: dict[int, FusedBody] = {}
        tied = {*self.program.ties, *self.program.ties.values()}
        for node in self.graph.nodes:
            path, body = str(node.target), called_module(node, self.modules)
            if not isinstance(body, Body) or marks(node).layer is None:
                continue
            if any(name.startswith(f"{path}.") for name in tied):
                continue
            if id(body) not in done:
                done[id(body)] = fuse_entries(body, below(self.parameters, path))
            fused = done[id(body)]
            self.modules[path] = fused.body
            for note in fused.notes:
                self.apart.setdefault(note, []).append(path)
            for fusion in fused.fusions:
                self.counts[fusion.name.rpartition(".")[2]] += 1
                for kind in ("weight", "bias"):
                    parts = [f"{path}.{part}.{kind}" for part in fusion.parts]
                    if parts[0] in self.parameters:
                        members = {p: self.parameters.pop(p) for p in parts}
                        dim = fusion.dim if kind == "weight" else 0
                        self.parameters[f"{path}.{fusion.name}.{kind}"] = concatenated(members, dim)


aten = torch.ops.aten


@dataclass(frozen=True)
class Fusion:
    """Projections of a body that became one, by their paths in it; their outputs are `dim` of the weight."""

    name: str
    parts: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class FusedBody:
    """A body after fusion, what was fused, and notes on what was left apart."""

    body: Body
    fusions: tuple[Fusion, ...] = ()
    notes: tuple[str, ...] = ()


def fuse_entries(body: Body, parameters: Mapping[str, Parameter]) -> FusedBody:
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
        return FusedBody(body, (), tuple(notes))
    return FusedBody(replace(body, graph=graph, modules=modules), tuple(fusions), tuple(notes))


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
    """q_proj, k_proj and v_proj as qkv_proj; gate_proj and up_proj as gate_up_proj; below their common parent.

    An item of a list is named after the list: the first of `experts` as experts_0.
    """
    parents, names = zip(*map(_owner_and_name, paths), strict=True)
    parent = f"{parents[0]}." if parents[0] and len(set(parents)) == 1 else ""
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


def _owner_and_name(path: str) -> tuple[str, str]:
    parts = path.split(".")
    begin = max((i for i, part in enumerate(parts) if not part.isdecimal()), default=None)
    if begin is None:
        return "", "_".join(["item", *parts])
    return ".".join(parts[:begin]), "_".join(parts[begin:])


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
