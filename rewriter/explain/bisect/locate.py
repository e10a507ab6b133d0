"""The statement at which one program first computes something else than it should."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from rewriter.explain.bisect.finding import Fault
from rewriter.explain.bisect.recording import Key, Record, first_input, record
from rewriter.explain.bisect.values import Point, Ranks, Values, difference, first_parting, reordered
from rewriter.ir import Body, Module, Program, ops, walk_modules
from rewriter.ir.marks import marks
from rewriter.ir.printing import body_text, statement
from rewriter.ir.simulate import Shards

_EXCHANGES = frozenset(
    {ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.copy_to_group, ops.agreed, ops.gather_tokens}
)


@dataclass(frozen=True)
class Stage:
    """A program, the program before the pass that made it (None: as traced), the weights of both, and what it is
    compared with: on `ids`, int64 [B, S], within a relative error of `limit`."""

    name: str
    program: Program
    before: Program | None
    weights: Mapping[str, torch.Tensor]
    weights_before: Mapping[str, torch.Tensor]
    ids: torch.Tensor
    expected: Values
    limit: float
    host: nn.Module | None = None

    def record(self, path: str = "", inputs: Sequence[Shards] = (), before: bool = False) -> Record:
        """Values of the program, or of one before the pass; with `path` of one module, given `inputs`."""
        program, weights = (self.before, self.weights_before) if before else (self.program, self.weights)
        assert program is not None
        return record(program, self.ids, weights, self.host, path, inputs)


def locate(stage: Stage, rec: Record) -> Fault:
    """The first statement that computes something else than it should, or reads something else.

    In the order of execution, values are compared that modules are given and return, and those of the residual stream.
    A module that returns something wrong is run again as it was before the pass, on the same inputs, node by node. If
    it is right for what it is given, the wiring before it is wrong.
    """
    points, values = rec.points(), rec.shown()
    parting = first_parting(values, stage.expected, stage.limit)
    if parting is None:  # it cannot be run, and nothing is wrong before that
        node, why = rec.stopped or (None, "its logits are not known")
        if node is None:
            return Fault(stage.name, cause=why)
        path, layer = str(node.target) if node.op == "call_module" else "", layer_of_node(stage.program, node)
        changed = _difference(stage, path, {layer})
        return Fault(stage.name, layer, path, text_of(node), f"it cannot be computed: {why}", changed)
    point, error = parting
    known = [p for p in list(values)[: list(values).index(point)] if p in stage.expected]
    # a module that returns what it should was given what it should
    right = {points[p] for point in known for p in (point, ("given", point[1])) if p in points}
    calls = (n for n in rec.nodes.values() if n.op == "call_module" and point[0] in ("given", "returned"))
    module = next((n for n in calls if n.target == point[1]), None)
    if point[0] == "returned" and module is not None:
        fault = _in_module(stage, rec, module, points.get(("given", point[1])) in right, error)
        if fault is not None:
            return fault
    return _in_wiring(stage, rec, point, module, right, error)


def _in_module(stage: Stage, rec: Record, node: fx.Node, given_right: bool, error: float) -> Fault | None:
    """The first node inside the module that `node` calls whose value is wrong; None where the module computes what it
    should of its inputs."""
    path = str(node.target)
    inputs = [rec.shards[a] for a in node.args if isinstance(a, fx.Node)]
    inner = stage.record(path, inputs)
    earlier: Record | None = None
    if stage.before is not None and path in stage.before.modules:
        earlier = stage.record(path, inputs, before=True)
        ours, theirs = inner.result, earlier.result
        if ours is not None and theirs is not None and difference(ours, theirs) <= stage.limit:
            return None
    elif not given_right:
        return None
    layer = layer_of_path(stage.program, path)
    for key, value in inner.values.items():
        wrong = inner.nodes[key]
        expected = _shown_inside(stage.expected, key, wrong) if earlier is None else earlier.values.get(key)
        if expected is None or (inside := difference(value, expected)) <= stage.limit:
            continue
        if not reordered(value, expected, stage.limit):
            body = key[0].rstrip(".")
            where = key[0] + str(wrong.target) if wrong.op == "call_module" else body
            return Fault(stage.name, layer, where or path, text_of(wrong), "", _difference(stage, body or path), inside)
    cause = "" if inner.stopped is None else f"it cannot be computed: {inner.stopped[1]}"
    return Fault(stage.name, layer, path, text_of(node), cause, _difference(stage, path), error)


def _shown_inside(expected: Values, key: Key, node: fx.Node) -> Ranks | None:
    """The reference's value of a node inside a module: the result of one inside, or what one inside is given."""
    if node.op == "call_module":
        return expected.get(("returned", key[0] + str(node.target)))
    users = (u for u in node.users if u.op == "call_module" and first_input(u) is node)
    return next((expected.get(("given", key[0] + str(u.target))) for u in users), None)


