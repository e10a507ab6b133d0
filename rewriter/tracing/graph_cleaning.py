"""An exported graph in the vocabulary of the IR.

Parameters and buffers become `get_attr`; intercepted operators become attention, experts and `call_module`; casts to
the trace dtype become `type_as_model`; export's assertions and no-op slices go.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of, drop_dead_nodes, ops
from rewriter.ir.op_semantics import argument, aten, function_of, kind_of, named_arguments
from rewriter.tracing.interception import base_name, layer_number, variant_name
from rewriter.tracing.key_blocks import conversions
from rewriter.tracing.meta_model import TRACE_DTYPE
from rewriter.tracing.token_mixing import tokens_beyond

_traced = torch.ops.rewriter_trace


def clean(
    exported: torch.export.ExportedProgram, prefix: str, *, casts_stay: bool = False
) -> tuple[fx.Graph, dict[str, torch.Tensor | None]]:
    """(the exported graph in the IR's vocabulary, the tensors that it reads by name without `prefix`).

    A name maps to the value of a constant that was made in the forward itself, and to None for all others.
    `casts_stay`: values in the model's dtype may really be wider, so that a cast to it is one. Raises
    RewriterError where a value in the model's dtype is made and nothing before it has that dtype.
    """
    return _Cleaner(exported, prefix, casts_stay).run()


class _Cleaner:
    """`env` maps nodes of the exported graph to those of the new one (a tuple of them for several results)."""

    def __init__(self, exported: torch.export.ExportedProgram, prefix: str, casts_stay: bool) -> None:
        self.exported, self.prefix, self.casts_stay = exported, prefix, casts_stay
        signature = exported.graph_signature
        self.names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.constants = signature.inputs_to_lifted_tensor_constants
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.used: dict[str, torch.Tensor | None] = {}
        self.sizes: dict[str, fx.Node] = {}
        self.slot = itertools.count()
        placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
        self.inputs = [n for n in placeholders if n.name not in self.names and n.name not in self.constants]
        # tensors in the order of first use: models may register them in an order that differs between processes
        read = dict.fromkeys(source for n in exported.graph.nodes for source in n.all_input_nodes)
        self.placeholders = [*self.inputs, *(n for n in read if n.op == "placeholder" and n not in self.inputs)]
        self.ctx: fx.Node | None = None
        self.model_dtype: list[fx.Node] = []

    def run(self) -> tuple[fx.Graph, dict[str, torch.Tensor | None]]:
        for i, node in enumerate(self.inputs):
            self.env[node] = self.graph.placeholder(f"x{i}")
            self.env[node].meta["val"] = node.meta["val"]
        if any(
            n.target in (_traced.attention.default, *_recurrent(), *conversions()) for n in self.exported.graph.nodes
        ):
            self.ctx = self.graph.placeholder("ctx")
        kept = self._read_tensors()
        known = [n for n in (*self.inputs, *self.placeholders) if n in self.env and n not in kept]
        self.model_dtype = [self.env[n] for n in known if _is_model_dtype(n)]
        for node in kept:  # buffers are kept in the dtype that they are made in
            self.env[node] = self._emit(node, ops.type_as_model, (self.env[node], self._like(node)))
        for node in self.exported.graph.nodes:
            if node not in self.env:
                self._convert(node)
        drop_dead_nodes(self.graph)
        live = {n.target for n in self.graph.nodes if n.op == "get_attr"}
        return self.graph, {name: value for name, value in self.used.items() if name in live}

    # --- tensors and sizes

    def _read_tensors(self) -> list[fx.Node]:
        """Make the `get_attr` of parameters, buffers and constants. Returns the buffers in the model's dtype that no
        checkpoint holds."""
        kept = []
        for node in self.placeholders:
            if node.name in self.names:
                self.env[node] = self._read(self.names[node.name].removeprefix(self.prefix), None, node)
                not_saved = self.names[node.name] in self.exported.graph_signature.non_persistent_buffers
                kept += [node] if not_saved and _is_model_dtype(node) else []
            elif node.name in self.constants:
                value = self.exported.constants[self.constants[node.name]]
                if value.is_meta:
                    raise RewriterError(
                        "a tensor is made from Python values in a way that loses them on the meta device"
                    )
                self.env[node] = self._read(f"constant_{len(self.used)}", value, node)
        return kept

    def _read(self, name: str, value: torch.Tensor | None, node: fx.Node) -> fx.Node:
        self.used[name] = value
        new = self.graph.get_attr(name)
        new.meta["val"] = node.meta["val"]
        return new

    def _emit(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs or {})
        new.meta["val"] = node.meta.get("val")
        return new

    def _size_of(self, size: Any, owner: fx.Node) -> fx.Node:
        """A dynamic size of `owner`: one node per symbol, of the first input that has it, so that code reads alike."""
        key = str(size)
        if key not in self.sizes:
            owners = ((n, d) for n in (*self.inputs, owner) for d, s in enumerate(n.meta["val"].shape) if str(s) == key)
            source, dim = next(owners)
            self.sizes[key] = self.graph.call_function(aten.sym_size.int, (self.env[source], dim))
            self.sizes[key].meta["val"] = size
        return self.sizes[key]

    def _like(self, node: fx.Node) -> fx.Node:
        """A value in the model's dtype: an input or parameter, or else what a call returned before `node`."""
        if node.target is _traced.mask.default:
            sizes = [str(s) for s in (node.meta["val"].shape[0], node.meta["val"].shape[2])]
            typed = filter(_is_model_dtype, self.graph.nodes)
            typed_nodes = [n for n in typed if [*map(str, n.meta["val"].shape[:2])] == sizes]
        else:
            typed_nodes = self.model_dtype or [
                n for n in self.graph.nodes if n.op == "call_module" and _is_model_dtype(n)
            ]
        if typed_nodes:
            return typed_nodes[0]
        # the first call of an intercepted module that returns that dtype and whose inputs are all there (embeddings)
        calls = (n for n in self.exported.graph.nodes if n.target is _traced.call.default and n not in self.env)
        of_dtype = (n for n in calls if n.meta["val"][0].dtype == TRACE_DTYPE)
        early = next((n for n in of_dtype if all(source in self.env for source in n.all_input_nodes)), None)
        if early is None:
            raise RewriterError(
                f"{node.target} makes a value in the model's dtype, but no value before it has that dtype"
            )
        self._convert(early)
        result: fx.Node | tuple[fx.Node, ...] = self.env[early]
        return result[0] if isinstance(result, tuple) else result

    # --- operators

    def _convert(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.output(fx.map_arg(args_of(node)[0], self.env.__getitem__))
        elif node.op == "call_function" and node.target not in _ASSERTIONS:
            args: Any = fx.map_arg(node.args, self.env.__getitem__)
            if (converter := _converters().get(node.target)) is not None:
                self.env[node] = converter(self, node, args)
            elif node.target is aten.view.default and _is_attended(args_of(node)[0]):
                # the source's attention returns memory in the order of its dimensions, the IR's need not
                self.env[node] = self._emit(node, aten.reshape.default, args)
            elif _is_no_op(node) and not (self.casts_stay and _cast_dtype(node) == TRACE_DTYPE):
                self.env[node] = args[0]
            elif (dtype := _cast_dtype(node)) is None:
                self.env[node] = self._other(node, args)
            elif dtype == TRACE_DTYPE:
                self.env[node] = self._emit(node, ops.type_as_model, (args[0], self._like(node)))
            else:
                self.env[node] = self._emit(node, aten.to.dtype, (args[0], dtype))

    def _size(self, node: fx.Node, args: Any) -> fx.Node:
        return self._size_of(node.meta["val"], args_of(node)[0])

    def _like_another(self, node: fx.Node, args: Any) -> fx.Node:
        """A shape that another tensor lends: its sizes as arguments, since those of the heads are split over ranks."""
        shape = [s if isinstance(s, int) else self._size_of(s, args_of(node)[1]) for s in node.meta["val"].shape]
        target = aten.expand.default if node.target is aten.expand_as.default else aten.reshape.default
        return self._emit(node, target, (args[0], shape))

    def _attention(self, node: fx.Node, args: Any) -> fx.Node:
        q, k, v, sinks, bias, by_distance, keys, spec = args
        given = {"sinks": sinks, "bias": bias, "by_distance": by_distance, "keys": keys}
        extra = {key: value for key, value in given.items() if value is not None}
        keywords = {"slot": next(self.slot), "mask": ops.MaskSpec("bidirectional"), **json.loads(spec), **extra}
        out = self._emit(node, ops.attention, (q, k, v, self.ctx), keywords)
        out.meta["val"] = node.meta["val"].transpose(1, 2)
        return self._emit(node, aten.transpose.int, (out, 1, 2))

    def _recurrence(self, node: fx.Node, args: Any) -> fx.Node:
        *tensors, text = args
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return self._emit(node, _recurrent()[node.target], (*tensors, self.ctx), {"slot": next(self.slot), **options})

    def _of_blocks(self, node: fx.Node, args: Any) -> fx.Node:
        target, keeps = conversions()[node.target]
        *tensors, text = args
        slot = {"slot": next(self.slot)} if keeps else {}
        rule = {"mask": ops.MaskSpec("causal")} if target is ops.top_keys else {}
        return self._emit(node, target, (*tensors, self.ctx), {**slot, **rule, **json.loads(text)})

    def _mask(self, node: fx.Node, args: Any) -> fx.Node:
        _, blocks, kind, size, _ = args
        given = {"blocks": tuple(blocks)} if blocks else {}
        return self._emit(node, ops.additive_mask, (self._like(node),), {"mask": ops.MaskSpec(kind, size), **given})

    def _experts(self, node: fx.Node, args: Any) -> fx.Node:
        *tensors, options = args
        while tensors[-1] is None:
            tensors.pop()
        return self._emit(node, ops.experts, tuple(tensors), json.loads(options))

    def _call(self, node: fx.Node, args: Any) -> Any:
        new = self.graph.call_module(args[1], tuple(args[0]))
        one = len(node.meta["val"]) == 1
        new.meta["val"] = node.meta["val"][0] if one else node.meta["val"]
        return (new,) if one else new

    def _item(self, node: fx.Node, args: Any) -> Any:
        return args[0][args[1]] if isinstance(args[0], tuple) else self._emit(node, node.target, args)

    def _other(self, node: fx.Node, args: Any) -> fx.Node:
        kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, self.env.__getitem__))
        kwargs.pop("pin_memory", None)
        target: Any = node.target
        if target is aten.view.default:  # whether that is possible depends on strides, which the IR leaves open
            target = aten.reshape.default
        if kwargs.pop("device", None) is not None and self.model_dtype:
            kwargs["device"] = "like"  # resolved to the device of the body's first input
        if not any(isinstance(x, torch.dtype) and x == TRACE_DTYPE for x in (*args, *kwargs.values())):
            return self._emit(node, target, args, kwargs)
        # the model's dtype as a constant (`softmax(x, dtype=x.dtype)`): the operator follows its input instead
        args = tuple(None if a == TRACE_DTYPE else a for a in args)
        kwargs = {k: v for k, v in kwargs.items() if v != TRACE_DTYPE}
        if not isinstance(first := args_of(node)[0], fx.Node):  # a tensor made in the model's dtype
            made = self._emit(node, target, args, {**kwargs, "dtype": torch.float32})
            return self._emit(node, ops.type_as_model, (made, self._like(node)))
        if not _is_model_dtype(first):
            args = (self._emit(first, ops.type_as_model, (args[0], self._like(node))), *args[1:])
        return self._emit(node, target, args, kwargs)


_ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)


@functools.cache
def _recurrent() -> dict[Any, Any]:
    """By operator that records a part of a recurrent mixer, the operator of the IR."""
    names = ("causal_conv", "delta_rule", "state_space", "selective_scan", "linear_scan")
    return {getattr(_traced, name).default: getattr(ops, name) for name in names}


@functools.cache
def _converters() -> dict[Any, Callable[[_Cleaner, fx.Node, Any], Any]]:
    """By operator, its converter. The operators of `rewriter_trace` are defined by the files that record them."""
    return {
        aten.sym_size.int: _Cleaner._size,
        aten.view_as.default: _Cleaner._like_another,
        aten.reshape_as.default: _Cleaner._like_another,
        aten.expand_as.default: _Cleaner._like_another,
        _traced.attention.default: _Cleaner._attention,
        _traced.mask.default: _Cleaner._mask,
        _traced.experts.default: _Cleaner._experts,
        **dict.fromkeys(_recurrent(), _Cleaner._recurrence),
        **dict.fromkeys(conversions(), _Cleaner._of_blocks),
        _traced.call.default: _Cleaner._call,
        operator.getitem: _Cleaner._item,
    }


def _is_attended(node: fx.Node) -> bool:
    """True if an exported value is what attention returned, but for casts."""
    while _is_no_op(node) or _cast_dtype(node) is not None:
        node = args_of(node)[0]
    return node.target is _traced.attention.default


