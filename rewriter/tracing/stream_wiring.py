"""The wiring of the whole model, one graph of the layers' wirings in the graph around them, its residual stream marked.

Some layers leave the residual add to a child (`self.mlp(x, residual)`). Such children are inlined: their own forward is
traced as part of the layer, so that the add stands in the wiring. Where that is more than sums of what their children
give (attention), only the add that ends their body is taken out.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import stream_width
from rewriter.ir import (
    SPLAT,
    Body,
    ChildInput,
    ChildItem,
    LayerArgument,
    Leaf,
    Module,
    PythonCall,
    args_of,
    copy_graph,
    drop_dead_nodes,
    ops,
)
from rewriter.ir.marks import IN_MAPPING, layer_of, mark, marks, set_marks
from rewriter.ir.op_semantics import kind_of
from rewriter.ir.residual import is_add
from rewriter.ir.stream import NoStream, annotate
from rewriter.tracing.assemble import Child, ModelTracer, SurroundingGraph
from rewriter.tracing.child_results import residual_input
from rewriter.tracing.interception import layer_number, tensors_of
from rewriter.tracing.masks import refuse_unknown_masks
from rewriter.tracing.meta_model import TRACE_DTYPE
from rewriter.tracing.shared_values import SharedValues
from rewriter.tracing.wiring import bind, cast_to_dtype_of, is_cast, layer_signature


def wire(tracer: ModelTracer, around: SurroundingGraph) -> tuple[fx.Graph, dict[str, Module]]:
    """(wiring of the whole model, modules by full path).

    A model without a residual stream is wired too: it can still be sharded, and a pass that needs the stream says why
    there is none.
    """
    width = stream_width(tracer.model.config.to_dict()) or 0
    plain = graph, modules = _flat(tracer, around)
    while True:
        try:
            annotate(graph, modules, len(tracer.layers), width)
            return graph, modules
        except NoStream as error:
            if not _inline(tracer, error.node):
                break
        except RewriterError:
            break
        try:
            graph, modules = _flat(tracer, around)
        except RewriterError:  # the inside of a child that was inlined cannot be represented: left as it was
            break
    tracer.inlined.clear()
    tracer.split.clear()
    return plain


def _flat(tracer: ModelTracer, around: SurroundingGraph) -> tuple[fx.Graph, dict[str, Module]]:
    graph, modules = flatten(tracer, around)
    keep_tokens(graph, modules)
    return graph, modules


def _inline(tracer: ModelTracer, node: fx.Node) -> bool:
    """Bring the add of the child that gives `node`, or a summand of it, into the wiring; False where there is none."""
    summands = [n for n in node.all_input_nodes if n.target is operator.getitem] if is_add(node) else [node]
    for value in summands:
        call = args_of(value)[0] if value.target is operator.getitem else value
        if call.op == "call_module":
            index = layer_of(call)
            name = str(call.target).removeprefix(f"{tracer.path}.{index}.")
            if tracer.inline_child(index, name) or tracer.split_sum(index, name):
                return True
    return False


# --- layers that lay their tokens out in one dimension


_RESHAPES = ("reshape", "view")


def keep_tokens(graph: fx.Graph, modules: Mapping[str, Module]) -> None:
    """Take such pairs out of a wiring, in place; where anything else reads the flat tokens, they stay."""
    for node in list(graph.nodes):
        if _flattens(node):
            source = node.all_input_nodes[0]
            if (restored := _until_restored(node, source, modules)) is not None:
                for back in restored:
                    back.replace_all_uses_with(back.all_input_nodes[0])
                node.replace_all_uses_with(source)
    drop_dead_nodes(graph)


def _flattens(node: fx.Node) -> bool:
    """True if a node is `x.reshape(-1, x.size(-1))`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 3 or node.args[1] != -1:
        return False
    size, width = node.args[2], ("call_method", "size", (node.args[0], -1))
    return isinstance(size, fx.Node) and (size.op, size.target, size.args) == width


def _until_restored(flat: fx.Node, source: fx.Node, modules: Mapping[str, Module]) -> list[fx.Node] | None:
    """The nodes that give all that comes from `flat` the shape of `source` again; None where a value stays flat."""
    restored: list[fx.Node] = []
    seen: set[fx.Node] = set()
    todo = list(flat.users)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _restores(node, source):
            restored.append(node)
        elif _treats_tokens_alike(node, modules):
            todo += node.users
        else:
            return None
    inside = {flat, *seen}
    whole = all(n in inside for node in seen - set(restored) for n in node.all_input_nodes)
    return restored if restored and whole else None


