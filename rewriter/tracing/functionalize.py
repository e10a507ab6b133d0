"""Writes in place, as values: an exported graph without mutation, and tensors that are filled part by part as `cat`s.

`torch.export` keeps what a forward writes in place (`states[..., :n] = a`). Its own functionalisation turns such a
write into a `slice_scatter` over what was there before. Here that becomes a `cat` of what stays and what was written,
so that a tensor made by `empty` and filled slice by slice reads as if the model had concatenated the slices.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of
from rewriter.ir.op_semantics import argument, aten, kind_of, operator_of, slice_bounds


@contextlib.contextmanager
def quick_export() -> Iterator[None]:
    """Inside, torch.export makes only what is read: no gradients and no stack traces of nodes, a third of its time,
    which torch 2.11 cannot leave out; and no cache of fake tensors, a fourth: dynamic shapes hardly meet twice."""
    quiet = mock.patch.object(fx.config, "do_not_emit_stack_traces", True, create=True)
    with torch.no_grad(), quiet, torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`exported` itself when it writes nothing in place, else the same computation without writes.

    Raises RewriterError when the model writes to one of its inputs or buffers, or reads what it never wrote.
    """
    schemas = [getattr(n.target, "_schema", None) for n in exported.graph.nodes if n.target is not aten.detach_.default]
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return exported
    with warnings.catch_warnings(), quick_export():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its pytrees
        result = exported.run_decompositions({})
    signature = result.graph_signature
    if written := [*signature.user_inputs_to_mutate.values(), *signature.buffers_to_mutate.values()]:
        raise RewriterError(f"it overwrites its input or buffer {written[0]}, which this version cannot represent")
    _without_writes(result.graph)
    return result


def _without_writes(graph: fx.Graph) -> None:
    known: dict[fx.Node, _Assembly] = {}
    for node in list(graph.nodes):
        new: fx.Node | None = None
        if node.target is aten.copy.default:
            new = _copied(node)
        elif node.target in (aten.slice_scatter.default, aten.select_scatter.default):
            new = _written(node, known)
        elif node.target is aten.slice.Tensor and args_of(node)[0] in known:
            new = known[args_of(node)[0]].read(node)
        if new is not None:
            node.replace_all_uses_with(new)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        sizes_only = (kind_of(n) in ("size", "creation_like") or n.target is aten.fill.Tensor for n in node.users)
        if _is_empty(node) and not all(sizes_only):
            raise RewriterError(
                "it fills a tensor part by part in a way that this version cannot follow, or reads what it never wrote"
            )


def _is_empty(node: fx.Node) -> bool:
    """True if a node makes a tensor whose values are undefined."""
    row = operator_of(node)
    return row is not None and row.creates and not row.is_filled


def computed(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node of an exported graph, with the (fake) value that it computes."""
    node = graph.call_function(target, args, kwargs)
    with node.all_input_nodes[0].meta["val"].fake_mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def _insert(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with before.graph.inserting_before(before):
        return computed(before.graph, target, *args, **kwargs)


def _copied(node: fx.Node) -> fx.Node:
    """Result of `copy(old, new)`: `new`, in the shape and dtype of `old`."""
    old, new = args_of(node)[:2]
    wanted = old.meta["val"]
    if new.meta["val"].dtype != wanted.dtype:
        new = _insert(node, aten._to_copy.default, new, dtype=wanted.dtype)
    if _sizes(new) != _sizes(old):
        fixed = [-1 if isinstance(size, torch.SymInt) else size for size in wanted.shape]
        new = _insert(node, aten.expand.default, new, fixed)
        if _sizes(new) != _sizes(old):
            raise RewriterError("it writes one value to every token of a tensor, which this version cannot represent")
    return new


def _sizes(node: fx.Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


@dataclass(frozen=True)
class _Assembly:
    """A tensor as runs along `dim`: (begin, end, value written there), or None for what `base` holds."""

    base: fx.Node
    dim: int
    runs: tuple[tuple[int, int, fx.Node | None], ...]

    def part(self, at: fx.Node, begin: int, end: int) -> list[tuple[int, int, fx.Node | None]]:
        """The runs between two places, cut where they reach further."""
        pieces = []
        for a, b, value in self.runs:
            first, last = max(a, begin), min(b, end)
            if first < last:
                if value is not None and (first, last) != (a, b):
                    value = _insert(at, aten.slice.Tensor, value, self.dim, first - a, last - a)
                pieces.append((first, last, value))
        return pieces

    def read(self, node: fx.Node) -> fx.Node | None:
        """Value of a slice of the tensor, when all of it was written."""
        bounds = _bounds(node, self.runs[-1][1])
        if argument(node, "dim") % node.meta["val"].dim() != self.dim or bounds is None:
            return None
        pieces = [value for _, _, value in self.part(node, *bounds)]
        return None if None in pieces else _joined(node, [p for p in pieces if p is not None], self.dim)


def _joined(at: fx.Node, pieces: list[fx.Node], dim: int) -> fx.Node:
    return pieces[0] if len(pieces) == 1 else _insert(at, aten.cat.default, pieces, dim)


def _bounds(node: fx.Node, size: Any) -> tuple[int, int] | None:
    """(begin, end) of a slice with step 1 and fixed bounds that holds something; None for others."""
    bounds = slice_bounds(node, size) if isinstance(size, int) and argument(node, "step") == 1 else None
    return bounds if bounds is not None and 0 <= bounds[0] < bounds[1] else None


def _written(node: fx.Node, known: dict[fx.Node, _Assembly]) -> fx.Node | None:
    """The tensor after a write to part of it; None where it is not complete yet, or cannot be followed."""
    base, value = args_of(node)[:2]
    dim = argument(node, "dim") % base.meta["val"].dim()
    size = base.meta["val"].shape[dim]
    if node.target is aten.select_scatter.default:
        index = argument(node, "index")
        bounds = (index % size, index % size + 1) if isinstance(size, int) and isinstance(index, int) else None
        if bounds is not None:
            value = _insert(node, aten.unsqueeze.default, value, dim)
    else:
        bounds = _bounds(node, size)
    if bounds is None:
        return None
    before = known.get(base)
    if before is None or before.dim != dim:
        before = _Assembly(base, dim, ((0, size, None),))
    begin, end = bounds
    runs = [*before.part(node, 0, begin), (begin, end, value), *before.part(node, end, size)]
    known[node] = after = _Assembly(before.base, dim, tuple(runs))
    if _is_empty(after.base) and any(written is None for _, _, written in after.runs):
        return None
    pieces = [piece or _insert(node, aten.slice.Tensor, after.base, dim, a, b) for a, b, piece in runs]
    new = _joined(node, pieces, dim)
    known[new] = after
    return new
