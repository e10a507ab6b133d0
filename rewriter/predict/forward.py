"""A forward pass of one rank on meta tensors: what every wiring node computes and moves, without computing it.

Shapes are the rank's own. A module is run once per distinct inputs: equal layers share their bodies, and so their work.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from rewriter.ir import Body, Leaf, Module, Opaque, Program, args_of, ops, parameters_of
from rewriter.ir.communication import model_dtype
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import starts_sum
from rewriter.ir.residual import carries_state
from rewriter.ir.schedule import with_readers_first
from rewriter.ir.shapes import wiring_shapes
from rewriter.predict.cache_only import of_cache
from rewriter.predict.kernel_cost import Item, Kernel, ModuleExchange, as_launched, axis_group
from rewriter.predict.module_cost import EXPERTS, ModuleRun
from rewriter.predict.weight_formats import parameters_of_format
from rewriter.predict.workload import ForwardPass

_GROUPED = (
    "experts: as grouped products with a uniform router. The emitted module computes them one by one, outside of a "
    "graph, since how many tokens each gets is known at run time only: see --eager"
)
_CACHELESS = (
    "decode: as a cache would give it. The emitted module has a position bias in its attention, for which it refuses a "
    "key/value cache yet, and generates without one"
)
_RECURRENT = (
    "recurrent mixers: in chunks of 64 tokens of a prompt, and one pass over their states per token after it, by "
    "roofline. No measurements of such kernels are public"
)
_SAME_VALUE = (ops.all_reduce_wait, ops.copy_to_group, ops.agreed, ops.dropout)
_UNKNOWN = (RuntimeError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class NodeWork:
    """A wiring node with what runs for it. `nbytes`: of its result, a collective's tensor. `elements`: likewise."""

    node: fx.Node
    items: tuple[Item, ...]
    nbytes: int
    elements: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Forward:
    """The nodes of a pass in the order in which the emitted module runs them, and notes on what was estimated."""

    works: tuple[NodeWork, ...]
    notes: tuple[str, ...]

    @property
    def kernels(self) -> list[Kernel]:
        return [item for work in self.works for item in work.items if isinstance(item, Kernel)]