def _restores(node: fx.Node, source: fx.Node) -> bool:
    """True if a node is `y.view(source.shape)`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 2:
        return False
    shape = node.args[1]
    return isinstance(shape, fx.Node) and shape.target is getattr and shape.args == (source, "shape")


def _treats_tokens_alike(node: fx.Node, modules: Mapping[str, Module]) -> bool:
    if node.op == "call_function":
        return node.target in (operator.add, operator.mul, ops.dropout)
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, Leaf):
        return module.kind in ("Linear", "Conv1D", "LayerNorm", "Dropout")
    return isinstance(module, Body) and all(
        kind_of(n) == "pointwise" for n in module.graph.nodes if n.op in ("call_function", "call_module")
    )


@dataclasses.dataclass(frozen=True)
class _Context:
    """A layer argument other than the hidden state: its name, and its value as a tree over wiring nodes. Or what a
    child `returned` in a place of its tuple where the program has nothing."""

    name: str
    value: Any
    returned: tuple[_Outputs, int] | None = None


def flatten(tracer: ModelTracer, around: SurroundingGraph) -> tuple[fx.Graph, dict[str, Module]]:
    """(wiring of the whole model, modules by full path). The wiring takes input_ids, position_ids and ctx."""
    graph = fx.Graph()
    modules: dict[str, Module] = {}
    env: dict[fx.Node, Any] = {}
    shared: dict[Any, tuple[fx.Node, ...]] = {}  # what layers put into the mapping that they share
    ctx: fx.Node | None = None
    for node in around.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(str(node.target))
            continue
        if ctx is None:
            ctx = graph.placeholder("ctx")
        if node.op == "call_module" and (index := layer_number(str(node.target))) is not None:
            results = _Layer(tracer, graph, modules, index, ctx, shared).place([env[a] for a in node.args])
            env[node] = results if len(results) > 1 else results[0]
            continue
        args = tuple(env[a] if isinstance(a, fx.Node) else fx.map_arg(a, env.__getitem__) for a in node.args)
        if node.op == "call_module":
            module = modules[str(node.target)] = around.modules[str(node.target)]
            if isinstance(module, Body):
                args = tuple(args[i] for i in module.kept)
        if node.target is operator.getitem and isinstance(args[0], list):  # what a layer returned
            env[node] = args[0][args_of(node)[1]]
            continue
        kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        new = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        mark(new, layer=None)
        env[node] = new
        if node.op == "output":
            new.args = (args_of(new)[0][0],)
    drop_dead_nodes(graph)
    _drop_dead_results(graph, modules)
    refuse_unknown_masks(graph)
    return graph, modules


def _drop_dead_results(graph: fx.Graph, modules: dict[str, Module]) -> None:
    """Let modules return what the wiring reads of them alone; modules that are alike stay one."""
    known: dict[Any, Body] = {}
    for node in graph.nodes:
        body = modules.get(str(node.target)) if node.op == "call_module" else None
        call = marks(node).python
        if not isinstance(body, Body) or call is None or not isinstance(call.index, tuple):
            continue
        elements = {args_of(user)[1]: user for user in node.users}
        kept = tuple(sorted(elements))
        if len(kept) == body.outputs:
            continue
        if (id(body), kept) not in known:
            known[id(body), kept] = _returning(body, kept)
        modules[str(node.target)] = known[id(body), kept]
        index = tuple(call.index[i] for i in kept)
        mark(node, python=dataclasses.replace(call, index=index if len(kept) > 1 else index[0]))
        for place, element in ((kept.index(i), user) for i, user in elements.items()):
            if len(kept) == 1:
                record = dataclasses.replace(marks(node), handed_on=marks(element).handed_on)
                element.replace_all_uses_with(node)
                set_marks(node, record)
                graph.erase_node(element)
            else:
                element.args = (node, place)


def _returning(body: Body, kept: tuple[int, ...]) -> Body:
    """`body` with these of its results alone."""
    copied, _ = copy_graph(body.graph)
    results = args_of(copied.output_node())[0]
    copied.output_node().args = (results[kept[0]] if len(kept) == 1 else tuple(results[i] for i in kept),)
    drop_dead_nodes(copied)
    return dataclasses.replace(body, graph=copied, outputs=len(kept))


class _Layer:
    """Places the wiring of one layer into the whole-model graph."""

    def __init__(
        self,
        tracer: ModelTracer,
        graph: fx.Graph,
        modules: dict[str, Module],
        index: int,
        ctx: fx.Node,
        shared: dict[Any, tuple[fx.Node, ...]],
    ) -> None:
        self.shared = shared
        self.tracer, self.graph, self.modules, self.index, self.ctx = tracer, graph, modules, index, ctx
        self.layer = tracer.layers[index]
        self.kind = tracer.kind(index)
        self.path = f"{tracer.path}.{index}"

    def place(self, arguments: list[fx.Node]) -> list[fx.Node]:
        """`arguments` are the hidden state and the tensors of the layer's call; returns its hidden state, then what
        later layers read beside it."""
        hidden, *tensors = arguments
        if self.index == 0:
            mark(hidden, hidden=True)
        _, rebuild = tensors_of(self.tracer.calls[self.layer])
        bound = bind(self.layer, *rebuild(tensors))
        bound = {n: dict(self.shared) if isinstance(value, SharedValues) else value for n, value in bound.items()}
        env: dict[fx.Node, Any] = {}
        for node in self.kind.wiring.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                first = name == layer_signature(self.layer)[0][0]
                env[node] = hidden if first else _Context(name, bound.get(name))
            elif node.op == "call_module":
                env[node] = self._call(node, self.kind.children[node.name], env)
            elif node.op == "output":
                result = args_of(node)[0]
                result = result if isinstance(result, (tuple, list)) else [result]
                for place, form in self.tracer.handed.of[self.layer].items():
                    value = env.get(result[place]) if form is None else None
                    if isinstance(value, _Context) and value.returned is not None:
                        outputs, index = value.returned
                        outputs.read(index, place)
                return [env[result[0]], *(self._handed_on(env[result[p]], p) for p in self.tracer.places(self.layer))]
            else:
                env[node] = self._glue(node, env)
        raise RewriterError(f"the wiring of {self.path} has no output")

    def _handed_on(self, value: Any, place: int) -> fx.Node:
        """A value that the layer returns beside its hidden state, marked so; one that it was given itself, alone."""
        node: Any = value.value if isinstance(value, _Context) else value
        if not isinstance(node, fx.Node):
            raise RewriterError(f"{self.path} hands on result {place} in a way that is not supported")
        if marks(node).layer == self.index:
            mark(node, handed_on=place)
        return node

    def _glue(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        values = [env[n] for n in node.all_input_nodes]
        if node.target is operator.getitem and isinstance(values[0], _Outputs):
            return values[0].item(args_of(node)[1])
        if node.target is operator.getitem and isinstance(values[0], _Context):
            item = values[0].value[args_of(node)[1]]
            return item if isinstance(item, fx.Node) else _Context(f"{values[0].name}[{args_of(node)[1]!r}]", item)
        for value in values:  # which an emitted layer reads as its argument
            if isinstance(value, _Context) and isinstance(value.value, fx.Node):
                mark(value.value, argument=value.name)
        unwrapped = {n: v.value if isinstance(v, _Context) else v for n, v in env.items()}
        args, kwargs = fx.map_arg(node.args, unwrapped.__getitem__), fx.map_arg(node.kwargs, unwrapped.__getitem__)
        if node.op == "get_attr":
            return self._add("get_attr", f"{self.path}.{node.target}", (), {})
        if node.op == "call_method" and args[0] is None:
            raise RewriterError(
                f"{self.path} calls {node.target} of what is None in this layer: its forward asks for that, which the "
                "wiring of a layer cannot"
            )
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "dropout":
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if probability:
                return self._add("call_function", ops.dropout, (args[0], probability), {})
            return args[0]
        if (like := cast_to_dtype_of(node)) is not None:
            return self._add("call_function", ops.type_as_model, (args[0], unwrapped[like]), {})
        if is_cast(node, TRACE_DTYPE):  # the trace's dtype stands for the model's: that of the layer's parameters
            return self._add("call_function", ops.type_as_model, (args[0], self._parameter()), {})
        return self._add(node.op, _PURE.get(node.target, node.target), args, kwargs)

    def _parameter(self) -> fx.Node:
        """A parameter of the layer, in the model's dtype."""
        name = next(n for n, p in self.layer.named_parameters() if p.dtype == TRACE_DTYPE)
        return self._add("get_attr", f"{self.path}.{name}", (), {})

    def _add(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        new = self.graph.create_node(op, target, args, kwargs)
        mark(new, layer=self.index)
        return new

    def _call(self, node: fx.Node, child: Child, env: dict[fx.Node, Any]) -> Any:
        body = self.kind.bodies[child.name]
        path = f"{self.path}.{child.name}"
        residual = nowhere = None
        if child.name in self.tracer.split.get(type(self.layer), ()) and isinstance(body, Body):
            place = residual_input(body)
            assert place is not None
            nowhere = child.inputs[place]
            residual = self._input(node, nowhere, env, path)
            body = self.tracer.branch_of(body, place)
            child = dataclasses.replace(child, inputs=tuple(w for w in child.inputs if w != nowhere))
        self.modules[path] = body
        inputs = [self._input(node, where, env, path) for where in child.inputs]
        extra = (self.ctx,) if isinstance(body, Body) and body.reads_context else ()
        new = self._add("call_module", path, (*inputs, *extra), {})
        indices = {where: i for i, where in enumerate(child.inputs)}

        def template(tree: Any, where: tuple[Any, ...]) -> Any:
            if isinstance(tree, fx.Node):
                value = env[tree]
                if isinstance(value, _Context) and value.returned is not None:
                    outputs, index = value.returned
                    return outputs.read(index)
                if isinstance(value, _Context):
                    return LayerArgument(value.name)
                if where not in indices and value in inputs:  # one tensor given twice
                    return ChildInput(inputs.index(value))
                if where == nowhere:
                    return 0.0  # what the child adds to it is wanted alone
                if where not in indices:
                    raise RewriterError(f"{path} is given a tensor that its body does not use")
                return ChildInput(indices[where])
            if isinstance(tree, (tuple, list)):
                return type(tree)(template(item, (*where, i)) for i, item in enumerate(tree))
            if isinstance(tree, dict):
                return {key: template(item, (*where, key)) for key, item in tree.items()}
            return tree

        kwargs = {k: v for k, v in node.kwargs.items() if k != SPLAT}
        call = PythonCall(template(tuple(node.args), (0,)), template(kwargs, (1,)), SPLAT in node.kwargs, None)
        if child.outputs is None:
            mark(new, python=call)
            return new if residual is None else self._add("call_function", operator.add, (residual, new), {})
        for key, places in child.written.items():
            self.shared[key] = tuple(self._add("call_function", operator.getitem, (new, p), {}) for p in places)
            for element in self.shared[key]:
                mark(element, handed_on=IN_MAPPING)
        return _Outputs(self, new, call, child.outputs, sum(map(len, child.written.values())), residual)

    def _input(self, node: fx.Node, where: tuple[Any, ...], env: dict[fx.Node, Any], path: str) -> fx.Node:
        """The wiring node of the tensor at path `where` of a call's (args, kwargs)."""
        tree: Any = (node.args, node.kwargs)
        for step in where:
            if isinstance(tree, fx.Node):
                tree = env[tree]
            if isinstance(tree, _Context):
                tree = tree.value
            if isinstance(tree, dict) and step not in tree and SPLAT in tree:
                tree = env[tree[SPLAT]].value  # it came through the layer's **kwargs
            tree = tree[step]
        if isinstance(tree, fx.Node) and tree in env:
            tree = env[tree]
        if isinstance(tree, _Context):
            tree = tree.value
        if not isinstance(tree, fx.Node):
            raise RewriterError(f"an input of {path} is computed inside the layer in a way that is not supported")
        return tree


# a value of the stream may be read again after a layer changed it in place
_PURE: dict[Any, Any] = {operator.imul: operator.mul, operator.itruediv: operator.truediv}


class _Outputs:
    """A child's returned Python tuple until its elements are picked."""

    def __init__(
        self,
        layer: _Layer,
        node: fx.Node,
        call: PythonCall,
        outputs: Mapping[int, int],
        written: int,
        residual: fx.Node | None,
    ) -> None:
        self.layer, self.node, self.outputs, self.residual = layer, node, outputs, residual
        self.alone = len(outputs) + written == 1
        index = next(iter(outputs)) if self.alone else (*outputs, *[IN_MAPPING] * written)
        mark(node, python=dataclasses.replace(call, index=index))

    def read(self, index: int, place: int | None = None) -> ChildItem:
        """Note that a later call is given an element that the program has nothing of, or the layer returns it."""
        call = marks(self.node).python
        assert call is not None
        mark(self.node, python=dataclasses.replace(call, read=tuple(dict.fromkeys((*call.read, (index, place))))))
        return ChildItem(str(self.node.target).removeprefix(f"{self.layer.path}."), index)

    def item(self, index: int) -> Any:
        if index not in self.outputs:
            return _Context(f"{self.node.name}[{index}]", None, (self, index))
        value = self.node
        if not self.alone:
            place = self.outputs[index]
            after = [n for n in self.node.users if n.target is operator.getitem] or [self.node]
            if (known := next((n for n in after if n.args[1:] == (place,)), None)) is None:
                with self.layer.graph.inserting_after(after[-1]):  # next to the call, however late it is read
                    known = self.layer._add("call_function", operator.getitem, (self.node, place), {})
            value = known
        if self.residual is not None and self.outputs[index] == 0:
            value = self.layer._add("call_function", operator.add, (self.residual, value), {})
        return value
