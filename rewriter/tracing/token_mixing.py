"""Tokens that are combined otherwise than by attention over all that the mask allows, or by a recurrent mixer."""

from __future__ import annotations

import torch
from torch import fx
from transformers import PreTrainedModel, cache_utils

from rewriter.ir import Body, args_of
from rewriter.ir.labels import dynamic, value_of
from rewriter.ir.op_semantics import dims_of, operator_of
from rewriter.tracing.shrink import text_config

# kinds of operators that combine or move elements along the dimensions that they name
_ALONG = ("shift", "piece", "join", "scan", "reduction", "lookup", "difference")


def mixing_operator(body: Body) -> str | None:
    """The first operator of `body` that combines several tokens outside of attention; None when there is none."""
    for module in body.modules.values():
        if isinstance(module, Body) and (mixing := mixing_operator(module)):
            return mixing
    for node in body.graph.nodes:
        if node.op == "call_function" and _mixes(node):
            return str(node.target)
    return None


def own_cache(model: PreTrainedModel) -> str | None:
    """The first class by which `model` itself keeps keys and values of some layers; None where transformers' do.

    Such a cache may drop what a forward without a cache sees: Unlimited OCR's keeps the prompt and a window of what was
    generated. A model's module enters its classes in transformers' table by their layer type.
    """
    for kind in getattr(text_config(model.config), "layer_types", None) or ():
        made = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
        if made is not None and made.__module__ != cache_utils.__name__:
            return str(made.__name__)
    return None


def _mixes(node: fx.Node) -> bool:
    row = operator_of(node)
    if row is None or not node.args:
        return False
    first = args_of(node)[row.factors[0]] if row.kind == "product" else args_of(node)[0]
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    value = value_of(first) if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    if row.kind == "convolution":
        return any(map(dynamic, value.shape[2:]))
    if row.kind == "product":
        return dynamic(value.shape[-1])
    if row.kind == "pad":
        amounts = args_of(node)[1]
        moved = [before != 0 or after != 0 for before, after in zip(amounts[::2], amounts[1::2], strict=True)]
        return any(dynamic(value.shape[-1 - i]) and moves for i, moves in enumerate(moved))
    return row.kind in _ALONG and any(dynamic(value.shape[dim]) for dim in dims_of(node))
