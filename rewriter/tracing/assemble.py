"""The pieces of a model's trace: the graph around the layers, and one LayerKind per kind of decoder layer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Module, Opaque, args_of, parameters_of
from rewriter.ir.labels import dynamic
from rewriter.tracing.child_results import (
    holds_alone,
    residual_input,
    results_by_place,
    wanted_results,
    without_residual,
)
from rewriter.tracing.export import BodyTracer, FlatSignature, as_leaf, example_for, export_graph, is_called
from rewriter.tracing.functionalize import functional
from rewriter.tracing.graph_cleaning import clean, sort_by_use
from rewriter.tracing.handed_on import HandedOn
from rewriter.tracing.interception import (
    Recorded,
    base_name,
    intercepted_modules,
    layer_number,
    leaves_with_paths,
    opaque_calls,
    record_calls,
    replaced_forward,
    tensor_paths,
    tensors_of,
)
from rewriter.tracing.masks import Static
from rewriter.tracing.meta_model import TRACE_DTYPE, Skeleton, fingerprint
from rewriter.tracing.mixer_functions import is_lifted
from rewriter.tracing.model_errors import reason_of, refused
from rewriter.tracing.opaque import attributes_left_behind, opaque_child, surviving_failures
from rewriter.tracing.shared_values import SharedValues, with_shared, written_outputs
from rewriter.tracing.token_mixing import mixing_operator
from rewriter.tracing.wiring import (
    OtherResult,
    absent_arguments,
    bind,
    example_inputs,
    layer_signature,
    only_calls_and_sums,
    read_as_tensors,
    returns_float32,
    switched_off,
    trace_wiring,
)

_MIXES = "it combines tokens by {}, whose state between tokens this version cannot hold"


@dataclass(frozen=True)
class Child:
    """One call of a child in a layer's wiring.

    `inputs` are the paths into (args, kwargs) of the tensors that its body takes. `outputs` maps an index of the
    returned Python tuple to the index of the body's output; None when a bare tensor is returned. `written` are the
    indices of outputs that the child puts into the mapping that layers share, by key.
    """

    name: str
    inputs: tuple[tuple[Any, ...], ...]
    outputs: Mapping[int, int] | None
    written: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer: its wiring, the bodies of its children by name, and their calls by wiring node name."""

    wiring: fx.Graph
    bodies: Mapping[str, Module]
    children: Mapping[str, Child]


@dataclass(frozen=True)
class SurroundingGraph:
    """The model around its layers. Layer i is a `call_module` of "layer i" with arguments (hidden, *tensors of the
    call)."""

    graph: fx.Graph
    modules: dict[str, Module]
    constants: dict[str, torch.Tensor]