def _is_model_dtype(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == TRACE_DTYPE


def _is_no_op(node: fx.Node) -> bool:
    if kind_of(node) == "alias" or _is_times_one(node):
        return True
    if node.target is aten.dropout.default:
        return args_of(node)[1] == 0.0 or args_of(node)[2] is False
    if node.target is aten.slice.Tensor:
        start, end, step = (argument(node, name) for name in ("start", "end", "step"))
        whole = start in (0, None) or (isinstance(start, fx.Node) and _keeps_tokens(node))
        return whole and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))
    if kind_of(node) == "cast" and "dtype" in named_arguments(node.target, node.args, node.kwargs):
        wanted, value = _cast_dtype(node), args_of(node)[0].meta.get("val")
        # a cast of a float32 value to float32 is the identity for every dtype of a model; one from the model's is not
        return wanted is None or (value is not None and value.dtype == wanted)
    return False


def _keeps_tokens(node: fx.Node) -> bool:
    """True for the last n tokens of n."""
    sizes = [n.meta["val"].shape[argument(node, "dim")] for n in (args_of(node)[0], node)]
    before, after = map(tokens_beyond, sizes)
    return before is not None and before == after


def _is_times_one(node: fx.Node) -> bool:
    """True if a node multiplies or divides by the number 1 and leaves the dtype as it is: every bit stays."""
    if function_of(node) not in ("mul", "div") or len(node.args) != 2 or type(args_of(node)[1]) not in (int, float):
        return False
    source = args_of(node)[0].meta["val"]
    return args_of(node)[1] == 1 and isinstance(source, torch.Tensor) and source.dtype == node.meta["val"].dtype


