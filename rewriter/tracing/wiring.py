"""The wiring of one decoder layer: its `forward` traced by torch.fx with the layer's children as leaves."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from rewriter.ir import SPLAT, args_of, drop_dead_nodes
from rewriter.ir.marks import mark
from rewriter.tracing.model_errors import refused


class _LayerTracer(fx.Tracer):
    """Keeps every child a leaf; a `**kwargs` that is passed on holds one key, so that the pass-on can be seen."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@functools.lru_cache(maxsize=64)
def forward_signature(kind: Any) -> inspect.Signature:
    """The signature of a module class's forward. (A class of modules is hashable, which its type does not say.)"""
    return inspect.signature(kind.forward)


def layer_signature(layer: nn.Module) -> tuple[tuple[str, ...], bool]:
    """(names of the layer's parameters, whether it takes **kwargs)."""
    kind: Any = type(layer)
    parameters = forward_signature(kind).parameters.values()
    names = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self")
    return tuple(names), any(p.kind == p.VAR_KEYWORD for p in parameters)


def trace_wiring(layer: nn.Module, absent: Mapping[str, Any], inlined: Collection[str] = ()) -> fx.Graph:
    """One fx graph of `layer.forward`: placeholders are its parameters, `call_module` nodes its children.

    `absent` are the arguments that the model leaves at a constant whatever happens (None): they are passed as such.
    `inlined` are the paths of children whose own forward is traced as part of the layer, since they add to the stream.
    A node named by SPLAT stands for the layer's `**kwargs`. Raises RewriterError when the control flow depends on
    values.
    """
    names, var_kwargs = layer_signature(layer)
    tracer = _LayerTracer()
    tracer.root = layer
    tracer.graph = fx.Graph(tracer_cls=_LayerTracer)
    tracer.tensor_attrs = {}
    tracer.submodule_paths = {module: name for name, module in layer.named_modules()}
    arguments: dict[str, Any] = {
        name: absent[name] if name in absent else tracer.create_proxy("placeholder", name, (), {}) for name in names
    }
    if var_kwargs:
        arguments[SPLAT] = tracer.create_proxy("placeholder", SPLAT, (), {})
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tracer.path_of_module(module) in inlined:
            return type(module).forward(module, *args, **kwargs)
        return tracer.call_module(module, lambda *a, **k: original(module, *a, **k), args, kwargs)

    with refused(f"the wiring of {type(layer).__name__} cannot be traced"):
        with mock.patch.object(nn.Module, "__call__", call):
            result = type(layer).forward(layer, **arguments)
        tracer.create_node("output", "output", (_without_extras(tracer.create_arg(result)),), {})
    for node in tracer.graph.nodes:
        if node.op == "call_module":  # before unused elements go: what the layer unpacks says how many there are
            mark(node, returned=_unpacked(node))
    drop_dead_nodes(tracer.graph)
    _cast_writes_instead_of_the_stream(tracer.graph)
    return tracer.graph


_GLUE = (
    operator.add, operator.iadd, operator.mul, operator.sub, operator.truediv, operator.getitem, torch.add, torch.mul,
)  # fmt: skip
_GLUE_METHODS = ("to", "type", "float", "add", "add_", "mul", "contiguous")


def only_calls_and_sums(wiring: fx.Graph) -> bool:
    """True if a layer's wiring only calls children and adds, scales, drops out or converts what they return."""
    placeholders = [n for n in wiring.nodes if n.op == "placeholder"]
    handed_on = all(u.op == "call_module" or u.target is operator.getitem for p in placeholders[1:] for u in p.users)
    return handed_on and all(
        node.op in ("placeholder", "output", "call_module", "get_attr")
        or node.target in (_GLUE if node.op == "call_function" else _GLUE_METHODS)
        or dtype_of(node) is not None
        or getattr(node.target, "__name__", "") == "dropout"
        for node in wiring.nodes
    )


def _unpacked(node: fx.Node) -> int | None:
    """The length of the tuple that a child returns, as far as its layer picks elements; None for a bare tensor."""
    picked = [args_of(u)[1] for u in node.users if u.target is operator.getitem]
    return 1 + max(picked) if picked and all(isinstance(i, int) for i in picked) else None


def _cast_writes_instead_of_the_stream(graph: fx.Graph) -> None:
    """Write x.to(float32) + f as x + f.to(float32), which promotes alike: so that no cast stands on the stream."""
    for cast in list(graph.nodes):
        if not is_cast(cast, torch.float32):
            continue
        source = args_of(cast)[0]
        for add in list(cast.users):
            if add.target not in (operator.add, operator.iadd, torch.add) or len(add.all_input_nodes) != 2:
                continue
            other = next(n for n in add.all_input_nodes if n is not cast)
            with graph.inserting_before(add):
                promoted = graph.call_method("to", (other, torch.float32))
            add.replace_input_with(other, promoted)
            add.replace_input_with(cast, source)
        if not cast.users:
            graph.erase_node(cast)


def dtype_of(node: fx.Node) -> fx.Node | None:
    """x where a node is `x.dtype`."""
    return args_of(node)[0] if node.target is getattr and args_of(node)[1] == "dtype" else None


def cast_to_dtype_of(node: fx.Node) -> fx.Node | None:
    """y where a node is `x.to(y.dtype)`."""
    given = [*args_of(node)[1:], *node.kwargs.values()]
    is_call = node.op == "call_method" and node.target in ("to", "type") and len(given) == 1
    return dtype_of(given[0]) if is_call and isinstance(given[0], fx.Node) else None


def is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    """True if a node of a layer's wiring converts its first argument to `dtype`."""
    if node.op != "call_method" or node.target not in ("to", "type", "float"):
        return False
    given = [*args_of(node)[1:], *node.kwargs.values()]
    return given == [dtype] or (node.target == "float" and dtype == torch.float32)


def _without_extras(result: Any) -> Any:
    """Result of a layer; a tuple or list that something else is appended to (attention weights) without that."""
    first = result
    while isinstance(first, fx.Node) and first.target in (operator.add, operator.iadd):
        first = first.args[0]
    return tuple(first) if isinstance(first, (tuple, list)) else result


def leaves_with_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) over tuples, lists and dicts; everything else is a leaf."""
    if isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from leaves_with_paths(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves_with_paths(item, (*path, key))
    else:
        yield path, tree
