"""torch.compile for the segments between collectives, and for a whole decode step where there are none.

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

from rewriter.runtime.cache import StaticCache
from rewriter.runtime.context import Context
from rewriter.runtime.products import with_reductions

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
            plain = getattr(cls, name)
            if (cls, name) not in compiled:
                compiled[cls, name] = torch.compile(_own_code(plain), backend=with_reductions(backend))
            slots = {slot for part in module.modules() if isinstance(slot := getattr(part, "slot", None), int)}
            setattr(module, name, MethodType(_prepared(compiled[cls, name], plain, slots), module))
    vars(model)["compiles_with"] = backend
    return sorted(f"{cls.__name__}.{name}" for cls, name in compiled)


def backend_of(model: nn.Module) -> str | None:
    """The backend that compiles the segments of `model`; None where they are not compiled."""
    return getattr(model, "compiles_with", None)


def compile_step(step: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """`step(model, token, place, first_valid, cache)`, compiled as a whole for every length of the cache's entries that
    are no rings.

    That the modules within stay the same is not checked in every call: there are hundreds of them. Raises
    torch._dynamo.exc.Unsupported, when it is called, where it cannot be compiled as a whole.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    compiled = torch.compile(
        _own_code(step),
        backend=with_reductions(backend),
        fullgraph=True,
        options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
    )
    marked: list[StaticCache | None] = [None]

    @wraps(step)
    def run(model: nn.Module, token: Tensor, place: Tensor, first_valid: Tensor, cache: StaticCache) -> Tensor:
        if marked[0] is not cache:
            for tensor, ring in zip((*cache.keys, *cache.values), (*cache.rings, *cache.rings), strict=True):
                if not ring:
                    torch._dynamo.mark_dynamic(tensor, 2)
            marked[0] = cache
        logits: Tensor = compiled(model, token, place, first_valid, cache)
        return logits

    return run


def _own_code(method: Any) -> FunctionType:
    """The same function with its own code object: torch counts recompilations per code object, and classes that
    inherit one method would use up each other's."""
    copy = FunctionType(
        method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__, method.__closure__
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _prepared(compiled: Callable[..., Any], plain: Callable[..., Any], slots: set[int]) -> Callable[..., Any]:
    """`compiled` for a layer with these cache entries; `plain` where a graph around it is being compiled."""

    @wraps(plain)
    def segment(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)

        def prepare(x: Any) -> Any:
            if isinstance(x, Context) and x.cache is not None:
                return _bound(x, slots)
            if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(x, 1)
            return x

        return compiled(self, *map(prepare, args), **{key: prepare(value) for key, value in kwargs.items()})

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
