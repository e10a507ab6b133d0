"""Modules that stay calls in a traced body: leaves of torch.nn, and small modules with tensors (norms)."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from transformers.pytorch_utils import Conv1D

from rewriter.analysis.op_semantics import aten
from rewriter.analysis.residual import is_add
from rewriter.ir import Leaf, args_of
from rewriter.tracing.traced_experts import is_experts


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
    """Whether a module inside a body is kept as a call: leaves, and small modules with tensors (norms)."""
    if as_leaf(module) is not None:
        return True
    if is_experts(module):
        return False
    owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    return owns and not any(True for _ in module.children())