class Runner:
    """Runs passes of programs. It keeps what bodies cost: programs made of one share most of them."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Any, tuple[Item, ...], str | None]] = {}
        self.held: list[Any] = []  # keeps keys' ids from being used again

    def run(self, program: Program, given: ForwardPass) -> Forward:
        return _ForwardRun(self, program, given).forward()


class _ForwardRun:
    def __init__(self, runner: Runner, program: Program, given: ForwardPass) -> None:
        self.runner, self.program, self.given = runner, program, given
        self.dtype = model_dtype(program)
        self.mesh = dict(program.mesh)
        self.notes: dict[str, None] = {}
        self.shapes: Mapping[fx.Node, Any] | None = None
        self.stored = frozenset[str]() if given.weights is None else parameters_of_format(program, given.weights)

    def forward(self) -> Forward:
        graph = with_readers_first(self.program.graph)
        head = head_entry(graph)
        env: dict[fx.Node, Any] = {}
        works: list[NodeWork] = []
        given = self.given
        wanted = of_cache(self.program, graph) if given.cache_only else dict.fromkeys(graph.nodes, True)
        ids = torch.empty(given.batch, given.tokens, dtype=torch.int64, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": ids.clone(), "ctx": None}
        with torch.no_grad(), torch.device("meta"):
            for node in graph.nodes:
                if node.op == "placeholder":
                    env[node] = inputs.get(str(node.target), ids)
                    continue
                if node.op == "output":
                    break
                if node not in wanted:
                    continue
                if not wanted[node]:
                    works.append(NodeWork(node, self._keys(node, env), 0, 0, self.dtype))
                    continue
                items = self._last_tokens(head, env) if head is node and given.logits else ()
                env[node], more = self._wiring(node, env)
                value = env[node] if isinstance(env[node], torch.Tensor) else torch.empty(0, dtype=self.dtype)
                works.append(NodeWork(node, items + more, value.nbytes, value.numel(), value.dtype))
        if self.given.fused and any(i.name == EXPERTS for w in works for i in w.items):
            self.notes[_GROUPED] = None
        return Forward(tuple(works), tuple(self.notes))

    def _last_tokens(self, head: fx.Node, env: dict[fx.Node, Any]) -> tuple[Item, ...]:
        """Only the wanted tokens pass the head. Ranks that share tokens gather the last ones."""
        source = head.all_input_nodes[0]
        x = env[source]
        if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.shape[1] <= self.given.logits:
            return ()
        env[source] = x[:, -self.given.logits :].clone()
        group = axis_group(self.mesh, "sp")
        if len(group) == 1 or self.given.is_decode:
            return ()
        return (ModuleExchange("all_gather", "sp", env[source].nbytes * len(group), group, "last tokens"),)

    # --- wiring ---

    def _wiring(self, node: fx.Node, env: dict[fx.Node, Any]) -> tuple[Any, tuple[Item, ...]]:
        sources = [env[n] for n in node.all_input_nodes]
        if node.target is ops.shard_tokens:
            return self._own_tokens(sources[0], args_of(node)[2]), ()
        if node.target is ops.gather_tokens:
            return sources[0], ()  # generation keeps the last tokens, which every rank has
        if node.op == "get_attr":
            name = self.program.ties.get(str(node.target), str(node.target))
            return torch.empty(self.program.parameters[name].shape, dtype=self.dtype), ()
        if node.op == "call_module":
            return self._remembered(node, sources)
        if starts_sum(node) or node.target in _SAME_VALUE:
            return sources[0], ()  # what the wiring's collectives cost is the timeline's matter
        known = (node.target, _signature(fx.map_arg(node.args, env.__getitem__)), self.given.fused)
        if node.target not in (ops.all_gather, ops.repeat_shard) and known in self.runner.known and sources:
            value, items, _ = self.runner.known[known]
            return _anew(value), items
        run = ModuleRun(self.given, self.dtype, self.mesh)
        value = run.operation(node, env)
        launched = tuple(as_launched(run.operations))
        if isinstance(value, torch.Tensor) and launched:
            self.runner.known[known] = (value, launched, None)
        return value, launched

    def _run(self, node: fx.Node) -> ModuleRun:
        """Runs the module of a node, which may have weights of another format."""
        names = {name for name in self.stored if name.startswith(f"{node.target}.")}
        given = self.given if names else replace(self.given, weights=None)
        return ModuleRun(given, self.dtype, self.mesh, names)

    def _keys(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[Item, ...]:
        """The nodes that a module runs for the keys and values of its attention alone."""
        module, inputs = self.program.modules[str(node.target)], [env[n] for n in node.all_input_nodes]
        key = ("keys", id(module), _signature(inputs), self.given, self.dtype, tuple(self.mesh.items()))
        if key not in self.runner.known:
            assert isinstance(module, Body)
            self.runner.held.append(module)
            run = self._run(node)
            try:
                run.keys(module, inputs)
                self.runner.known[key] = (None, run.items(None), None)
            except _UNKNOWN:  # it does not run without data
                self.runner.known[key] = (None, self._remembered(node, inputs)[1], None)
        return self.runner.known[key][1]

    def _remembered(self, node: fx.Node, inputs: Sequence[Any]) -> tuple[Any, tuple[Item, ...]]:
        module = self.program.modules[str(node.target)]
        key = (id(module), _signature(inputs), self.given, self.dtype, tuple(self.mesh.items()))
        if key not in self.runner.known:
            self.runner.held.append(module)
            self.runner.known[key] = self._call(node, module, inputs)
        value, items, note = self.runner.known[key]
        if note is not None:
            self.notes[note] = None
        return _anew(value), items

    def _call(self, node: fx.Node, module: Module, inputs: Sequence[Any]) -> tuple[Any, tuple[Item, ...], str | None]:
        if not isinstance(module, Opaque):
            run = self._run(node)
            try:
                value = run.module(module, str(node.target), inputs)
                note = _CACHELESS if run.biased and self.given.is_decode else None
                note = note or (_RECURRENT if carries_state(module) else None)
                return value, run.items(value), note
            except _UNKNOWN as error:
                reason = f"it does not run without data ({str(error).splitlines()[0][:120]})"
        else:
            reason = module.reason
        if self.shapes is None:
            self.shapes = wiring_shapes(self.program)
        shape = next((s for n, s in self.shapes.items() if n.op == "call_module" and n.target == node.target), None)
        value = self._of_shape(shape, inputs)
        kind = "" if isinstance(module, Leaf) else module.class_name
        note = f"{kind}: estimated by its projections alone, since {reason}"
        return value, tuple(self._estimated(module, inputs, value)), note

    def _estimated(self, module: Module, inputs: Sequence[Any], value: Any) -> list[Item]:
        tokens = self.given.batch * next((x.shape[1] for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 2), 1)
        size, stored = self.dtype.itemsize, self.given.weights
        items: list[Item] = []
        for name, shape in parameters_of(module):
            if len(shape) < 2:
                continue
            elements, depth = math.prod(shape), shape[-1]
            columns = elements // depth
            read = round(elements * size * (1.0 if stored is None else stored.share(size)))
            nbytes, flops = read + tokens * (depth + columns) * size, 2.0 * tokens * elements
            items.append(Kernel(name, "product", nbytes, flops, read, 1, tokens, columns, depth, stored=stored))
        moved = sum(t.nbytes for t in (*inputs, value) if isinstance(t, torch.Tensor))
        return items or [Kernel("estimate", "glue", moved)]

    def _of_shape(self, shape: Any, inputs: Sequence[Any]) -> Any:
        if shape is not None and shape and isinstance(shape[0], tuple):
            return tuple(self._of_shape(s, inputs) for s in shape)
        if shape is None:
            return inputs[0].clone() if isinstance(inputs[0], torch.Tensor) else None
        tokens = next((x.shape[1] for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 2), self.given.tokens)
        sizes = {"B": self.given.batch, "S": tokens, "N": self.given.batch * tokens}
        return torch.empty([s if isinstance(s, int) else sizes[s[0]] for s in shape], dtype=self.dtype)

    def _own_tokens(self, x: torch.Tensor, plan: ops.SequencePlan) -> torch.Tensor:
        if self.given.is_decode:
            return x  # new tokens are on every rank; only their keys have an owner
        return x[:, :1].expand(x.shape[0], plan.local_tokens(x.shape[1]), *x.shape[2:]).clone()


def head_entry(graph: fx.Graph) -> fx.Node | None:
    """The node after which only the wanted tokens are needed: the head, or where its input enters."""
    called = [n for n in graph.nodes if n.op == "call_module"]
    if not called or marks(called[-1]).layer is not None:
        return None
    entered = called[-1].all_input_nodes[0]
    return entered if entered.target is ops.copy_to_group else called[-1]


def _signature(tree: Any) -> Hashable:
    if isinstance(tree, torch.Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, (tuple, list)):
        return tuple(_signature(branch) for branch in tree)
    return tree if isinstance(tree, Hashable) else str(tree)


def _anew(value: Any) -> Any:
    """The same shapes in storages of their own, by which a value is known."""
    return tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), value)
