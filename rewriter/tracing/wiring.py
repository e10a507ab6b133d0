"""The wiring of one decoder layer: its `forward` traced by torch.fx with the layer's children as leaves, and with the
arguments that the model gives it: which of them stay None in every setting is found by running the model."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import DynamicCache, PreTrainedModel

from rewriter.common.cache_names import cache_argument
from rewriter.common.errors import RewriterError
from rewriter.ir import SPLAT, args_of, drop_dead_nodes
from rewriter.ir.marks import mark
from rewriter.ir.op_semantics import kind_of
from rewriter.tracing.image_features import require_text_alone
from rewriter.tracing.interception import replaced_forward
from rewriter.tracing.model_errors import first_line, refused


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


def trace_wiring(
    layer: nn.Module,
    absent: Mapping[str, Any],
    inlined: Collection[str] = (),
    nothing: Mapping[str, tuple[bool, ...]] = types.MappingProxyType({}),
) -> fx.Graph:
    """One fx graph of `layer.forward`: placeholders are its parameters, `call_module` nodes its children.

    `absent` are the arguments that the model leaves at a constant in every setting (None): they are passed as such.
    `inlined` are the paths of children whose own forward is traced as part of the layer, since they add to the stream.
    `nothing` says, of children that return a tuple, which of its items are None in this layer.
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
        path = tracer.path_of_module(module)
        if path in inlined:
            return type(module).forward(module, *args, **kwargs)
        result = tracer.call_module(module, lambda *a, **k: original(module, *a, **k), args, kwargs)
        return tuple(None if n else result[i] for i, n in enumerate(nothing[path])) if path in nothing else result

    with refused(f"the wiring of {type(layer).__name__} cannot be traced"):
        with mock.patch.object(nn.Module, "__call__", call):
            result = type(layer).forward(layer, **arguments)
        tracer.create_node("output", "output", (_without_extras(tracer.create_arg(result)),), {})
    for node in tracer.graph.nodes:
        if node.op == "call_module":  # before unused elements go: what the layer unpacks says how many there are
            indices = (args_of(u)[1] for u in node.users if u.target is operator.getitem)
            picked = [i.start or 0 if isinstance(i, slice) else i for i in indices]
            length = 1 + max(picked) if picked and all(isinstance(i, int) for i in picked) else None  # a bare tensor
            mark(node, returned=length)
    _read_joined_tuples(tracer.graph)
    drop_dead_nodes(tracer.graph)
    _cast_writes_instead_of_the_stream(tracer.graph)
    return tracer.graph


def read_as_tensors(wiring: fx.Graph, outputs: Mapping[str, Any]) -> dict[str, tuple[bool, ...]]:
    """Children, by path, that returned None in a place of their tuple of which the wiring calls a method; per place of
    that tuple, whether it is None. `outputs` are what they returned."""
    found = {}
    for call in wiring.nodes:
        output = outputs.get(str(call.target)) if call.op == "call_module" else None
        if isinstance(output, (tuple, list)):
            items = [n for n in call.users if n.target is operator.getitem and type(args_of(n)[1]) is int]
            none = [n for n in items if args_of(n)[1] < len(output) and output[args_of(n)[1]] is None]
            if any(user.op == "call_method" and args_of(user)[0] is n for n in none for user in n.users):
                found[str(call.target)] = tuple(item is None for item in output)
    return found


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


def _read_joined_tuples(graph: fx.Graph) -> None:
    """Read from `(x, ...) + others[1:]`, which older models return, what stands in the first tuple."""
    for node in graph.nodes:
        if node.target is not operator.add or not isinstance(node.args[0], tuple):
            continue
        first = node.args[0]
        for user in list(node.users):
            if user.op == "output":
                user.args = (first,)
            elif user.target is operator.getitem and args_of(user)[1] in range(len(first)):
                user.replace_all_uses_with(first[args_of(user)[1]])


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


def returns_float32(wiring: fx.Graph) -> bool:
    """True if a layer returns its hidden state in fp32 whatever the model's dtype: it adds in fp32 (Mamba)."""
    wide: set[fx.Node] = set()
    for node in wiring.nodes:
        sums = node.op == "call_function" and kind_of(node) == "pointwise"
        if is_cast(node, torch.float32) or (sums and wide & set(node.all_input_nodes)):
            wide.add(node)
    result = args_of(wiring.output_node())[0]
    return (result[0] if isinstance(result, (tuple, list)) else result) in wide