class ModelTracer:
    """Traces one skeleton, inside `lifted_interfaces`."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.model = skeleton.model
        self.path = skeleton.layers_path
        self.layers: list[nn.Module] = list(skeleton.layers)
        self.example = example_for(skeleton.model, skeleton.config)
        self.body_tracer = BodyTracer(skeleton.buffers, skeleton.stored, self.example)
        self.calls: dict[nn.Module, Recorded] = {}
        self._fingerprints: dict[nn.Module, Any] = {}
        self._wirings: dict[Any, fx.Graph] = {}
        self._nothing: dict[Any, Mapping[str, tuple[bool, ...]]] = {}  # of `trace_wiring`, by fingerprint of a layer
        self._kinds: dict[Any, LayerKind] = {}
        self.inlined: dict[type, frozenset[str]] = {}
        self.split: dict[type, frozenset[str]] = {}
        self._branches: dict[int, Body] = {}
        ids = torch.zeros(self.example.batch, self.example.length, dtype=torch.int64, device="meta")
        self.inputs = example_inputs(self.model, self.layers, ids)
        self.absent = absent_arguments(self.model, self.layers, self.inputs)
        self.static: dict[nn.Module, dict[int, tuple[str, Static]]] = {}
        self.wide = False  # whether layers are given their hidden state in fp32, whatever the model's dtype
        self.shared: dict[Any, Any] = {}  # what layers traced so far put into the mapping that they share
        self.handed = HandedOn()

    def fingerprint(self, layer: nn.Module) -> Any:
        if layer not in self._fingerprints:
            self._fingerprints[layer] = fingerprint(layer)
        return self._fingerprints[layer]

    def wiring(self, layer: nn.Module) -> fx.Graph:
        inlined = self.inlined.get(type(layer), frozenset())
        nothing = self._nothing.get(self.fingerprint(layer), {})
        key = (self.fingerprint(layer), tuple(self.absent[layer]), inlined, tuple(nothing))
        if key not in self._wirings:
            try:
                self._wirings[key] = trace_wiring(layer, self.absent[layer], inlined, nothing)
            except RewriterError:  # some layers ask what they shall return
                off = switched_off(self.model, self.layers, self.inputs, layer)
                self._wirings[key] = trace_wiring(layer, {**off, **self.absent[layer]}, inlined, nothing)
        return self._wirings[key]

    def returned(self, layer: nn.Module) -> int | None:
        """The length of the tuple that a layer returns; None where it returns the hidden state alone."""
        result = args_of(self.wiring(layer).output_node())[0]
        return len(result) if isinstance(result, (tuple, list)) else None

    def places(self, layer: nn.Module) -> tuple[int, ...]:
        """The places, in the tuple that a layer returns, of what later layers read beside its hidden state."""
        return tuple(place for place, form in self.handed.of[layer].items() if form is not None)

    def inline_child(self, index: int, name: str) -> bool:
        """From now on, trace the child `name` of layer `index`, and of others of its class, as part of the layer.

        False when that cannot be done: it has no children of its own, its forward depends on values, or computes more
        than sums of what its children compute.
        """
        layer = self.layers[index]
        inlined = self.inlined.get(type(layer), frozenset())
        child = layer.get_submodule(name)
        if name in inlined or as_leaf(child) is not None:
            return False
        try:
            wiring = trace_wiring(layer, self.absent[layer], inlined | {name})
        except RewriterError:
            return False
        if not only_calls_and_sums(wiring):
            return False
        self.inlined[type(layer)] = inlined | {name}
        return True

    def split_sum(self, index: int, name: str) -> bool:
        """From now on, the add that ends the child `name` of layers of that class stands in the wiring.

        False when the child does not end in an add of an input that it uses nowhere else, or has been split.
        """
        kind, known = type(self.layers[index]), self.split.get(type(self.layers[index]), frozenset())
        body = self.kind(index).bodies.get(name)
        if name in known or not isinstance(body, Body) or residual_input(body) is None:
            return False
        self.split[kind] = known | {name}
        return True

    def branch_of(self, body: Body, residual: int) -> Body:
        """`body` without the add of that input; alike layers share the result."""
        if id(body) not in self._branches:
            self._branches[id(body)] = without_residual(body, residual)
        return self._branches[id(body)]

    @contextlib.contextmanager
    def _opaque_layers(self) -> Iterator[None]:
        """Every layer records its call in `self.calls` and is one operator of the graph."""

        def forward_for(index: int, layer: nn.Module) -> Callable[..., Any]:
            hidden = layer_signature(layer)[0][0]
            returned = args_of(self.wiring(layer).output_node())[0]

            def forward(*args: Any, **kwargs: Any) -> Any:
                if layer in called:
                    raise RewriterError(
                        f"{self.path}.{index} is called more than once in a forward pass, which is not supported yet"
                    )
                called.add(layer)
                bound = bind(layer, args, kwargs)
                for _, leaf in leaves_with_paths(bound):
                    if isinstance(leaf, OtherResult):
                        raise _ReadsOther(leaf.place)
                self.calls[layer] = with_shared(Recorded(args, kwargs), SharedValues())
                stream = bound[hidden]
                self.wide |= isinstance(stream, torch.Tensor) and stream.dtype == torch.float32
                if not isinstance(stream, torch.Tensor) or stream.dtype not in (TRACE_DTYPE, torch.float32):
                    raise RewriterError(f"the first argument of {type(layer).__name__} is not the hidden state")
                handed = self.handed.find(layer, self.calls[layer], lambda: self._alike(layer))
                tensors, _ = tensors_of(self.calls[layer])
                out, *others = torch.ops.rewriter_trace.call([stream, *tensors], f"layer {index}")
                if not isinstance(returned, (tuple, list)):
                    return out
                at: dict[int, Any] = dict.fromkeys(handed) | dict(zip(self.places(layer), others, strict=True))
                rest = ((place, x) for place, x in enumerate(returned) if place)
                return (out, *(None if x is None else at.get(place, OtherResult(layer, place)) for place, x in rest))

            return forward

        def values(layer: nn.Module, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            (batch, length), sizes = inputs[0].shape[:2], self.example
            real = {sizes.batch: batch, sizes.length: length, sizes.batch * sizes.length: batch * length}
            made = [torch.empty_like(inputs[0])]
            for shape, dtype in filter(None, self.handed.of[layer].values()):
                made.append(torch.empty([real.get(s, s) for s in shape], dtype=dtype, device=inputs[0].device))
            return made

        called: set[nn.Module] = set()
        functions: dict[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = {
            f"layer {i}": functools.partial(values, layer) for i, layer in enumerate(self.layers)
        }
        forwards = {layer: forward_for(i, layer) for i, layer in enumerate(self.layers)}
        with opaque_calls(functions), replaced_forward(forwards):
            yield

    def _record(self, modules: Mapping[str, nn.Module]) -> dict[str, Recorded]:
        """The calls of the modules around the layers, and in `self.calls` those of the layers."""
        while True:
            self.handed = HandedOn(self.handed.places)
            try:
                with self._opaque_layers(), torch.no_grad():
                    return record_calls(lambda: self.model(**self.inputs, use_cache=False), modules)
            except _ReadsOther as error:
                if error.place in self.handed.places:
                    raise RewriterError("a layer reads what no layer before it returned as a tensor") from error
                self.handed = HandedOn((*self.handed.places, error.place))

    @contextlib.contextmanager
    def _without_layer_tensors(self) -> Iterator[None]:
        """Hide the parameters and buffers of opaque layers, of which an export would make a fake tensor each.

        The first layer keeps its own: some models read a dtype there.
        """
        kept = set(self.layers[0].modules())
        hidden = [m for layer in self.layers for m in layer.modules() if m not in kept]
        tensors = [(m, m._parameters, m._buffers) for m in hidden]
        for module in hidden:
            module._parameters, module._buffers = {}, {}
        try:
            yield
        finally:
            for module, parameters, buffers in tensors:
                module._parameters, module._buffers = parameters, buffers

    def surroundings(self) -> SurroundingGraph:
        """Export the model around its layers; afterwards `self.calls` holds meta arguments of every layer."""
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        around = {n: m for n, m in self.model.named_modules() if n and id(m) not in inside}
        lifted = {n: m for n, m in around.items() if is_called(m) or holds_alone(m)}
        # but for those that hold nothing but tables in the model's dtype, which their own inputs do not tell
        lifted = {
            n: m
            for n, m in lifted.items()
            if any(True for _ in m.parameters()) or all(b.dtype != TRACE_DTYPE for b in m.buffers())
        }
        example, model = self.inputs, self.model
        logits = FlatSignature(
            model,
            lambda tensors: ((), {**dict(zip(example, tensors, strict=True)), "use_cache": False}),
            lambda output: output.logits,
        )
        calls = self._record(lifted)
        # what is given no tensor computes from lengths, which a body of its own would take for constants
        calls = {n: call for n, call in calls.items() if tensors_of(call)[0]}
        lifted = {n: m for n, m in lifted.items() if n in map(base_name, calls)}
        meta_calls = dict(self.calls)
        modules = {
            name: self.body_tracer.trace(base_name(name), lifted[base_name(name)], call) for name, call in calls.items()
        }
        for name, module in modules.items():
            if base_name(name) != name and next(parameters_of(module), None):
                raise RewriterError(
                    f"{base_name(name)} is called in different ways and has parameters: not supported yet"
                )
        with (
            refused(f"{type(model).__name__} cannot be exported around its layers"),
            intercepted_modules(lifted, calls),
            self._opaque_layers(),
            self._without_layer_tensors(),
        ):
            exported = functional(export_graph(logits, list(example.values()), self.example))
        self.calls = meta_calls
        names = sort_by_use(exported.graph)
        modules = {names[name]: module for name, module in modules.items() if name in names}
        wide = self.wide or any(returns_float32(self.wiring(layer)) for layer in self.layers)
        graph, used = clean(exported, prefix="inner.", casts_stay=wide)
        for index, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
            node.target = list(example)[index]
            node._rename(str(node.target))
        self._find_static(graph, used)
        self._call_tables(graph, used, modules)
        return SurroundingGraph(graph, modules, {n: v for n, v in used.items() if v is not None})

    def _call_tables(
        self, graph: fx.Graph, used: Mapping[str, torch.Tensor | None], modules: dict[str, Module]
    ) -> None:
        """Tensors that the model reads outside of any module (tables of positions) become modules that return them."""
        read: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "get_attr" and used[str(node.target)] is None:
                read.setdefault(str(node.target).rpartition(".")[0], []).append(node)
        for owner, nodes in read.items():
            if owner in modules:
                name = nodes[0].target
                raise RewriterError(f"{name} is read outside of the module that holds it, which is not supported yet")
            modules[owner] = self._table(owner, nodes)
            with graph.inserting_before(nodes[0]):
                call = graph.call_module(owner, ())
                values = (
                    [call]
                    if len(nodes) == 1
                    else [graph.call_function(operator.getitem, (call, i)) for i in range(len(nodes))]
                )
            for node, value in zip(nodes, values, strict=True):
                value.meta = dict(node.meta)
                node.replace_all_uses_with(value)
                graph.erase_node(node)
            if len(nodes) > 1:
                call.meta["val"] = [value.meta["val"] for value in values]

    def _table(self, owner: str, nodes: Sequence[fx.Node]) -> Body:
        """A module that takes nothing and returns the tensors of `owner` that these nodes read."""
        graph, parameters = fx.Graph(), dict(self.model.named_parameters())
        shapes: dict[str, tuple[int, ...]] = {}
        buffers: dict[str, torch.Tensor] = {}
        stored: dict[str, torch.dtype | None] = {}
        values = []
        for node in nodes:
            name = str(node.target)
            leaf = name.rpartition(".")[2]
            values.append(graph.get_attr(leaf))
            values[-1].meta["val"] = node.meta["val"]
            if name in self.body_tracer.stored:
                stored[leaf] = self.body_tracer.stored[name]
            if name in self.body_tracer.stored or name in parameters:
                shapes[leaf] = tuple(map(int, node.meta["val"].shape))
            else:
                buffers[leaf] = self.body_tracer.buffers[name]
        graph.output(values[0] if len(values) == 1 else tuple(values))
        kind = type(self.model.get_submodule(owner)).__name__
        return Body(kind, graph, shapes, buffers, {}, len(values), kept=(), stored=stored)

    def _find_static(self, graph: fx.Graph, used: Mapping[str, torch.Tensor | None]) -> None:
        """Record the tensors of the layers' calls that depend on lengths alone, with their evaluation."""
        static = self.body_tracer.static_graph(graph, used, "", {})
        for node in graph.nodes:
            if node.op == "call_module" and (index := layer_number(str(node.target))) is not None:
                layer = self.layers[index]
                pairs = list(zip(args_of(node)[1:], tensors_of(self.calls[layer])[0], strict=True))
                for n, t in pairs:
                    self.body_tracer.dimensions[id(t)] = [d for d, s in enumerate(n.meta["val"].shape) if dynamic(s)]
                self.static[layer] = {id(t): (n.name, s) for n, t in pairs if (s := static.of(n)) is not None}

    def kind(self, index: int) -> LayerKind:
        """The traced kind of layer `index`; layers alike in structure and in how they are called share it."""
        layer = self.layers[index]
        known = tuple(name for name, _ in self.static[layer].values())
        constants = self._constants(f"{self.path}.{index}", layer)
        inlined = self.inlined.get(type(layer), frozenset())
        key = (self._alike(layer), constants, known, inlined)
        if key not in self._kinds:
            self._kinds[key] = self._trace_kind(index)
        return self._kinds[key]

    def _constants(self, path: str, module: nn.Module) -> tuple[str, ...]:
        """A hash of every buffer of a module that is a constant of its trace: its values may differ by layer."""
        names = [n for n, _ in module.named_buffers() if f"{path}.{n}" not in self.body_tracer.stored]
        values = (self.body_tracer.buffers[f"{path}.{n}"].reshape(-1).view(torch.uint8).numpy() for n in names)
        return tuple(hashlib.sha256(value.tobytes()).hexdigest() for value in values)

    def _alike(self, layer: nn.Module) -> Any:
        """Equal for layers that are alike in structure and in how they are called."""
        return self.fingerprint(layer), self._static(self.calls[layer])

    def _static(self, call: Recorded) -> str:
        """The parts of a call that decide how it traces: constants by value, tensors by shape."""
        leaves = leaves_with_paths((call.args, call.kwargs))
        return repr([(p, self.example.symbolic(x.shape) if isinstance(x, torch.Tensor) else x) for p, x in leaves])

    def _trace_kind(self, index: int) -> LayerKind:
        layer = self.layers[index]
        wiring, static = self.wiring(layer), self.static[layer]
        shared = SharedValues(self.shared)
        call = with_shared(self.calls[layer], shared)
        modules = {str(n.target): layer.get_submodule(str(n.target)) for n in wiring.nodes if n.op == "call_module"}
        with (
            torch.no_grad(),
            attributes_left_behind(self.model) as left_behind,
            surviving_failures(modules, wiring, tensors_of(call)[0][0].shape) as failures,
        ):
            calls = record_calls(lambda: type(layer).forward(layer, *call.args, **call.kwargs), modules)
        if nothing := read_as_tensors(wiring, {name: call.output for name, call in calls.items()}):
            self._nothing[self.fingerprint(layer)] = nothing
            wiring = self.wiring(layer)
        if missing := set(modules) - set(calls):
            raise RewriterError(f"{type(layer).__name__}.{min(missing)} is in the wiring but was not called")
        bodies: dict[str, Module] = {}
        children: dict[str, Child] = {}
        alike: dict[Any, Module] = {}
        for node in wiring.nodes:
            if node.op != "call_module":
                continue
            name = str(node.target)
            tensors, _ = tensors_of(calls[name])
            known = tuple(static[id(t)][0] for t in tensors if id(t) in static)
            written, placed = written_outputs(calls[name])
            wanted = wanted_results(node, calls[name].output, self.handed.places)
            wanted = wanted if wanted is None or not written else (*wanted, *placed)
            path = f"{self.path}.{index}.{name}"
            constants = self._constants(path, modules[name])
            key = (fingerprint(modules[name]), self._static(calls[name]), constants, known, wanted)
            if key not in alike:
                alike[key] = self._trace_child(path, modules[name], calls[name], failures.get(name), static, wanted)
                if isinstance(alike[key], Opaque) and (others := [a for a in left_behind if not a.startswith(path)]):
                    raise RewriterError(
                        f"{path} cannot be traced: {alike[key].reason}. It cannot stay the source's own module either: "
                        f"the layer leaves a tensor behind in {others[0]}, which it may read."
                    )
            body = bodies[name] = alike[key]
            paths = tensor_paths(calls[name])
            kept = getattr(body, "kept", range(len(paths)))
            outputs = results_by_place(calls[name].output, None if isinstance(body, Opaque) else wanted)
            after = len(outputs or (0,))
            places = {key: tuple(after + i for i in of) for key, of in written.items()}
            children[node.name] = Child(name, tuple(paths[i] for i in kept), outputs, places)
        self.shared |= shared
        return LayerKind(wiring, bodies, children)

    def _trace_child(
        self,
        path: str,
        module: nn.Module,
        call: Recorded,
        failure: Exception | None,
        static: Mapping[int, tuple[str, Static]],
        wanted: tuple[int, ...] | None,
    ) -> Module:
        """The body of a child of a layer; the child itself, called as it is, where its inside cannot be represented."""
        if failure is not None:
            return opaque_child(path, module, call, self.example, reason_of(failure))
        # known before the export of a recurrence, which takes long
        if any(isinstance(m, (nn.Conv1d, nn.Conv2d)) for m in module.modules()) and not is_lifted(module):
            return opaque_child(path, module, call, self.example, _MIXES.format("a convolution"))

        def known(tensor: torch.Tensor) -> Static | None:
            return static[id(tensor)][1] if id(tensor) in static else None

        try:
            body = self.body_tracer.trace(path, module, call, known, wanted)
        except RewriterError as error:
            return opaque_child(path, module, call, self.example, reason_of(error))
        if isinstance(body, Body) and (operator := mixing_operator(body)):
            return opaque_child(path, module, call, self.example, _MIXES.format(operator))
        return body


class _ReadsOther(RewriterError):
    """A layer reads what a layer before it returned in the place `place` of its tuple."""

    def __init__(self, place: int) -> None:
        super().__init__(f"a layer reads result {place} of the layer before")
        self.place = place
