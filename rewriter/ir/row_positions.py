"""Positions that a model counts from the first token of a call, made those of its input `position_ids`.

A traced model numbers the tokens of a call for all rows alike: `arange(S)`. Where earlier tokens are in a cache, or
rows are padded at the left, each row has numbers of its own. So a value [S, ...] that is computed of such numbers gets
a dimension of rows in front, [B, S, ...], and one [1, S, ...] gets its rows where there was one for all. That ends
where the value meets the tokens' own, which have rows already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from rewriter.ir.op_semantics import aten, data_of, kind_of
from rewriter.ir.program import Program
from rewriter.ir.structure import Body, Leaf, Module, args_of, called_module, copy_graph, drop_dead_nodes, placeholders


def by_position(program: Program) -> Program:
    """`program` with `position_ids` in place of the numbers that it counts itself, as far as their use is understood.

    What is not understood stays as it is: see `absolute_positions.counts_tokens`.
    """
    return RowPositions().program(program)


def tells_padding(node: Any) -> bool:
    """True for the comparison of token ids with one that stands for padding, as numbers: 0 at padding, else 1."""
    while isinstance(node, fx.Node) and kind_of(node) == "cast":
        node = args_of(node)[0]
    return isinstance(node, fx.Node) and node.target is aten.ne.Scalar and args_of(node)[0].target == "input_ids"


class _NotUnderstood(Exception):
    """These numbers are used in a way that this module does not follow."""


@dataclass(frozen=True)
class _Rows:
    """A value with rows: `node` in the new graph. As traced it has `rank` dimensions; `leading` says that its rows are
    one dimension more, in front of these, not the first of them."""

    node: fx.Node
    rank: int
    leading: bool

    def of(self, node: fx.Node, rank: int | None = None) -> _Rows:
        return _Rows(node, self.rank if rank is None else rank, self.leading)


class RowPositions:
    """Rewrites programs. Bodies that are alike, of one program or several, share the result."""

    def __init__(self) -> None:
        self._bodies: dict[tuple[Any, ...], tuple[Body, Body, bool, _Rows | None]] = {}

    def program(self, program: Program) -> Program:
        if program.mesh.get("sp", 1) > 1:  # a rank holds some tokens of a row
            return program
        try:
            graph = _Graph(self, program.graph, program.modules, {}, wiring=True)
        except _NotUnderstood:
            return program
        return program.with_(graph=graph.graph, modules=graph.modules) if graph.changed else program

    def body(self, body: Body, given: Mapping[int, _Rows]) -> tuple[Body, bool, _Rows | None]:
        """(`body` with rows in the inputs `given` by place, whether it takes positions as well, its result's rows)."""
        key = (id(body), *((place, rows.rank, rows.leading) for place, rows in sorted(given.items())))
        if key not in self._bodies:
            inside = _Graph(self, body.graph, body.modules, given)
            new = replace(body, graph=inside.graph, modules=inside.modules) if inside.changed else body
            self._bodies[key] = body, new, inside.positions is not None, inside.result
        return self._bodies[key][1:]


class _Graph:
    """One graph rewritten. `given` are the placeholders with rows, by place. Raises _NotUnderstood."""

    def __init__(
        self,
        owner: RowPositions,
        graph: fx.Graph,
        modules: Mapping[str, Module],
        given: Mapping[int, _Rows],
        wiring: bool = False,
    ) -> None:
        self.owner, self.wiring = owner, wiring
        self.modules = dict(modules)
        self.graph, _ = copy_graph(graph)
        self.positions: fx.Node | None = None
        self.result: _Rows | None = None
        self.changed = bool(given)
        inputs = placeholders(self.graph)
        self.rows = {inputs[place]: rows.of(inputs[place]) for place, rows in given.items()}
        # [B, S, ...], whose first sizes are those of a call; in the wiring sizes are of inputs, which are all alike
        self.tokens = next((n.meta["val"].shape for n in inputs if _has_tokens(n)), ())
        self.fixed: set[fx.Node] = set()  # of parameters and constants alone
        for node in list(self.graph.nodes):
            self._read(node)
        drop_dead_nodes(self.graph)

    def _read(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and sources and self.fixed.issuperset(sources)):
            self.fixed.add(node)
        with self.graph.inserting_before(node):
            if node.op == "output":
                self._return(node)
            elif node.op == "call_module" and isinstance(called_module(node, self.modules), Body):
                self._call(node)
            elif (counted := self._counted(node)) is not None:
                self.rows[node], self.changed = counted, True
            elif any(n in self.rows for n in sources):
                self._follow(node)

    # --- where numbers begin

    def _counted(self, node: fx.Node) -> _Rows | None:
        """The positions that a node counts, with rows: arange(S), or a cumulative sum of the tokens of a row that are
        no padding, which begins at 1."""
        args = args_of(node)
        if node.target in _ARANGES and self._is_size(args[-1], 1) and (len(args) == 1 or args[0] == 0):
            return _Rows(self._positions(), 1, leading=True)
        if node.target is aten.cumsum.default and args[1] in (1, -1) and self.wiring and tells_padding(args[0]):
            return _Rows(self.graph.call_function(aten.add.Tensor, (self._positions(), 1)), 2, leading=False)
        return None

    def _is_size(self, value: Any, dim: int) -> bool:
        """True for the number of rows (0) or of tokens (1) of a call."""
        if not isinstance(value, fx.Node) or value.target is not aten.sym_size.int:
            return False
        owner, place = args_of(value)
        if self.wiring:
            return owner.op == "placeholder" and place == dim
        return bool(self.tokens) and "val" in value.meta and str(value.meta["val"]) == str(self.tokens[dim])

    def _positions(self) -> fx.Node:
        """The placeholder of positions int64 [B, S], made where there is none: before `ctx`, if that is there."""
        if self.positions is None:
            inputs = placeholders(self.graph)
            names = [str(n.target) for n in inputs]
            if self.wiring and "position_ids" in names:
                self.positions = inputs[names.index("position_ids")]
            else:
                name = "position_ids" if "position_ids" not in names else "positions"
                last = inputs[names.index("ctx") - 1 if "ctx" in names else -1]
                with self.graph.inserting_after(last):
                    self.positions = self.graph.placeholder(name)
        return self.positions

    # --- what is computed of them

    def _follow(self, node: fx.Node) -> None:
        if node.op == "call_module":
            self._leaf(node)
            return
        if node.target is aten.sym_size.int:
            raise _NotUnderstood
        if kind_of(node) in ("pointwise", "cast") or node.target is aten.clone.default:
            self._pointwise(node)
            return
        source = next(n for n in node.all_input_nodes if n in self.rows)
        rows = self.rows[source]
        if node.target is aten.embedding.default and args_of(node)[1] is source:
            self.rows[node] = rows.of(self._again(node), rows.rank + 1)
        elif node.target in _RESHAPES and args_of(node)[0] is source:
            self.rows[node] = self._reshaped(node, rows)
        elif node.target is aten.unsqueeze.default:
            self.rows[node] = self._unsqueezed(rows, args_of(node)[1])
        elif node.target is aten.expand.default and args_of(node)[0] is source:
            self.rows[node] = self._expanded(rows, list(args_of(node)[1]))
        else:
            raise _NotUnderstood

    def _again(self, node: fx.Node) -> fx.Node:
        """A copy of a node that reads the values with rows."""
        new = self.graph.node_copy(node, lambda n: self.rows[n].node if n in self.rows else n)
        new.meta = {key: value for key, value in node.meta.items() if key != "val"}
        return new

    def _pointwise(self, node: fx.Node) -> None:
        mine = [self.rows[n] for n in node.all_input_nodes if n in self.rows]
        others = [n for n in data_of(node) if n not in self.rows]
        if len({(rows.leading, rows.rank) for rows in mine}) > 1:
            raise _NotUnderstood
        rows = mine[0]
        if self.fixed.issuperset(others):
            if any(_rank(n, 0) > rows.rank for n in others):
                raise _NotUnderstood
            self.rows[node] = rows.of(self._again(node))
            return
        # the tokens' own values have their rows in front
        missing = max(_rank(n, rows.rank + rows.leading) for n in others) - rows.rank - rows.leading
        if missing < 0 or (missing and not rows.leading):
            raise _NotUnderstood
        wide = {n: self.rows[n].node for n in node.all_input_nodes if n in self.rows}
        for source, value in wide.items():
            for _ in range(missing):
                value = self.graph.call_function(aten.unsqueeze.default, (value, 1))
            wide[source] = value
        new = self.graph.node_copy(node, lambda n: wide.get(n, n))
        node.replace_all_uses_with(new)

    def _unsqueezed(self, rows: _Rows, dim: int) -> _Rows:
        dim = dim % (rows.rank + 1)
        if not rows.leading and dim == 0:
            raise _NotUnderstood
        if rows.leading and dim == 0:
            return _Rows(rows.node, rows.rank + 1, leading=False)
        new = self.graph.call_function(aten.unsqueeze.default, (rows.node, dim + rows.leading))
        return rows.of(new, rows.rank + 1)

    def _reshaped(self, node: fx.Node, rows: _Rows) -> _Rows:
        """Only dimensions of 1 are added, in front too, of which the first becomes that of the rows; or such behind the
        tokens."""
        sizes = [*args_of(node)[1]]
        tokens = (i for i, n in enumerate(sizes) if self._is_size(n, 1) or (n == -1 and self._has_length(node, i)))
        place = next(tokens, len(sizes))
        one_for_all = sizes[0] == 1 or self._is_size(sizes[0], 0)
        in_front = one_for_all and all(size == 1 for size in sizes[1:place])
        if place == len(sizes) or not (in_front if place else rows.leading):
            raise _NotUnderstood
        count = self.graph.call_function(aten.sym_size.int, (rows.node, 0))
        new = self.graph.call_function(aten.reshape.default, (rows.node, [count, *sizes[min(place, 1) :]]))
        return _Rows(new, len(sizes), leading=place == 0)

    def _has_length(self, node: fx.Node, dim: int) -> bool:
        """True if a dimension of a value is that of the tokens of a call."""
        value = node.meta.get("val")
        return value is not None and str(value.shape[dim]) in map(str, self.tokens[1:2])

    def _expanded(self, rows: _Rows, sizes: Sequence[Any]) -> _Rows:
        if rows.leading and len(sizes) == rows.rank + 1:  # one for all rows, which are there
            leading, rest = False, sizes[1:]
        else:
            leading, rest = rows.leading, sizes if rows.leading else sizes[1:]
        if len(sizes) > rows.rank + rows.leading:
            raise _NotUnderstood
        new = self.graph.call_function(aten.expand.default, (rows.node, [-1, *rest]))
        return _Rows(new, len(sizes), leading)

    # --- modules

    def _leaf(self, node: fx.Node) -> None:
        module = called_module(node, self.modules)
        source = args_of(node)[0]
        if not isinstance(module, Leaf) or source not in self.rows:
            raise _NotUnderstood
        rows = self.rows[source]
        self.rows[node] = rows.of(self._again(node), rows.rank + (module.kind == "Embedding"))

    def _call(self, node: fx.Node) -> None:
        body = self.modules[str(node.target)]
        assert isinstance(body, Body)
        given = {place: self.rows[n] for place, n in enumerate(args_of(node)) if n in self.rows}
        new, takes_positions, result = self.owner.body(body, given)
        if new is body and not given:
            return
        self.changed = True
        self.modules[str(node.target)] = new
        call = self._again(node)
        if takes_positions:
            names = [str(n.target) for n in placeholders(new.graph)]
            place = len(names) - 1 - (names[-1] == "ctx")
            call.args = (*call.args[:place], self._positions(), *call.args[place:])
        if result is not None:
            self.rows[node] = result.of(call)
            return
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)

    def _return(self, node: fx.Node) -> None:
        returned = [n for n in node.all_input_nodes if n in self.rows]
        if not returned:
            return
        if self.wiring or args_of(node)[0] is not returned[0]:
            raise _NotUnderstood
        self.result = self.rows[returned[0]]
        node.args = (self.result.node,)


def _has_tokens(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is not None and value.dim() > 1 and not isinstance(value.shape[1], int)


def _rank(node: fx.Node, unknown: int) -> int:
    """The number of dimensions of a node's value; `unknown` where that is not recorded, as in the wiring."""
    value = node.meta.get("val")
    return unknown if value is None else value.dim()


_ARANGES = (aten.arange.default, aten.arange.start)
_RESHAPES = (aten.reshape.default, aten.view.default)