def _cast_dtype(node: fx.Node) -> Any:
    """The dtype that a cast asks for; None when it asks for none."""
    return argument(node, "dtype") if kind_of(node) == "cast" else None


# --- the order of the calls around the layers


def sort_by_use(graph: fx.Graph) -> dict[str, str]:
    """Sort the exported graph around the layers in place, and number the variants of its modules in the new order.

    Returns the new name of each variant. Layers and placeholders keep their places, and nothing passes a layer.
    """
    calls = [n for n in graph.nodes if n.target is torch.ops.rewriter_trace.call.default]
    layers = {n for n in calls if layer_number(args_of(n)[1]) is not None}
    place = _by_first_use([*(n for n in calls if n in layers), graph.output_node()])
    between: dict[int, list[fx.Node]] = {0: []}  # by number of layers before
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            between.setdefault(len(between) - 1 + (node in layers), []).append(node)
    for nodes in between.values():
        for node in sorted(nodes, key=lambda n: place.get(n, len(place))):  # what nothing reads comes last
            graph.output_node().prepend(node)
    modules = [n for n in graph.nodes if n in set(calls) - layers]
    names = _numbered(args_of(n)[1] for n in modules)
    for node in modules:
        node.args = (args_of(node)[0], names[args_of(node)[1]])
    return names


def _by_first_use(roots: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The places of the roots and all that they read, each after what it reads itself."""
    places: dict[fx.Node, int] = {}
    todo = [(root, False) for root in reversed([*roots])]
    while todo:
        node, ready = todo.pop()
        if node in places:
            continue
        if ready:
            places[node] = len(places)
        else:
            todo += [(node, True), *((source, False) for source in reversed(node.all_input_nodes))]
    return places


def _numbered(variants: Iterable[str]) -> dict[str, str]:
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for variant in dict.fromkeys(variants):
        base = base_name(variant)
        names[variant] = variant_name(base, counts[base])
        counts[base] += 1
    return names