def _without_extras(result: Any) -> Any:
    """Result of a layer; a tuple or list that something else is appended to (attention weights) without that."""
    first = result
    while isinstance(first, fx.Node) and first.target in (operator.add, operator.iadd):
        first = first.args[0]
    return tuple(first) if isinstance(first, (tuple, list)) else result


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the layer's own parameter names; what goes into its **kwargs stands under SPLAT."""
    kind: Any = type(layer)
    signature = forward_signature(kind)
    bound = signature.bind(layer, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    variadic = next((n for n, p in signature.parameters.items() if p.kind == p.VAR_KEYWORD), None)
    if variadic:
        arguments[SPLAT] = arguments.pop(variadic)
    return arguments


@dataclass(frozen=True)
class OtherResult:
    """Stands for what a layer returns in the place `place` of its tuple, beside the hidden state."""

    layer: nn.Module
    place: int


def example_inputs(model: PreTrainedModel, layers: list[nn.Module], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Meta inputs of a trace: `ids` [B, S] and, where the model takes them, positions. Nothing is padded: no mask.

    A model that is given no positions and counts them by comparing ids with padding (RoBERTa's begin at 2) is traced
    without: its positions are not those that others count.
    """
    example = {"input_ids": ids, "position_ids": torch.zeros_like(ids)}
    kind: Any = type(model)
    parameters = forward_signature(kind).parameters
    variadic = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    example = {name: x for name, x in example.items() if name in parameters or variadic}
    without = {"input_ids": ids}
    counts = _compares_ids(model, layers, without) and not _compares_ids(model, layers, example)
    return without if counts else example


class _Comparisons(TorchFunctionMode):
    """Notes whether a tensor is compared with something."""

    def __init__(self, watched: torch.Tensor) -> None:
        super().__init__()
        self.watched, self.compared = watched, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.compared |= name in ("ne", "eq", "__ne__", "__eq__", "not_equal") and any(x is self.watched for x in args)
        return func(*args, **(kwargs or {}))


def _compares_ids(model: PreTrainedModel, layers: list[nn.Module], inputs: dict[str, torch.Tensor]) -> bool:
    with _Comparisons(inputs["input_ids"]) as mode:
        next(_runs(model, layers, {**inputs, "use_cache": False}))
    return mode.compared


class _OnMeta(TorchFunctionMode):
    """Takes tensors of the CPU to meta where an operator refuses them beside tensors on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            devices = {x.device.type for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)}
            if devices != {"cpu", "meta"}:
                raise
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), given)
            return func(*args, **kwargs)


def absent_arguments(
    model: PreTrainedModel, layers: list[nn.Module], example: Mapping[str, torch.Tensor]
) -> dict[nn.Module, dict[str, None]]:
    """Per layer, the arguments that stay None also with a cache, with padding and with positions in an image: its
    wiring holds them constant.

    `example` are the inputs of the model, on meta. The layers themselves do not run. Raises RewriterError when the
    model does not call them as modules.
    """
    # On the CPU and not all ones: models ask whether a mask hides anything, which has no answer on meta.
    padded = torch.ones(example["input_ids"].shape, dtype=torch.int64)
    padded[:, 0] = 0
    seen: dict[nn.Module, list[dict[str, Any]]] = {layer: [] for layer in layers}
    failures: list[Exception] = []
    for extra in (
        {"use_cache": False},
        {"use_cache": False, "attention_mask": padded},
        {"use_cache": False, "attention_mask": padded.to("meta")},
        {"use_cache": True},
        {"use_cache": True, cache_argument(model): DynamicCache(config=model.config)},
        # as generation does where tokens have places in time, height and width: the text's own positions before these
        {"use_cache": False, "position_ids": padded.to("meta").expand(4, *padded.shape)},
    ):
        for run in _runs(model, layers, {**example, **extra}, failures):
            for layer, call in run.items():
                seen[layer].append(call)
            if len(run) == len(layers):
                break
    if not any(seen.values()):
        for failure in failures[:1]:
            require_text_alone(model, failure)
        text = f" ({first_line(failures[0])})" if failures else ""
        raise RewriterError(
            f"{type(model).__name__} does not call its decoder layers as modules{text}; nothing to trace."
        )
    known = {type(layer): calls for layer, calls in seen.items() if calls}
    result = {}
    for layer in layers:
        calls = seen[layer] or known.get(type(layer), [])
        names = layer_signature(layer)[0]
        result[layer] = {n: None for n in names if calls and all(call.get(n) is None for call in calls)}
    return result


def switched_off(
    model: PreTrainedModel, layers: list[nn.Module], example: Mapping[str, torch.Tensor], layer: nn.Module
) -> dict[str, bool]:
    """The arguments of `layer` that are False with a cache and without: what a program never asks for (weights of
    attention next to the hidden state)."""
    runs = (run for cache in (False, True) for run in _runs(model, layers, {**example, "use_cache": cache}))
    calls = [run[layer] for run in runs if layer in run]
    return {n: False for n in layer_signature(layer)[0] if calls and all(call.get(n) is False for call in calls)}


def _runs(
    model: PreTrainedModel, layers: list[nn.Module], inputs: Mapping[str, Any], failures: list[Exception] | None = None
) -> Iterator[dict[nn.Module, dict[str, Any]]]:
    """The arguments of each layer in runs in which layers return what they are given: bare, then in tuples of one to
    three values, of which the others are `OtherResult`s.

    A run may end early, by an exception that is added to `failures`.
    """

    def forward(length: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments[layer] = bind(layer, args, kwargs)
        hidden = arguments[layer][layer_signature(layer)[0][0]]
        return (hidden, *(OtherResult(layer, place) for place in range(1, length))) if length else hidden

    for length in range(4):
        arguments: dict[nn.Module, dict[str, Any]] = {}
        with (
            replaced_forward({layer: functools.partial(forward, length, layer) for layer in layers}),
            torch.no_grad(),
            _OnMeta(),
        ):
            try:
                model(**inputs)
            except Exception as error:  # a model need not run in every setting; what it called until then counts
                if failures is not None:
                    failures.append(error)
        yield arguments
