"""One module, exported and cleaned: `torch.export` (non-strict, meta tensors, dynamic batch and length) to a Body.

The example that is exported with has a batch and a length that no dimension of the model equals.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree  # the stable subset: tree_flatten, tree_unflatten
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, args_of, drop_dead_nodes, ops
from rewriter.ir.op_semantics import aten
from rewriter.ir.residual import is_add
from rewriter.tracing.attention_matching import recognise
from rewriter.tracing.earlier_tokens import name_earlier_tokens
from rewriter.tracing.functionalize import functional, quick_export
from rewriter.tracing.graph_cleaning import clean
from rewriter.tracing.interception import (
    Recorded,
    base_name,
    input_names,
    intercepted_modules,
    is_experts,
    record_calls,
    tensors_of,
)
from rewriter.tracing.masks import Static, StaticGraph
from rewriter.tracing.mixer_forms import simplify, unfold_heads, unfolded
from rewriter.tracing.mixer_functions import is_recurrent
from rewriter.tracing.model_errors import refused
from rewriter.tracing.per_head import join_pieces
from rewriter.tracing.score_biases import gathers_by_distance
from rewriter.tracing.shared_values import shared_in, written_values

# what a body reads: by name, the value of a constant made in the forward itself, None for parameters and buffers
Used = Mapping[str, torch.Tensor | None]


# Primes, which sizes of models rarely are. 3 comes late: models that rotate by time, height and width have 3 positions.
_BATCHES = (5, 7, 11, 13, 17, 19, 3)
_LENGTHS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73)


@dataclass(frozen=True)
class Example:
    """`batch` rows of `length` tokens. A dimension of one of these sizes, or of their product, is taken as dynamic."""

    batch: int = _BATCHES[0]
    length: int = _LENGTHS[0]

    @property
    def symbols(self) -> dict[int, str]:
        return {self.batch: "B", self.length: "S", self.batch * self.length: "N"}

    def symbolic(self, shape: Iterable[int]) -> tuple[int | str, ...]:
        """A shape with "B", "S" and "N" (batch · tokens) for the sizes that are the example's."""
        symbols = self.symbols
        return tuple(symbols.get(int(d), int(d)) for d in shape)

    def dynamic(self, tensor: torch.Tensor) -> dict[int, Any]:
        """The dynamic dimensions of an input, as `torch.export` takes them."""
        return {d: torch.export.Dim.DYNAMIC for d, n in enumerate(tensor.shape) if n in self.symbols}


def example_for(model: nn.Module, config: PreTrainedConfig) -> Example:
    """The first example none of whose sizes is a dimension of a tensor of `model` or a number in its config.

    Raises RewriterError when the model leaves none of them free.
    """
    taken = {int(d) for _, t in (*model.named_parameters(), *model.named_buffers()) for d in t.shape}
    taken |= {n for n in tree_leaves(config.to_dict()) if isinstance(n, int)}
    for batch, length in itertools.product(_BATCHES, _LENGTHS):
        example = Example(batch, length)
        if not taken & set(example.symbols):
            return example
    raise RewriterError(
        "the model has dimensions of all the sizes that tracing can give its example: one of "
        f"{', '.join(map(str, _BATCHES))} and one of {', '.join(map(str, _LENGTHS))} has to be free"
    )


