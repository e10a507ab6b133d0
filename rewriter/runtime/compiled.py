"""torch.compile for the segments between collectives.

The schedule stays ours: starts and waits are called outside of every compiled graph, in the order in which they are
printed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rewriter.runtime.context import Context

PREFIX = "segment_"
RECOMPILE_LIMIT = 64


def compile_segments(model: nn.Module, *, backend: str = "inductor") -> list[str]:
    """Compile every method named segment_* in place, once per class; returns the names of what is compiled.

    Layers of one class share one compiled function: their weights and cache entries are its inputs. The sequence
    length is marked dynamic, so a graph serves every prompt, and a second one every decode step.
    """
    # A segment has a few graphs: kinds of mask × prefill or decode × padding or none × training or not. Beyond torch's
    # default of 8 it would silently run uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    compiled: dict[tuple[type, str], Callable[..., Any]] = {}
    for module in model.modules():
        cls = type(module)
        for name in dir(cls):
            if not name.startswith(PREFIX):
                continue
            if (cls, name) not in compiled:
                compiled[cls, name] = torch.compile(_own_code(getattr(cls, name)), backend=backend)
            setattr(module, name, MethodType(_prepared(compiled[cls, name]), module))
    return sorted(f"{cls.__name__}.{name}" for cls, name in compiled)


def _own_code(method: FunctionType) -> FunctionType:
    """The same function with its own code object: torch counts recompilations per code object, and classes that
    inherit one method would use up each other's."""
    copy = FunctionType(
        method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__, method.__closure__
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _prepared(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def segment(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        slots = {slot for module in self.modules() if isinstance(slot := getattr(module, "slot", None), int)}

        def prepare(x: Any) -> Any:
            if isinstance(x, Context) and x.cache is not None:
                return _bound(x, slots)
            if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(x, 1)
            return x

        return function(self, *map(prepare, args), **{key: prepare(value) for key, value in kwargs.items()})

    return segment


def _bound(ctx: Context, slots: set[int]) -> Context:
    """`ctx` with only the layer's own cache entry, whose length may differ from one generation to the next."""
    if len(slots) != 1:
        return ctx  # a layer with several attention calls reads its slot numbers and is compiled on its own
    ctx = ctx.bound(next(iter(slots)))
    assert ctx.cache is not None
    for tensor in (*ctx.cache.keys, *ctx.cache.values):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    return ctx
