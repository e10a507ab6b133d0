"""A forward pass as a list of steps in the order in which the host launches them: kernels, and collectives that begin
and are waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from rewriter.fabric import Call
from rewriter.ir import args_of, ops
from rewriter.ir.communication import producer
from rewriter.ir.marks import in_stream, marks
from rewriter.kernels import parse_format, slice_length
from rewriter.predict.forward import Forward, NodeWork
from rewriter.predict.kernel_cost import Item, Kernel, ModuleExchange, axis_group


@dataclass(frozen=True, eq=False)
class TimelineRun:
    name: str
    layer: int | None
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, eq=False)
class Begin:
    """A collective starts on the stream of its axis, after what the compute stream was given before.

    `parts` run there one after the other: calls, and of a quantized collective the kernels between them. `exact` is the
    call that it would be unquantized. `reduction`: whether it is an all-reduce, which break-even varies. `aside`:
    whether it runs on another stream, as what is to overlap does; a sum that is waited for at once runs on the
    stream of the kernels.
    """

    name: str
    layer: int | None
    axis: str
    parts: tuple[Call | Kernel, ...]
    exact: Call
    reduction: bool
    aside: bool = False


@dataclass(frozen=True, eq=False)
class Await:
    begin: Begin


Step = TimelineRun | Begin | Await


@dataclass(frozen=True)
class Place:
    """Places of ranks: those of a program have the global numbers `ranks`, by their number in its mesh."""

    ranks: tuple[int, ...]
    mesh: Mapping[str, int]
    graphed: bool

    def group(self, axis: str) -> tuple[int, ...]:
        return tuple(self.ranks[i] for i in axis_group(self.mesh, axis))

    def call(self, kind: Any, nbytes: int, ranks: tuple[int, ...], dtype: Any) -> Call:
        return Call(kind, nbytes, ranks, str(dtype).removeprefix("torch."), self.graphed)


def steps(forward: Forward, place: Place, fuse: bool) -> list[Step]:
    """The steps of a pass. `fuse`: glue of the wiring (a residual add) becomes part of the kernel that follows it,
    where that is glue as well."""
    made: list[Step] = []
    begun: dict[fx.Node, Begin] = {}
    merged: dict[tuple[int, float, float], tuple[Item, ...]] = {}
    pending: list[tuple[NodeWork, Kernel]] = []

    def flush() -> None:
        made.extend(TimelineRun(_name(work.node), marks(work.node).layer, (kernel,)) for work, kernel in pending)
        pending.clear()

    for work in forward.works:
        node, items = work.node, work.items
        if node.target in (ops.all_reduce, ops.all_reduce_start, ops.all_gather):
            flush()
            begun[node] = begin = _begin(work, place)
            made += [begin] if node.target is ops.all_reduce_start else [begin, Await(begin)]
        elif node.target is ops.all_reduce_wait:
            flush()
            made.append(Await(begun[args_of(node)[0]]))
        glue = [(work, item) for item in items if isinstance(item, Kernel) and item.work == "glue"]
        if fuse and node.op != "call_module" and items and in_stream(node) and len(glue) == len(items):
            pending += glue
            continue
        first = items[0] if pending and items else None
        joins = isinstance(first, Kernel) and first.work == "glue" and pending[-1][0].node in node.all_input_nodes
        if isinstance(first, Kernel) and joins:  # it reads what the pending glue made
            nbytes, saved = sum(k.nbytes for _, k in pending), float(pending[-1][0].nbytes)
            key = (id(items), nbytes, saved)
            if key not in merged:
                whole = replace(first, nbytes=first.nbytes + nbytes - saved, name=f"add+{first.name}")
                merged[key] = (whole, *items[1:])
            pending.clear()
            items = merged[key]
        elif items:
            flush()
        made += _steps_of(node, items, place, work.dtype)
    flush()
    return _normed(made)


def _normed(listed: list[Step]) -> list[Step]:
    """The same steps, whose calls say where a sum is waited for at once, and then added and normed."""
    made = list(listed)
    for i, (begin, wait, run) in enumerate(zip(listed, listed[1:], listed[2:], strict=False)):
        if not isinstance(begin, Begin) or not isinstance(wait, Await) or not isinstance(run, TimelineRun):
            continue
        first = run.kernels[0]
        norms = first.work == "glue" and first.columns > 1
        if wait.begin is begin and norms and begin.reduction and not begin.aside and begin.exact == begin.parts[0]:
            call = replace(begin.exact, norm=True)
            made[i] = changed = replace(begin, parts=(call,), exact=call)
            made[i + 1] = Await(changed)
    return made


def sequence_parallel(listed: Sequence[Step]) -> list[Step]:
    """The same steps, in which ranks norm their own tokens of a sum: it is scattered, and gathered after the norm
    (Korthikanti et al., arXiv 2205.05198, section 4.2)."""
    made: list[Step] = []
    scattered: Begin | None = None
    for step in listed:
        call = step.exact if isinstance(step, Begin) else None
        if isinstance(step, Begin) and call is not None and call.norm:
            scattered = replace(step, parts=(replace(call, kind="reduce_scatter", norm=False),))
            made.append(scattered)
        elif isinstance(step, Await) and scattered is not None and step.begin.exact.norm:
            made.append(Await(scattered))
        elif isinstance(step, TimelineRun) and scattered is not None:
            made += _norms_of_own_tokens(step, scattered)
            scattered = None
        else:
            made.append(step)
    return made


def _norms_of_own_tokens(step: TimelineRun, scattered: Begin) -> Iterator[Step]:
    norm, *rest = step.kernels
    ranks = scattered.exact.size
    own = replace(norm, nbytes=norm.nbytes / ranks, rows=max(1, norm.rows // ranks))
    gather = replace(scattered, parts=(replace(scattered.exact, kind="all_gather", norm=False),))
    yield TimelineRun(step.name, step.layer, (own,))
    yield gather
    yield Await(gather)
    if rest:
        yield TimelineRun(step.name, step.layer, tuple(rest))


def _steps_of(node: fx.Node, items: tuple[Item, ...], place: Place, dtype: Any) -> Iterator[Step]:
    """A module's items: its kernels together, but for the exchanges between them."""
    if not items:
        return
    name, layer = _name(node), marks(node).layer
    if not any(isinstance(item, ModuleExchange) for item in items):
        yield TimelineRun(name, layer, items)  # type: ignore[arg-type]  # one tuple for all equal layers
        return
    kernels: list[Kernel] = []
    waiting: list[tuple[int, Begin]] = []  # (items until it is waited for, what)
    for item in items:
        due = [begin for left, begin in waiting if left == 0]
        waiting = [(left - 1, begin) for left, begin in waiting if left > 0]
        if (due or isinstance(item, ModuleExchange)) and kernels:
            yield TimelineRun(name, layer, tuple(kernels))
            kernels = []
        yield from (Await(begin) for begin in due)
        if isinstance(item, Kernel):
            kernels.append(item)
            continue
        ranks = tuple(place.ranks[r] for r in item.ranks)
        call = place.call(item.kind, item.nbytes, ranks, dtype)
        words = f"{_words(call)} {item.name} {name}"
        begin = Begin(words, layer, item.axis, (call,), call, item.kind == "all_reduce", item.overlaps > 0)
        yield begin
        if item.overlaps:
            waiting.append((item.overlaps, begin))
        else:
            yield Await(begin)
    if kernels:
        yield TimelineRun(name, layer, tuple(kernels))
    yield from (Await(begin) for _, begin in waiting)