class FlatSignature(nn.Module):
    """Gives a module a flat signature: tensors in, tuple of tensors out; of its output those in what `pick` returns,
    and what it put into a mapping that layers share."""

    def __init__(
        self,
        module: nn.Module,
        rebuild: Callable[[Sequence[Any]], tuple[Any, Any]],
        pick: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        super().__init__()
        self.inner, self.rebuild, self.pick = module, rebuild, pick

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.rebuild(tensors)
        leaves = pytree.tree_leaves(self.pick(self.inner(*args, **kwargs)))
        return (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *written_values((args, kwargs)))


def export_graph(
    wrapper: nn.Module,
    tensors: Sequence[torch.Tensor],
    example: Example,
    also: Mapping[int, Collection[int]] = types.MappingProxyType({}),
) -> torch.export.ExportedProgram:
    """Non-strict export with every dimension that is a batch or length dynamic; `also` are others, by id of tensor."""
    more = [dict.fromkeys(also.get(id(t), ()), torch.export.Dim.DYNAMIC) for t in tensors]
    dynamic = tuple(example.dynamic(t) | m for t, m in zip(tensors, more, strict=True))
    with quick_export():
        return torch.export.export(wrapper, tuple(tensors), dynamic_shapes=(dynamic,), strict=False)


class BodyTracer:
    """Traces modules to Bodies; modules that are alike (same fingerprint key) share one Body.

    `buffers` are real values by full name, `stored` those whose values are in checkpoints instead, with the dtype that
    each keeps, `example` the sizes of recorded inputs. `trace(path, module, recorded)` raises RewriterError naming the
    module. `dimensions` may hold dynamic ones of recorded tensors, by id, that their sizes alone do not tell (batch
    times heads).
    """

    def __init__(
        self, buffers: Mapping[str, torch.Tensor], stored: Mapping[str, torch.dtype | None], example: Example
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
        if (leaf := as_leaf(module)) is not None:
            return leaf
        if type(module) is nn.Dropout:
            return Leaf("Dropout", {"p": module.p}, {})
        called = {name: m for name, m in module.named_modules() if name and is_called(m)}
        calls = record_calls(lambda: module(*recorded.args, **recorded.kwargs), called)
        several = {base_name(name) for name, call in calls.items() if is_of_several(called[base_name(name)], call)}
        called = {name: m for name, m in called.items() if name not in several}
        calls = {name: call for name, call in calls.items() if base_name(name) not in several}
        children = {
            name: self.trace(f"{path}.{base_name(name)}", called[base_name(name)], call) for name, call in calls.items()
        }
        tensors, rebuild = tensors_of(recorded)
        with refused(f"{path} ({type(module).__name__}) cannot be exported"):
            with intercepted_modules(called, calls):
                exported = export_graph(FlatSignature(module, rebuild), tensors, self.example, self.dimensions)
                graph, used = clean(functional(exported), prefix="inner.")
            simplify(graph)
            name_earlier_tokens(graph, children)
            for name, heads in unfold_heads(graph).items():
                call = unfolded(calls[name], heads, self.example.batch, self.example.length)
                children[name] = self.trace(f"{path}.{base_name(name)}", called[base_name(name)], call)
            if wanted is not None:
                graph.output_node().args = (tuple(args_of(graph.output_node())[0][i] for i in sorted(wanted)),)
                drop_dead_nodes(graph)
            inputs = [n for n in graph.nodes if n.op == "placeholder" and n.target != "ctx"]
            known = {n: s for n, t in zip(inputs, tensors, strict=True) if (s := static(t)) is not None}
            held = {id(t) for shared in shared_in((recorded.args, recorded.kwargs)) for t in pytree.tree_leaves(shared)}
            _read_stored(graph, [n for n, t in zip(inputs, tensors, strict=True) if id(t) in held])
            recognise(graph, self.static_graph(graph, used, f"{path}.", known), used)
            join_pieces(graph, children)
        for node in graph.nodes:
            if node.op == "call_module" and isinstance(child := children[str(node.target)], Body):
                node.args = tuple(args_of(node)[i] for i in child.kept)
        kept = prune_inputs(graph, input_names(module, recorded))
        return self._body(path, module, graph, used, children, kept, dropout_probability(module, exported))

    def _body(
        self,
        path: str,
        module: nn.Module,
        graph: fx.Graph,
        used: Used,
        children: Mapping[str, Module],
        kept: tuple[int, ...],
        dropout: float,
    ) -> Module:
        trained, untrained = dict(module.named_parameters()), dict(module.named_buffers())
        parameters = {n: tuple(trained[n].shape) for n in used if n in trained}
        own = {n: untrained[n] for n in used if n in untrained}
        stored = {n: self.stored[f"{path}.{n}"] for n in own if f"{path}.{n}" in self.stored}
        parameters |= {n: tuple(own[n].shape) for n in stored}
        buffers = {n: self.buffers[f"{path}.{n}"] for n in own if n not in stored}
        buffers |= {n: value for n, value in used.items() if value is not None}
        results = args_of(graph.output_node())[0]
        if len(results) == 1:
            graph.output_node().args = (results[0],)
        if (linear := as_linear(graph, module)) is not None:
            return linear
        name = type(module).__name__
        return Body(name, graph, parameters, buffers, dict(children), len(results), kept, dropout, stored=stored)

    def static_graph(self, graph: fx.Graph, used: Used, prefix: str, inputs: Mapping[fx.Node, Static]) -> StaticGraph:
        """Static values of `graph`, which reads `used` of the module at `prefix`."""
        buffers = {n: self.buffers.get(prefix + n) if value is None else value for n, value in used.items()}
        static = StaticGraph(graph, buffers, inputs, self.example.length)
        static.settle_blocks()
        return static


def _read_stored(graph: fx.Graph, inputs: Collection[fx.Node]) -> None:
    """Mark attention whose keys and values are among `inputs`: an earlier layer stored them."""
    for node in graph.nodes:
        if node.target is ops.attention and {args_of(node)[1], args_of(node)[2]} <= set(inputs):
            node.kwargs = {**node.kwargs, "stored": True}


def dropout_probability(module: nn.Module, exported: torch.export.ExportedProgram) -> float:
    """The largest probability with which a module drops values in training."""
    called = [args_of(n)[1] for n in exported.graph.nodes if n.target is aten.dropout.default]
    attention = getattr(module, "attention_dropout", None)  # a module is among those below
    inside = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    return max([0.0, *called, *inside, *([attention] if isinstance(attention, float) else [])])


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


# --- leaves


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
        if module.padding_idx is not None:  # its row has no gradient
            options["padding_idx"] = module.padding_idx
        if getattr(module, "offloaded", False):
            return Leaf("OffloadedEmbedding", options, parameters)
    elif kind is nn.LayerNorm:
        sizes: Any = module.normalized_shape
        options = dict(normalized_shape=sizes[0], eps=module.eps)
        if len(sizes) != 1 or len(parameters) != 2:
            return None
    else:
        return None
    return Leaf(kind.__name__, options, parameters)


def as_linear(graph: fx.Graph, module: nn.Module) -> Leaf | None:
    """The Leaf for a module that computes x Wᵀ + b and is no nn.Linear; None for any other."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if not {"weight"} <= parameters.keys() <= {"weight", "bias"} or any(True for _ in module.buffers()):
        return None
    result = args_of(graph.output_node())[0]
    bias = None
    if isinstance(result, fx.Node) and is_add(result):
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


def is_called(module: nn.Module) -> bool:
    """True if a module inside a body is kept as a call: leaves, and small modules with tensors (norms)."""
    if as_leaf(module) is not None:
        return True
    if is_experts(module) or is_recurrent(module) or gathers_by_distance(module):
        return False
    if type(module) is nn.Conv1d and module.padding == (0,):
        return False
    owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    return owns and not any(True for _ in module.children())


def is_of_several(module: nn.Module, call: Recorded) -> bool:
    """True if a module with parameters gives back several values as it took them, one by one (a norm of queries and
    keys): its caller computes it, since ranks may split each of them in another way."""
    given = [x.shape for x in tensors_of(call)[0]]
    made = [x.shape for x in tree_leaves(call.output) if isinstance(x, torch.Tensor)]
    return len(given) > 1 and given == made and any(True for _ in module.parameters())
