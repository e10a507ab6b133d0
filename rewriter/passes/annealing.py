"""Annealed conversion: a rewritten program whose layers go from the original's wiring to their own by a number λ.

Not a pass of a recipe: what it makes is trained, not shipped. At λ = 0 it computes the original, at λ = 1 what it was
made from, and nothing else about it changes: parameters, their names, what is bound to ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from rewriter import ops
from rewriter.analysis.per_rank import local_values
from rewriter.analysis.residual import blocks_of, by_layer, computes, is_add, read_index, residual_blocks, stream_values
from rewriter.analysis.units import AXIS
from rewriter.common.errors import RewriterError
from rewriter.ir import Module, Program, args_of, drop_dead_nodes, reachable
from rewriter.ir.marks import Marks, in_stream, layer_of, mark, marks, new_call, set_marks

_COLLECTIVES = (ops.copy_to_group, ops.all_reduce)


def annealed(program: Program, at: float = 1.0) -> Program:
    """`program` between its original (λ = 0) and itself (λ = 1); `at` is λ where the result is simulated.

    Whatever a module of a rewired block is given, `stale`, is set against what the original program gives it, `fresh`,
    both made of the stream as `program` has it. Where they differ, the module gets

        (1 − λ) · fresh + λ · stale

    That is, for ladder blocks the stream with the block before and without it (or with a rank's own part of it alone);
    for a parallel MLP the stream after attention and before it, behind their norms where one norm serves both halves.
    Where a reduction is dropped, x_r ← x_r + λ · f_r + (1 − λ) · AR(f), each normed where a norm stands behind it. One
    that is kept stays as it is: at λ = 0 all x_r are equal, and both x ← AR(f_r + x_r / P) and x ← x_sync + AR(all f_r
    since) are the original's stream.

    λ belongs to the layer that reads, or that writes a dropped sum: an emitted layer reads `self.annealing` there.
    Raises RewriterError when nothing in `program` differs from the original, and where passes that belong behind this
    one came before it: reductions that are scheduled, modules that are fused (`single_device` leaves both out).
    """
    if program.origin is None:
        raise RewriterError("annealing: no pass was applied, so there is nothing to go to. Apply a recipe first.")
    _check_comparable(program, program.origin)
    graph, _ = program.edit()
    writes = _blend_dropped(program, graph, at)
    reads = _Reads(program, graph, at).blend()
    if not reads + writes:
        names = ", ".join(entry.name for entry in program.history) or "none"
        raise RewriterError(
            f"annealing: every block reads and writes what it does in the original (passes: {names}). There is nothing "
            "to anneal: train without it."
        )
    drop_dead_nodes(graph)
    return program.with_(graph=graph)


def _check_comparable(program: Program, origin: Program) -> None:
    known = {str(node.target) for node in origin.graph.nodes if node.op == "call_module"}
    for node in program.graph.nodes:
        if node.target in (ops.all_reduce_start, ops.all_reduce_wait):
            raise RewriterError(f"annealing: {node.name}: the reductions are scheduled already: anneal before overlap")
        if node.op == "call_module" and str(node.target) not in known:
            raise RewriterError(
                f"annealing: {node.target} is no module of the original, so what it reads cannot be compared: anneal "
                "before fuse_projections"
            )


# --- dropped reductions ----------------------------------------------------------------------------------------------


def _blend_dropped(program: Program, graph: fx.Graph, at: float) -> int:
    """Give each rank's stream, where it gets the rank's own part of a sum, also its share of the whole sum."""
    count = 0
    for block in blocks_of(graph, program.modules):
        for total in _sums(block.add):
            for part in [n for n in total.all_input_nodes if marks(n).dropped]:
                made = Marks(layer=block.layer, writes=block.index)
                with graph.inserting_before(total):
                    whole = _completed(part, program.modules, made)
                    total.replace_input_with(part, new_call(graph, made, ops.blend, whole, part, at))
                count += 1
    return count


def _completed(part: fx.Node, modules: Mapping[str, Module], made: Marks) -> fx.Node:
    """What all ranks together add, made of a rank's own `part`; behind its norm, where it is one of a part."""
    norms = part.op == "call_module" and not computes(modules[str(part.target)])
    summed = part.all_input_nodes[0] if norms else part
    whole = new_call(part.graph, made, ops.all_reduce, summed, AXIS)
    whole = new_call(part.graph, made, ops.copy_to_group, whole, AXIS)
    if not norms:
        return whole
    normed = part.graph.node_copy(part, lambda _: whole)
    mark(normed, dropped=False, block=None, writes=made.writes)
    return normed


def _sums(value: fx.Node) -> Iterator[fx.Node]:
    """The adds that a stream value is made of, those before it that nothing else reads among them."""
    if is_add(value):
        yield value
        for operand in value.all_input_nodes:
            if len(operand.users) == 1 and not in_stream(operand):
                yield from _sums(operand)


# --- reads -----------------------------------------------------------------------------------------------------------


class _Reads:
    """Compares what modules are given with what the original gives them, and blends where that differs."""

    def __init__(self, program: Program, graph: fx.Graph, at: float) -> None:
        assert program.origin is not None
        self.graph, self.at = graph, at
        self.modules: Mapping[str, Module] = program.modules
        self.local = local_values(graph, program.parameters)
        self.calls = _calls(graph)
        self.origin_calls = {node: key for key, node in _calls(program.origin.graph).items()}
        self.streams = _same_values(program, graph)
        self.readers = {n: _readers(n) for n in (*self.calls.values(), *self.origin_calls)}
        self.before: list[fx.Node] = []  # what stands before the module at hand
        self.blends: dict[tuple[fx.Node, fx.Node, int], fx.Node] = {}

    def blend(self) -> int:
        """Blend every read that differs. Returns how many."""
        originals = {self.calls[key]: node for node, key in self.origin_calls.items() if key in self.calls}
        for node in list(self.graph.nodes):
            original = originals.get(node)
            if original is not None and marks(node).layer is not None and self._serves(original, node):
                for place, (fresh, stale) in enumerate(zip(args_of(original), args_of(node), strict=True)):
                    if not self._same(fresh, stale):
                        with self.graph.inserting_before(node):
                            node.update_arg(place, self._blended(fresh, stale, node))
            self.before.append(node)
        return len(self.blends)

    def _blended(self, fresh: fx.Node, stale: fx.Node, reader: fx.Node) -> fx.Node:
        record = marks(reader).only("layer", "block")
        key = (fresh, stale, layer_of(reader))
        if key not in self.blends:
            value = self._made_of(fresh, record)
            if stale in self.local and value not in self.local:
                value = new_call(self.graph, record, ops.copy_to_group, value, AXIS)
            self.blends[key] = new_call(self.graph, record, ops.blend, value, stale, self.at)
            if (read := read_index(stale)) is not None:
                mark(self.blends[key], reads=read)
        return self.blends[key]

    def _serves(self, original: fx.Node, node: fx.Node) -> bool:
        """Whether a module does its original's work: a norm that serves another block too is another value."""
        return computes(self.modules[str(node.target)]) or self.readers[original] == self.readers[node]

    def _same(self, fresh: fx.Node, stale: fx.Node) -> bool:
        """Whether `stale` is, in the rewritten program, what `fresh` is in the original."""
        while stale.target in _COLLECTIVES and not in_stream(stale):
            stale = stale.all_input_nodes[0]
        if in_stream(fresh):
            return self.streams.get(fresh) is stale
        if marks(fresh).layer is None:
            return True  # what is made outside the layers is made as before
        if (fresh.op, fresh.target) != (stale.op, stale.target):
            return False
        if fresh.op == "call_module" and self._serves(fresh, stale):
            return True
        return all(self._same(a, b) for a, b in zip(_nodes(fresh), _nodes(stale), strict=True))

    def _made_of(self, fresh: fx.Node, record: Marks) -> fx.Node:
        """`fresh` of the original, computed in the rewritten program; from what is there, where it is."""
        if (value := self.streams.get(fresh)) is not None:
            return value
        key = self.origin_calls.get(fresh)
        if key in self.calls and computes(self.modules[str(fresh.target)]):
            return self._whole(self.calls[key], record)
        sources = {n: self._made_of(n, record) for n in fresh.all_input_nodes}
        args, kwargs = fx.map_arg((fresh.args, fresh.kwargs), sources.__getitem__)
        for node in self.before:
            if (node.op, node.target, node.args, node.kwargs) == (fresh.op, fresh.target, args, kwargs):
                return node
        made = self.graph.create_node(fresh.op, fresh.target, args, kwargs, fresh.name)
        made.meta = {k: v for k, v in fresh.meta.items() if k == "val"}
        set_marks(made, replace(record, python=marks(fresh).python))
        return made

    def _whole(self, node: fx.Node, record: Marks) -> fx.Node:
        """The sum over ranks of a rank's own part."""
        if node not in self.local:
            return node
        known = [n for n in self.before if n.target is ops.all_reduce and n.args[0] is node]
        return known[0] if known else new_call(self.graph, record, ops.all_reduce, node, AXIS)


def _calls(graph: fx.Graph) -> dict[tuple[str, int], fx.Node]:
    """Calls of modules by path, the n-th of a path as (path, n)."""
    calls: dict[tuple[str, int], fx.Node] = {}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            calls[path, counts.setdefault(path, 0)] = node
            counts[path] += 1
    return calls


def _nodes(node: fx.Node) -> list[fx.Node]:
    """The operands of a node, as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _readers(node: fx.Node) -> frozenset[str]:
    """The modules that read a value before it reaches the stream."""
    users = reachable(node.users, lambda n: () if n.op == "call_module" or read_index(n) is not None else n.users)
    return frozenset(str(user.target) for user in users if user.op == "call_module")


def _same_values(program: Program, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """From each value of the original's stream to the one that stands for it in `graph`.

    Inside a layer whose blocks a pass joined there is none; at its end there is.
    """
    assert program.origin is not None
    old, new = stream_values(program.origin.graph), stream_values(graph)
    same = {old[0]: new[0]} if old and new else {}
    rewired = by_layer(blocks_of(graph, program.modules))
    for layer, blocks in by_layer(residual_blocks(program.origin)).items():
        pairs = list(zip(blocks, rewired[layer], strict=False))
        if len(blocks) != len(rewired[layer]):
            pairs = [(blocks[-1], rewired[layer][-1])]
        same |= {original.add: block.add for original, block in pairs}
    return same