def _begin(work: NodeWork, place: Place) -> Begin:
    node = work.node
    axis = str(args_of(node)[1])
    ranks = place.group(axis)
    kind = "all_gather" if node.target is ops.all_gather else "all_reduce"
    exact = place.call(kind, work.nbytes, ranks, work.dtype)
    options: Mapping[str, Any] = node.kwargs
    parts: tuple[Call | Kernel, ...] = (exact,)
    name = f"{_words(exact)} {producer(node)}"
    if options.get("format") is not None and work.nbytes >= options.get("min_bytes", 0):
        parts = _quantized(work, place, ranks, str(options["format"]))
        name = f"{options['format']} {name}"
    aside = node.target is ops.all_reduce_start or len(parts) > 1
    return Begin(name, marks(node).layer, axis, parts, exact, kind == "all_reduce", aside)


def _quantized(work: NodeWork, place: Place, ranks: tuple[int, ...], name: str) -> tuple[Call | Kernel, ...]:
    """`rewriter.runtime.quantized`: slices are quantized, exchanged, summed, quantized again, gathered and read."""
    format = parse_format(name)
    payload = len(ranks) * format.payload_bytes(slice_length(work.elements, len(ranks), format))
    own = work.nbytes / len(ranks)
    return (
        Kernel("quantize", "glue", work.nbytes + payload),
        place.call("all_to_all", payload, ranks, "uint8"),
        Kernel("sum and quantize", "glue", payload + own + payload / len(ranks)),
        place.call("all_gather", payload, ranks, "uint8"),
        Kernel("dequantize", "glue", payload + work.nbytes),
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _words(call: Call) -> str:
    return call.kind.replace("_", "-")
