"""Projections of one value become one matrix product."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Module, Parameter, Program, called_module, ops
from rewriter.ir.marks import mark, marks, set_marks
from rewriter.passes.base import Effect, Pass, Scope, record, with_paths
from rewriter.passes.fused_entries import Fused, below, concatenated, entries, fuse_entries, merge_bodies, why_apart


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
        groups: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        for node in self.graph.nodes:
            body = called_module(node, self.modules)
            block = marks(node).block
            if isinstance(body, Body) and body.outputs == 1 and not body.stored and block is not None:
                for index, value in enumerate(node.all_input_nodes):
                    if entries(body, index):
                        groups.setdefault((value, block), []).append(node)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        done: dict[tuple[object, ...], Body] = {}
        for (value, _), calls in groups.items():
            first = order[calls[0]]
            if len(calls) < 2 or any(order[n] > first for c in calls for n in c.all_input_nodes):
                continue
            if reason := self._why_apart(calls, value):
                names = " and ".join(str(c.target).rpartition(".")[2] for c in calls)
                layer = str(calls[0].target).rpartition(".")[0]
                self.apart.setdefault(f"its {names} stay apart: {reason}", []).append(layer)
            else:
                self._merge(calls, done)

    def _why_apart(self, calls: Sequence[fx.Node], value: fx.Node) -> str | None:
        leaves = []
        for call in calls:
            body = self.modules[str(call.target)]
            assert isinstance(body, Body)
            leaves += entries(body, call.all_input_nodes.index(value))
        return why_apart(leaves)

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
        done: dict[int, Fused] = {}
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