def _in_wiring(
    stage: Stage, rec: Record, point: Point, reader: fx.Node | None, right: Collection[Key], error: float
) -> Fault:
    """The wrong value that `reader` (None: nothing) is given, or the read of a value that is right but another one."""
    value = rec.nodes[rec.points()[point]] if reader is None else first_input(reader)
    if reader is None or ("", value.name) not in right:
        layer = layer_of_node(stage.program, value)
        return Fault(stage.name, layer, "", text_of(value), "", _difference(stage, layers={layer}), error)
    path, layer = str(reader.target), layer_of_path(stage.program, str(reader.target))
    if point[0] == "given" and stage.before is not None:
        # the statement that it read before the pass, where that is gone, and nothing else has its value
        now, meant = {n.name for n in stage.program.graph.nodes}, stage.expected[point]
        reads = (source for n in stage.before.graph.nodes if n.name == reader.name for source in n.all_input_nodes)
        lost = next((n for n in reads if n.name not in now and n.target not in _EXCHANGES), None)
        known = any(difference(v, meant, partial=False) <= stage.limit for v in rec.values.values())
        if lost is not None and not known:
            gone = layer_of_node(stage.before, lost)
            cause = f"it is gone: {reader.name} reads {value.name}"
            changed = _difference(stage, layers={gone, layer})
            return Fault(stage.name, gone, "", text_of(lost), cause, changed, error)
    cause = f"it reads {value.name}, which is not what it should read"
    return Fault(stage.name, layer, path, text_of(reader), cause, _difference(stage, layers={layer}), error)


# --- statements ------------------------------------------------------------------------------------------------------


def text_of(node: fx.Node) -> str:
    """`name = operation(arguments)`, with names of the graph."""
    return statement(node, lambda n: str(n.target) if n.op == "get_attr" else n.name)


def layer_of_path(program: Program, path: str) -> int | None:
    """The decoder layer that a module belongs to."""
    prefix = program.source.layers + "."
    first = path.removeprefix(prefix).partition(".")[0]
    return int(first) if path.startswith(prefix) and first.isdigit() else None


def layer_of_node(program: Program, node: fx.Node) -> int | None:
    """The decoder layer of a wiring node: its own, else that of the values that it is made from."""
    todo = [node]
    for current in todo:
        if (layer := marks(current).layer) is not None:
            return layer
        if current.op == "call_module":
            return layer_of_path(program, str(current.target))
        todo += [n for n in current.all_input_nodes if n not in todo]
    return None


def _difference(stage: Stage, path: str = "", layers: Collection[int | None] = ()) -> list[str]:
    """The IR before the pass and after it: of a module, with its parameters and what ranks hold of them, or without
    `path` of the wiring of `layers`."""

    def kind(module: Module) -> str:
        return str(getattr(module, "class_name", module))

    def lines(program: Program) -> list[str]:
        if not path:
            computed = (n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
            return [text_of(n) for n in computed if layer_of_node(program, n) in layers]
        module = dict(walk_modules(program.modules)).get(path)
        text = body_text(module, kind, full=True) if isinstance(module, Body) else str(module)
        parameters = [
            f"{n}{list(p.shape)} = {p.expression}" + ("" if p.ranges is None else f", dim {p.dim}: {p.ranges}")
            for n, p in program.parameters.items()
            if n.startswith(f"{path}.")
        ]
        return [*text.splitlines(), *parameters]

    return [] if stage.before is None else changed_lines(lines(stage.before), lines(stage.program), stage.name)


def changed_lines(before: Sequence[str], after: Sequence[str], name: str) -> list[str]:
    """A unified diff with two lines of context; empty where nothing changed."""
    return list(difflib.unified_diff(before, after, "before", f"after {name}", lineterm="", n=2))
