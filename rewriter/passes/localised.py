"""Bodies for values that differ by rank, where replicated values enter through copies.

A value is *local* when ranks hold different ones: partial sums, shards, and everything computed from a per-rank
residual. Gradients of a local value are local too, so what all ranks share passes `copy_to_group` (whose gradient is an
all-reduce) where it meets a local value: residuals, norm weights, latent projections, routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, Parameter, bypass, copy_graph, ops, placeholders
from rewriter.ir.communication import local_values
from rewriter.ir.labels import is_tensor, tensor_inputs
from rewriter.ir.op_semantics import ends_collective
from rewriter.passes.placement.placement_state import copied_to_group, differentiable


def localise(graph: fx.Graph, modules: Mapping[str, Module], parameters: Mapping[str, Parameter]) -> dict[str, Module]:
    """`modules` with bodies fit for the local values that reach them in the wiring `graph`; alike layers stay alike.

    Raises RewriterError when a body reduces over ranks what it computed from a local value.
    """
    local = local_values(graph, parameters)
    result = dict(modules)
    done: dict[tuple[int, frozenset[int], frozenset[str]], Module] = {}
    reached: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        inputs = frozenset(i for i, source in enumerate(node.args) if source in local)
        if reached.setdefault(path, inputs) != inputs:
            raise RewriterError(f"{path} is called with values that differ by rank, and with others that do not")
        if not inputs:
            continue
        module = modules[path]
        split = frozenset(
            name.removeprefix(f"{path}.")
            for name, p in parameters.items()
            if p.ranges is not None and name.startswith(f"{path}.")
        )
        key = (id(module), inputs, split)
        if key not in done:
            done[key] = _localised(module, inputs, split, path)
        result[path] = done[key]
    return result


def _localised(module: Module, inputs: frozenset[int], split: frozenset[str], path: str) -> Module:
    """`module` for local values at `inputs`; `split` are those of its parameters of which ranks hold parts."""
    if isinstance(module, Body):
        return _Localiser(module, inputs, split, path).run()
    if (
        not isinstance(module, Leaf)
        or module.kind.startswith(("ColumnParallel", "RowParallel"))
        or not set(module.parameters) - split
    ):
        return module
    return replace(module, options={**module.options, "entered": True})


class _Localiser:
    def __init__(self, body: Body, inputs: frozenset[int], split: frozenset[str], path: str) -> None:
        self.body, self.split, self.path = body, split, path
        self.graph, _ = copy_graph(body.graph)
        self.modules: dict[str, Module] = dict(body.modules)
        self.varying = {placeholders(self.graph)[i] for i in inputs}
        self.local = set(self.varying)
        self.copied: dict[fx.Node, fx.Node] = {}

    def run(self) -> Body:
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                if str(node.target) in self.split:
                    self.local.add(node)
                continue
            sources = node.all_input_nodes
            if node.target is ops.copy_to_group:
                if sources[0] in self.local:  # a copy would sum gradients of different values
                    bypass(node, sources[0])
                else:
                    self.local.add(node)
                continue
            varying = any(n in self.varying for n in sources)
            if ends_collective(node):
                if varying:
                    raise RewriterError(
                        f"{self.path} ({self.body.class_name}) reduces over the ranks inside, at {node.name}: with "
                        "a residual of each rank's own that would mix the ranks. Leave its layer out of the selection."
                    )
                continue
            if varying:
                self.varying.add(node)
            if node.op == "call_module":
                self._call(node)
            elif any(n in self.local for n in sources):
                self._share(node)
        return replace(self.body, graph=self.graph, modules=self.modules)

    def _call(self, node: fx.Node) -> None:
        name = str(node.target)
        child = self.modules[name]
        inputs = frozenset(i for i, n in enumerate(node.all_input_nodes) if n in self.local)
        within = frozenset(s.removeprefix(f"{name}.") for s in self.split if s.startswith(f"{name}."))
        if inputs & {i for i, n in enumerate(node.all_input_nodes) if n in self.varying}:
            self.modules[name] = _localised(child, inputs, within, f"{self.path}.{name}")
        if inputs or within:
            self.local.add(node)

    def _share(self, node: fx.Node) -> None:
        self.local.add(node)
        for source in tensor_inputs(node):
            if source in self.local or not is_tensor(source) or not differentiable(source, self.body):
                continue
            if source not in self.copied:
                self.copied[source] = copied_to_group(source)
                self.local.add(self.copied[source])
            node.replace_input_with(source, self.copied[source])
