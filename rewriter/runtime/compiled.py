"""torch.compile for the segments between collectives, and for a whole decode step where there are none.

The schedule stays ours: starts and waits are called outside of every compiled graph, in the order in which they are
printed.

On the CPU, products with few rows become reductions. A decode step reads every weight once for one row. ATen's `linear`
reads it at a quarter of the memory's bandwidth on some processors; loops over rows of the weight that multiply and add,
which is what Inductor makes of `(x * weight).sum(-1)`, at two thirds and more on all that were tried
(`benchmarks/decode/run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from rewriter.kernels import accumulation_dtype
from rewriter.runtime.cache import SequenceCache, StaticCache
from rewriter.runtime.context import Context

_PREFIX = "segment_"
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class ModulePart:
    """A method of the module at `path`, of which modules read the cache's entries `slots`, each its own number `slot`
    and those that follow, up to another's."""

    path: str
    module: nn.Module
    method: str
    slots: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.path}.{self.method}"


def segments_of(model: nn.Module) -> list[ModulePart]:
    """Every method segment_* of `model`: what is computed between collectives."""
    segments, firsts = [], sorted({module.slot for module in _with_slots(model)})
    ends = dict(pairwise((*firsts, max(len(getattr(model, "slots", ())), *(1 + slot for slot in firsts[-1:])))))
    for path, module in model.named_modules():
        slots = {slot for part in _with_slots(module) for slot in range(part.slot, ends[part.slot])}
        methods = [name for name in dir(type(module)) if name.startswith(_PREFIX)]
        segments += [ModulePart(path, module, method, tuple(sorted(slots))) for method in methods]
    return segments


def _with_slots(module: nn.Module) -> Iterator[Any]:
    """The modules in `module` that read entries of the cache."""
    return (part for part in module.modules() if isinstance(vars(part).get("slot"), int))


def compile_segments(model: nn.Module, *, backend: str = "inductor") -> list[str]:
    """Compile every method named segment_* in place, once per class; returns the names of what is compiled.

    Layers of one class share one compiled function: their weights and cache entries are its inputs. The sequence
    length is marked dynamic, so a graph serves every prompt, and a second one every decode step.
    """
    # A segment has a few graphs: kinds of mask × prefill or decode × padding or none × training or not. Beyond torch's
    # default of 8 it would silently run uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    compiled: dict[tuple[type, str], Callable[..., Any]] = {}
    for part in segments_of(model):
        cls, name = type(part.module), part.method
        plain = getattr(cls, name)
        if (cls, name) not in compiled:
            compiled[cls, name] = torch.compile(_own_code(plain), backend=with_reductions(backend))
        setattr(part.module, name, MethodType(_prepared(compiled[cls, name], plain, part), part.module))
    vars(model)["compiles_with"] = backend
    return sorted(f"{cls.__name__}.{name}" for cls, name in compiled)


def backend_of(model: nn.Module) -> str | None:
    """The backend that compiles the segments of `model`; None where they are not compiled."""
    return getattr(model, "compiles_with", None)


def compile_step(step: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """`step(model, token, place, first_valid, cache)`, compiled as a whole for every length of the cache's entries that
    are not fixed.

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
            for tensor in _growing(cache):
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


def _prepared(compiled: Callable[..., Any], plain: Callable[..., Any], part: ModulePart) -> Callable[..., Any]:
    """`compiled` for a layer with its cache entries; `plain` where a graph around it is being compiled."""
    readers = [(vars(reader), reader.slot) for reader in _with_slots(part.module)]

    @wraps(plain)
    def segment(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)

        def prepare(x: Any) -> Any:
            if isinstance(x, Context) and x.cache is not None:
                return _bound(x, part.slots)
            if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(x, 1)
            return x

        args, kwargs = tuple(map(prepare, args)), {key: prepare(value) for key, value in kwargs.items()}
        for attributes, slot in readers:  # as they count in the bound context, alike in all layers
            attributes["slot"] = part.slots.index(slot)
        try:
            return compiled(self, *args, **kwargs)
        finally:
            for attributes, slot in readers:
                attributes["slot"] = slot

    return segment


def _bound(ctx: Context, slots: Sequence[int]) -> Context:
    """`ctx` with only the layer's own cache entries, whose length may differ from one generation to the next."""
    ctx = ctx.bound(slots)
    for tensor in _growing(ctx.cache):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    return ctx


def _growing(cache: StaticCache | SequenceCache | None) -> list[Tensor]:
    """Keys and values of which there are as many as the cache was made for."""
    assert cache is not None
    fixed = cache.fixed if isinstance(cache, StaticCache) else [False] * len(cache.keys)
    return [x for x, stays in zip((*cache.keys, *cache.values), fixed * 2, strict=True) if not stays]


FEW_ROWS = 1
STREAMS = 4  # rows of the weight that are read at once: one alone does not keep the memory busy
_LINEAR = (F.linear, torch._C._nn.linear)  # Dynamo names the second


def with_reductions(backend: str) -> Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """The torch.compile backend `backend`, which is handed products of up to FEW_ROWS rows on the CPU as reductions."""
    from torch._dynamo.backends.registry import lookup_backend  # Dynamo takes a second to import

    compile_graph = lookup_backend(backend)

    def compile_with_reductions(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if not torch.is_grad_enabled():
            for node in graph.graph.nodes:
                if node.op == "call_function" and node.target in _LINEAR and _few_rows(node.args[0]):
                    node.target = product
            graph.recompile()
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    return compile_with_reductions


class Reductions(TorchFunctionMode):
    """Within it, what is traced has reductions in place of products of up to FEW_ROWS rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LINEAR and args[0].shape[:-1].numel() <= FEW_ROWS:
            func = product
        return func(*args, **(kwargs or {}))


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, summed in fp32 (fp64 of fp64): input [..., K], weight [N, K], bias [N]; [..., N] in input's dtype.

    A weight [..., N, K] is one for each row of the input.
    """
    wide = accumulation_dtype(input.dtype)
    row = in_memory(input.to(wide)).unsqueeze(-2)
    # of equal sizes, since Inductor makes one loop of those alone
    parts = weight.chunk(STREAMS if weight.shape[-2] % STREAMS == 0 else 1, -2)
    summed = torch.cat([(row * part.to(wide)).sum(-1) for part in parts], -1)
    return (summed if bias is None else summed + bias.to(wide)).to(input.dtype)


def in_memory(x: Tensor) -> Tensor:
    """`x`, which Inductor computes before what reads it, and not again in every iteration of a loop that does: of
    `as_strided` it wants an address."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _few_rows(input: Any) -> bool:
    """True if a node's value has so few rows, on the CPU, in every call."""
    value = input.meta.get("example_value") if isinstance(input, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    rows = value.shape[:-1]
    return all(isinstance(size, int) for size in rows) and rows.numel() <= FEW_ROWS
