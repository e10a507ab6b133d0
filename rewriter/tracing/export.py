"""One module, exported and cleaned: `torch.export` (non-strict, meta tensors, dynamic batch and length) to a Body."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree  # the stable subset: tree_flatten, tree_unflatten
from transformers.pytorch_utils import Conv1D

from rewriter import ops
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, args_of, drop_dead_nodes
from rewriter.tracing.attention_matching import recognise
from rewriter.tracing.example import Example
from rewriter.tracing.functionalize import functional
from rewriter.tracing.interception import Recorded, opaque_calls, replaced_forward
from rewriter.tracing.masks import Static, StaticGraph
from rewriter.tracing.meta_model import TRACE_DTYPE
from rewriter.tracing.traced_experts import is_experts
from rewriter.tracing.wiring import leaves_with_paths

aten = torch.ops.aten


def as_leaf(module: nn.Module) -> Leaf | None:
    """The Leaf for a module that stays itself, or None when its inside has to be traced."""
    kind = type(module)
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if kind is nn.Linear:
        options = dict(in_features=module.in_features, out_features=module.out_features, bias=module.bias is not None)
    elif kind is Conv1D:
        options = dict(nf=module.nf, nx=module.nx)
    elif kind is nn.Embedding:
        options = dict(num_embeddings=module.num_embeddings, embedding_dim=module.embedding_dim)
    elif kind is nn.LayerNorm:
        sizes: Any = module.normalized_shape
        options = dict(normalized_shape=sizes[0], eps=module.eps)
        if len(sizes) != 1 or len(parameters) != 2:
            return None
    else:
        return None
    return Leaf(kind.__name__, options, parameters)


def as_linear(graph: fx.Graph, module: nn.Module) -> Leaf | None:
    """The Leaf for a module that computes x Wᵀ + b in words of its own; None for any other."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if not {"weight"} <= parameters.keys() <= {"weight", "bias"} or any(True for _ in module.buffers()):
        return None
    result = args_of(graph.output_node())[0]
    bias = None
    if isinstance(result, fx.Node) and result.target is aten.add.Tensor and not result.kwargs:
        result, bias = args_of(result)
        if not isinstance(bias, fx.Node) or (bias.op, bias.target) != ("get_attr", "bias"):
            return None
    if (bias is not None) != ("bias" in parameters) or not isinstance(result, fx.Node):
        return None
    if result.target is not aten.matmul.default or args_of(result)[0].op != "placeholder":
        return None
    weight = args_of(result)[1]
    if weight.target not in (aten.numpy_T.default, aten.t.default, aten.transpose.int):
        return None
    if args_of(weight)[0].target != "weight" or len(parameters["weight"]) != 2:
        return None
    outputs, inputs = parameters["weight"]
    return Leaf("Linear", dict(in_features=inputs, out_features=outputs, bias=bias is not None), parameters)


def is_lifted(module: nn.Module) -> bool:
    """Whether a module inside a body is kept as a call: leaves, and small modules with tensors of their own (norms)."""
    if as_leaf(module) is not None:
        return True
    if is_experts(module):
        return False
    owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    return owns and not any(True for _ in module.children())


