"""Children of a layer whose inside cannot be represented: they stay the source's own modules (`program.Opaque`).

That is exact as long as what such a child is given, besides the tensors of the wiring, is the same for every hidden
state: masks, positions, constants. A child that is handed an object which can carry values from layer to layer, or
that leaves tensors behind in attributes, is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from rewriter.common.errors import RewriterError
from rewriter.ir import Opaque
from rewriter.ir.marks import marks
from rewriter.ir.ops import MaskSpec
from rewriter.tracing.export import Example
from rewriter.tracing.interception import Recorded, replaced_forward, tensor_paths, tensors_of
from rewriter.tracing.meta_model import TRACE_DTYPE

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, MaskSpec)


def opaque_child(path: str, module: nn.Module, call: Recorded, example: Example, reason: str) -> Opaque:
    """The Opaque of a child that was called as recorded. Raises RewriterError where that could be inexact."""
    _require_constants(path, module, call, reason)
    places = tensor_paths(call)
    indices, outputs = None, [call.output]
    if not isinstance(call.output, torch.Tensor):
        indices = tuple(i for i, x in enumerate(call.output) if isinstance(x, torch.Tensor))
        outputs = [call.output[i] for i in indices]
    if not outputs or not places:
        raise RewriterError(f"{path} ({type(module).__name__}) takes or returns no tensor, and {reason}")
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes = tuple(example.symbolic(x.shape) for x in outputs)
    return Opaque(type(module).__name__, reason, parameters, places, shapes, indices)


def _require_constants(path: str, module: nn.Module, call: Recorded, reason: str) -> None:
    def walk(tree: Any, where: str) -> None:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (tuple, list)) else ()
        known = isinstance(tree, (tuple, list, dict, torch.Tensor, *_CONSTANTS))
        to_be_filled = isinstance(tree, (list, dict)) and not tree and where != "kwargs"
        if to_be_filled or not known:
            raise RewriterError(
                f"{path} ({type(module).__name__}) cannot be traced: {reason}. It cannot stay the source's own module "
                f"either: it is given a {type(tree).__name__} ({where}), which may carry values from layer to layer."
            )
        for key, item in items:
            walk(item, f"{where}[{key!r}]")

    walk(call.args, "args")
    walk(call.kwargs, "kwargs")


@contextlib.contextmanager
def surviving_failures(
    modules: Mapping[str, nn.Module], wiring: fx.Graph, stream: torch.Size
) -> Iterator[dict[str, Exception]]:
    """In the block, a child that fails on meta tensors gives a stand-in for its result, shaped as the `stream` where it
    is given such a tensor; which did, and why."""
    failures: dict[str, Exception] = {}
    lengths = {str(n.target): marks(n).returned for n in wiring.nodes if n.op == "call_module"}

    def forward(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:  # the model's own code, on meta tensors, may raise anything
            failures[name] = error
            given = [x for x in tensors_of(Recorded(args, kwargs))[0] if x.dtype == TRACE_DTYPE]
            hidden = next((x for x in given if x.shape == stream), given[0])
            stand_in, length = torch.empty_like(hidden), lengths[name]
            return stand_in if length is None else (stand_in, *[None] * (length - 1))

    with replaced_forward({m: functools.partial(forward, n, m.forward) for n, m in modules.items()}):
        yield failures


@contextlib.contextmanager
def attributes_left_behind(model: nn.Module) -> Iterator[list[str]]:
    """The attributes of modules of `model` that hold another tensor after the block than before."""

    def tensors() -> dict[str, int]:
        return {
            f"{path}.{key}": id(value)
            for path, module in model.named_modules()
            for key, value in module.__dict__.items()
            if isinstance(value, torch.Tensor)
        }

    before = tensors()
    changed: list[str] = []
    yield changed
    changed += [name for name, identity in tensors().items() if before.get(name) != identity]