def record_calls(run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> dict[str, Recorded]:
    """The calls of each module while `run()` executes: Python arguments and result, by variant name.

    A module that is called several times with other constants (Gemma 3's rotary embedding, per layer type) has one
    entry per variant: `name`, `name#1`, …
    """
    variants = Variants()
    recorded: dict[str, Recorded] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = Recorded(args, dict(kwargs), output)
            recorded.setdefault(variants.name(name, call), call)

        return hook

    handles = [m.register_forward_hook(hook_for(n), with_kwargs=True) for n, m in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return recorded


class Variants:
    """Numbers the calls of a module by the constants among their arguments, in order of appearance."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def name(self, module: str, call: Recorded) -> str:
        leaves = leaves_with_paths((call.args, call.kwargs))
        constants = repr([(path, None if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves])
        known = self.seen.setdefault(module, [])
        if constants not in known:
            known.append(constants)
        index = known.index(constants)
        return f"{module}#{index}" if index else module


def tensors_of(recorded: Recorded) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The tensor leaves of a call, and how to rebuild (args, kwargs) around other ones."""
    leaves, spec = pytree.tree_flatten((recorded.args, recorded.kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Sequence[Any]) -> tuple[Any, Any]:
        filled = list(leaves)
        for slot, tensor in zip(slots, tensors, strict=True):
            filled[slot] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[i] for i in slots], rebuild


class _Wrapper(nn.Module):
    """Gives a module a flat signature: tensors in, tuple of tensors out."""

    def __init__(self, module: nn.Module, rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]) -> None:
        super().__init__()
        self.inner = module
        self.rebuild = rebuild

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.rebuild(tensors)
        return tuple(leaf for leaf in pytree.tree_leaves(self.inner(*args, **kwargs)) if isinstance(leaf, torch.Tensor))


def export_graph(
    wrapper: nn.Module,
    tensors: Sequence[torch.Tensor],
    example: Example,
    also: Mapping[int, Collection[int]] = types.MappingProxyType({}),
) -> torch.export.ExportedProgram:
    """Non-strict export with every dimension that is a batch or length dynamic; `also` are others, by id of tensor."""
    more = [dict.fromkeys(also.get(id(t), ()), torch.export.Dim.DYNAMIC) for t in tensors]
    dynamic = tuple(example.dynamic(t) | m for t, m in zip(tensors, more, strict=True))
    # stack traces of nodes are read by nobody and cost a third of an export; torch 2.11 cannot leave them out
    quiet = mock.patch.object(fx.config, "do_not_emit_stack_traces", True, create=True)
    with torch.no_grad(), quiet:
        return torch.export.export(wrapper, tuple(tensors), dynamic_shapes=(dynamic,), strict=False)


class BodyTracer:
    """Traces modules to Bodies; modules that are alike (same fingerprint key) share one Body.

    `buffers` are real values by full name, `stored` those whose values lie in checkpoints instead, with the dtype that
    each keeps, `example` the sizes of recorded inputs. `trace(path, module, recorded)` raises RewriterError naming the
    module. `dimensions` may hold dynamic ones of recorded tensors, by id, that their sizes alone do not tell (batch
    times heads).
    """

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        stored: Mapping[str, torch.dtype | None],
        example: Example,
    ) -> None:
        self.buffers, self.stored, self.example = buffers, stored, example
        self.dimensions: dict[int, list[int]] = {}

    def trace(
        self,
        path: str,
        module: nn.Module,
        recorded: Recorded,
        static: Callable[[torch.Tensor], Static | None] = lambda _: None,
        wanted: Collection[int] | None = None,
    ) -> Module:
        """The module behind `path`, as it was called. `static` knows the inputs that depend on lengths alone (masks);
        `wanted` are the indices, among the returned tensors, of those that the caller uses (None: all)."""
        leaf = as_leaf(module)
        if leaf is not None:
            return leaf
        if type(module) is nn.Dropout:
            return Leaf("Dropout", {"p": module.p}, {})
        lifted = {name: m for name, m in module.named_modules() if name and is_lifted(m)}
        tensors, rebuild = tensors_of(recorded)
        calls = record_calls(lambda: module(*recorded.args, **recorded.kwargs), lifted)
        children: dict[str, Module] = {}
        for name, call in calls.items():
            children[name] = self.trace(f"{path}.{base_name(name)}", lifted[base_name(name)], call)
        try:
            with lifted_modules(lifted, calls):
                exported = export_graph(_Wrapper(module, rebuild), tensors, self.example, self.dimensions)
                graph, used = clean(functional(exported), prefix="inner.")
            if wanted is not None:
                graph.output_node().args = (tuple(args_of(graph.output_node())[0][i] for i in sorted(wanted)),)
                drop_dead_nodes(graph)
            self._recognise(path, graph, used, tensors, static)
        except RewriterError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            raise RewriterError(
                f"{path} ({type(module).__name__}) cannot be exported: {type(error).__name__}: {text[0]}"
            ) from error
        for node in graph.nodes:
            if node.op == "call_module" and isinstance(child := children[str(node.target)], Body):
                node.args = tuple(args_of(node)[i] for i in child.kept)
        kept = prune_inputs(graph, input_names(module, recorded))
        parameters = {n: tuple(p.shape) for n, p in module.named_parameters() if n in used}
        own = {n: b for n, b in module.named_buffers() if n in used}
        stored = {n: self.stored[f"{path}.{n}"] for n in own if f"{path}.{n}" in self.stored}
        parameters |= {n: tuple(own[n].shape) for n in stored}
        buffers = {n: self.buffers[f"{path}.{n}"] for n in own if n not in stored}
        buffers |= {n: value for n, value in used.items() if value is not None}
        outputs = len(args_of(graph.output_node())[0])
        if outputs == 1:
            graph.output_node().args = (args_of(graph.output_node())[0][0],)
        if (linear := as_linear(graph, module)) is not None:
            return linear
        called = [args_of(n)[1] for n in exported.graph.nodes if n.target is aten.dropout.default]
        dropout = max([0.0, *called, *(m.p for m in module.modules() if isinstance(m, nn.Dropout))])
        if isinstance(attention := getattr(module, "attention_dropout", None), float):  # a module is among those above
            dropout = max(dropout, attention)
        name = type(module).__name__
        return Body(name, graph, parameters, buffers, children, outputs, kept, dropout, stored=stored)

    def _recognise(
        self,
        path: str,
        graph: fx.Graph,
        used: Mapping[str, torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        static: Callable[[torch.Tensor], Static | None],
    ) -> None:
        buffers = {n: self.buffers.get(f"{path}.{n}") if value is None else value for n, value in used.items()}
        known = {n: value for n, value in buffers.items() if value is not None}
        inputs = [n for n in graph.nodes if n.op == "placeholder" and n.target != "ctx"]
        found = {n: s for n, t in zip(inputs, tensors, strict=True) if (s := static(t)) is not None}
        recognise(graph, StaticGraph(graph, known, found, self.example.length))


def base_name(variant: str) -> str:
    """`rotary_emb#1` is a variant of the module `rotary_emb`."""
    return variant.partition("#")[0]


@contextlib.contextmanager
def lifted_modules(modules: Mapping[str, nn.Module], calls: Mapping[str, Recorded]) -> Iterator[None]:
    """Calling one of `modules` records one `rewriter_trace::call` with its variant name, as `record_calls` gave it."""
    functions: dict[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = {}
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    variants = Variants()

    def lift(name: str, module: nn.Module) -> None:
        rebuilds: dict[str, Any] = {}
        specs: dict[str, Any] = {}

        def run_variant(key: str, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            args, kwargs = rebuilds[key](inputs)
            leaves, specs[key] = pytree.tree_flatten(type(module).forward(module, *args, **kwargs))
            return leaves

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Recorded(args, kwargs)
            key = variants.name(name, call)
            tensors, rebuilds[key] = tensors_of(call)
            outputs = torch.ops.rewriter_trace.call(tensors, key)
            return pytree.tree_unflatten(list(outputs), specs[key])

        for key in calls:
            if base_name(key) == name:
                functions[key] = functools.partial(run_variant, key)
        forwards[module] = forward

    for name in dict.fromkeys(map(base_name, calls)):
        lift(name, modules[name])
    with opaque_calls(functions), replaced_forward(forwards):
        yield


def clean(exported: torch.export.ExportedProgram, prefix: str) -> tuple[fx.Graph, dict[str, torch.Tensor | None]]:
    """The exported graph in the IR's own vocabulary, and the tensors it reads.

    Parameters and buffers become `get_attr` under their names without `prefix`; lifted operators become attention,
    experts and `call_module`; casts to the trace dtype become `type_as_model`; export's assertions and no-op slices go.
    Returned names map to a value for constants made in the forward itself, else to None.
    """
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    used: dict[str, torch.Tensor | None] = {}
    sizes: dict[Any, fx.Node] = {}

    def read(name: str, value: torch.Tensor | None, node: fx.Node) -> fx.Node:
        used[name] = value
        new = graph.get_attr(name)
        new.meta["val"] = node.meta["val"]
        return new

    ctx: fx.Node | None = None
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if n.name not in names and n.name not in constants]
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{i}")
        env[node].meta["val"] = node.meta["val"]
    attends = any(n.target is torch.ops.rewriter_trace.attention.default for n in exported.graph.nodes)
    if attends:
        ctx = graph.placeholder("ctx")
    in_model_dtype: list[fx.Node] = []
    for node in placeholders:
        if node.name in names and node.users:
            env[node] = read(names[node.name].removeprefix(prefix), None, node)
            if names[node.name] in signature.non_persistent_buffers and _is_model_dtype(node):
                in_model_dtype.append(node)
        elif node.name in constants and node.users:
            value = exported.constants[constants[node.name]]
            if value.is_meta:
                raise RewriterError("a tensor is made from Python values in a way that loses them on the meta device")
            env[node] = read(f"constant_{len(used)}", value, node)
    model_dtype = [
        env[n] for n in (*inputs, *placeholders) if n in env and _is_model_dtype(n) and n not in in_model_dtype
    ]

    def emit(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        new = graph.call_function(target, args, kwargs or {})
        new.meta["val"] = node.meta.get("val")
        return new

    def size_of(size: Any, owner: fx.Node) -> fx.Node:
        """A dynamic size of `owner`: one node per symbol, of the first input that has it, so that code reads alike."""
        key = str(size)
        if key not in sizes:
            source = next(
                (env[n], d)
                for n in (*inputs, owner)
                for d, extent in enumerate(n.meta["val"].shape)
                if str(extent) == key
            )
            sizes[key] = graph.call_function(aten.sym_size.int, source)
            sizes[key].meta["val"] = size
        return sizes[key]

    def like(node: fx.Node) -> fx.Node:
        """A value in the model's dtype: an input or parameter, or else what a call returned before `node`."""
        if node.target is torch.ops.rewriter_trace.mask.default:
            batch_length = [str(s) for s in (node.meta["val"].shape[0], node.meta["val"].shape[2])]
            found = [
                n for n in graph.nodes if _is_model_dtype(n) and [*map(str, n.meta["val"].shape[:2])] == batch_length
            ]
        else:
            found = model_dtype or [n for n in graph.nodes if n.op == "call_module" and _is_model_dtype(n)]
        if not found and (early := _ready_call(exported.graph, env)) is not None:
            convert(early)
            return env[early][0] if isinstance(env[early], tuple) else env[early]
        if not found:
            raise RewriterError(
                f"{node.target} makes a value in the model's dtype, but no value before it has that dtype"
            )
        return found[0]

    slot = itertools.count()

    def convert(node: fx.Node) -> None:
        if node.op == "output":
            graph.output(fx.map_arg(args_of(node)[0], env.__getitem__))
            return
        if node.op != "call_function":
            return
        if node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
            return
        args: Any = fx.map_arg(node.args, env.__getitem__)
        kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, env.__getitem__))
        target = node.target
        if target is aten.sym_size.int:
            env[node] = size_of(node.meta["val"], args_of(node)[0])
        elif target in _LIKE_ANOTHER:  # its sizes as arguments: those of the heads are split over ranks
            shape = [s if isinstance(s, int) else size_of(s, args_of(node)[1]) for s in node.meta["val"].shape]
            env[node] = emit(node, _LIKE_ANOTHER[target], (args[0], shape))
        elif target is torch.ops.rewriter_trace.attention.default:
            q, k, v, sinks, bias, spec = args
            extra = {key: value for key, value in (("sinks", sinks), ("bias", bias)) if value is not None}
            keywords = {"slot": next(slot), "mask": ops.MaskSpec("bidirectional"), **json.loads(spec), **extra}
            out = emit(node, ops.attention, (q, k, v, ctx), keywords)
            out.meta["val"] = node.meta["val"].transpose(1, 2)
            env[node] = emit(node, aten.transpose.int, (out, 1, 2))
        elif target is torch.ops.rewriter_trace.mask.default:
            spec = ops.MaskSpec(args[1], args[2])
            env[node] = emit(node, ops.additive_mask, (like(node),), {"mask": spec})
        elif target is torch.ops.rewriter_trace.experts.default:
            *tensors, options = args
            while tensors[-1] is None:
                tensors.pop()
            env[node] = emit(node, ops.experts, tuple(tensors), json.loads(options))
        elif target is torch.ops.rewriter_trace.call.default:
            new = graph.call_module(args[1], tuple(args[0]))
            new.meta["val"] = node.meta["val"][0] if len(node.meta["val"]) == 1 else node.meta["val"]
            env[node] = (new,) if len(node.meta["val"]) == 1 else new
        elif target is aten.view.default and _is_attended(args_of(node)[0]):
            # the source's attention returns memory in the order of its dimensions, the IR's need not
            env[node] = emit(node, aten.reshape.default, args)
        elif target is operator.getitem:
            env[node] = args[0][args[1]] if isinstance(args[0], tuple) else emit(node, target, args)
        elif _is_no_op(node):
            env[node] = args[0]
        elif (cast := _cast_dtype(node)) is not None:
            source = args[0]
            if cast == TRACE_DTYPE:
                env[node] = emit(node, ops.type_as_model, (source, like(node)))
            else:
                env[node] = emit(node, aten.to.dtype, (source, cast))
        else:
            kwargs.pop("pin_memory", None)
            if target is aten.view.default:  # whether that is possible depends on strides, which the IR leaves open
                target = aten.reshape.default
            if kwargs.pop("device", None) is not None and model_dtype:
                kwargs["device"] = "like"  # resolved to the device of the body's first input
            if not any(isinstance(x, torch.dtype) and x == TRACE_DTYPE for x in (*args, *kwargs.values())):
                env[node] = emit(node, target, args, kwargs)
                return
            # the model's dtype as a constant (`softmax(x, dtype=x.dtype)`): the operator follows its input instead
            args = tuple(None if a == TRACE_DTYPE else a for a in args)
            kwargs = {k: v for k, v in kwargs.items() if v != TRACE_DTYPE}
            if not isinstance(first := args_of(node)[0], fx.Node):  # a tensor made in the model's dtype
                made = emit(node, target, args, {**kwargs, "dtype": torch.float32})
                env[node] = emit(node, ops.type_as_model, (made, like(node)))
                return
            if not _is_model_dtype(first):
                args = (emit(first, ops.type_as_model, (args[0], like(node))), *args[1:])
            env[node] = emit(node, target, args, kwargs)

    for node in in_model_dtype:  # buffers are kept in the dtype that they are made in
        env[node] = emit(node, ops.type_as_model, (env[node], like(node)))
    for node in exported.graph.nodes:
        if node not in env:
            convert(node)
    drop_dead_nodes(graph)
    live = {n.target for n in graph.nodes if n.op == "get_attr"}
    return graph, {name: value for name, value in used.items() if name in live}


def _ready_call(graph: fx.Graph, env: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The first call of a lifted module that returns the model's dtype and whose inputs are all there (embeddings)."""
    calls = (n for n in graph.nodes if n.target is torch.ops.rewriter_trace.call.default and n not in env)
    typed = (n for n in calls if n.meta["val"][0].dtype == TRACE_DTYPE)
    return next((n for n in typed if all(source in env for source in n.all_input_nodes)), None)


def input_names(module: nn.Module, recorded: Recorded) -> list[str]:
    """What the module's own signature calls each tensor of a call."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    names: list[str] = []
    for path, leaf in leaves_with_paths((recorded.args, recorded.kwargs)):
        if not isinstance(leaf, torch.Tensor):
            continue
        base = str(path[1]) if path[0] == 1 else parameters[path[1]]
        if base == "position_embeddings" and len(path) == 3 and path[2] in (0, 1):
            names.append(("cos", "sin")[path[2]])
        else:
            names.append("_".join([base, *map(str, path[2:])]))
    return names


def prune_inputs(graph: fx.Graph, names: list[str]) -> tuple[int, ...]:
    """Name the placeholders, drop the unused ones (never the first), and return the indices of those that stay."""
    kept: list[int] = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder" and n.target != "ctx"]
    for index, (node, name) in enumerate(zip(placeholders, names, strict=True)):
        if index and not node.users:
            graph.erase_node(node)
            continue
        kept.append(index)
        node.target = name
        node._rename(name)
    return tuple(kept)


# operators that give one tensor the shape of another, and those that take the sizes
_LIKE_ANOTHER = {
    aten.view_as.default: aten.reshape.default,
    aten.reshape_as.default: aten.reshape.default,
    aten.expand_as.default: aten.expand.default,
}


def _is_attended(node: fx.Node) -> bool:
    """Whether an exported value is what attention returned, but for casts."""
    while _is_no_op(node) or _cast_dtype(node) is not None:
        node = args_of(node)[0]
    return node.target is torch.ops.rewriter_trace.attention.default


def _is_model_dtype(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == TRACE_DTYPE


_ALIASES = (aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh_copy.default)


def _is_no_op(node: fx.Node) -> bool:
    if node.target in _ALIASES:
        return True
    if node.target is aten.dropout.default:
        return args_of(node)[1] == 0.0 or args_of(node)[2] is False
    if node.target is aten.slice.Tensor:
        start = args_of(node)[2] if len(node.args) > 2 else None
        end = args_of(node)[3] if len(node.args) > 3 else None
        step = args_of(node)[4] if len(node.args) > 4 else 1
        return start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))
    if node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default):
        source = args_of(node)[0].meta.get("val")
        wanted = _cast_dtype(node)
        # a cast of a float32 value to float32 is the identity whatever the model's dtype; one from the model's is not
        return wanted is None or (source is not None and source.dtype == wanted)
    return False


def _cast_dtype(node: fx.Node) -> Any:
    """The dtype that a cast asks for; None when it asks for none."""
    if node.target is aten.to.dtype:
        return args_of(node)[1]
    if node.target is aten.to.device:
        return args_of(node)[2] if len(node.args) > 2 else None
    if node.target in (aten.to.dtype_layout, aten._to_copy.default):
        return node.kwargs.get("dtype")
    return None
