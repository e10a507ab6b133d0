"""A fault between modules: in a sum, a reduction, or in what a module reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from rewriter import ops
from rewriter.common.errors import RewriterError
from rewriter.explain.bisect.finding import Fault
from rewriter.explain.bisect.recording import Record, is_collective, record, record_module
from rewriter.explain.bisect.stage import Stage
from rewriter.explain.bisect.statements import layer_of_node, layer_of_path, operator_of, text_of
from rewriter.explain.bisect.values import Ranks, difference, relation
from rewriter.ir import Program, bypass
from rewriter.ir.marks import in_stream, marks
from rewriter.ir.printing import statement

_MOST_TRIED = 6
_EXCHANGES = frozenset(
    {ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.copy_to_group, ops.agreed, ops.gather_tokens}
)


@dataclass(frozen=True)
class Slice:
    """Wiring nodes among which the fault is, in order, between right values and `ends`, that are wrong.

    `node` is the stream value that is wrong, or the module that is given it (`reads`). `expected` is the right value of
    the first end, None where it is not known.
    """

    node: fx.Node
    ends: Sequence[fx.Node]
    inside: Sequence[fx.Node]
    expected: Ranks | None
    error: float
    reads: bool


def locate_in_wiring(stage: Stage, rec: Record, found: Slice) -> Fault:
    """Which node of the slice it is: the one that the pass changed and without which the value is right."""
    if not found.inside:
        return _wrong_read(stage, rec, found)
    culprit, changed = _culprit(stage, found)
    if culprit is not None and (lost := _lost(stage, culprit)) is not None:
        cause = f"it was dropped: {culprit.name} takes another value in its place"
        return Fault(
            stage.name, _layer(stage.before or stage.program, lost), operator_of(lost), "", cause, lost.name,
            text_of(culprit), text_of(lost), found.error,
        )  # fmt: skip
    if culprit is None and found.reads and _value_meant(stage, rec, found):
        return _wrong_read(stage, rec, found)
    gone = None if culprit is not None else _gone(stage, found)
    value = rec.values.get(("", found.ends[0].name))
    how = "" if value is None or found.expected is None else relation(value, found.expected, stage.limit)
    why = _lacks(stage, rec, found) or (f"of {found.ends[0].name}, {how}" if how else "what it makes differs")
    if culprit is None and gone is None and how == "ranks hold different values":
        return _missing_reduction(stage, found)
    if culprit is None and gone is not None and found.reads and found.ends[0].name != gone.name:
        node, actual, operator = gone, f"not there: {found.node.name} is given {found.ends[0].name}", operator_of(gone)
        return Fault(
            stage.name, _layer(stage.before or stage.program, gone), operator, "", f"it was dropped; {why}", node.name,
            actual, text_of(node), found.error,
        )  # fmt: skip
    node = culprit or found.inside[-1]
    old = _before(stage, node)
    others = [n for n in found.inside if n is not node and (not changed or n in changed)]
    return Fault(
        stage.name, _layer(stage.program, node), operator_of(node), "", why, node.name, text_of(node), text_of(old),
        found.error, tuple(f"{n.name} ({operator_of(n)})" for n in others),
    )  # fmt: skip


def _culprit(stage: Stage, found: Slice) -> tuple[fx.Node | None, list[fx.Node]]:
    """(the node that is to blame, those that the pass changed or added)."""
    changed = [n for n in found.inside if _changed(stage, n)]
    if len(changed) == 1:
        return changed[0], changed
    # of what the pass added: without which the value is right
    for node in [n for n in changed if _before(stage, n) is None][:_MOST_TRIED]:
        if any(_right_without(stage, found, node, source) for source in node.all_input_nodes):
            return node, changed
    exchanged = [n for n in changed if is_collective(n)]
    return next(iter(exchanged or changed), None), changed


def _right_without(stage: Stage, found: Slice, node: fx.Node, source: fx.Node) -> bool:
    """Whether the first end is right when `node` hands on its input `source` instead."""
    if found.expected is None or source.op == "placeholder":
        return False
    graph, env = stage.program.edit()
    end = env[found.ends[0]] if found.ends[0] is not node else env[source]
    bypass(env[node], env[source])
    try:
        values = record(stage.program.with_(graph=graph), stage.ids, stage.weights, stage.host).values
    except RewriterError:
        return False
    value = values.get(("", end.name))
    return value is not None and difference(value, found.expected, partial=False) <= stage.limit


def _before(stage: Stage, node: fx.Node) -> fx.Node | None:
    """The node of the same name before the pass."""
    if stage.before is None:
        return None
    return next((n for n in stage.before.graph.nodes if n.name == node.name), None)


def _changed(stage: Stage, node: fx.Node) -> bool:
    """Whether the pass added the node or changed what it computes of what; where ranks exchange is no change of it."""
    old = _before(stage, node)
    if old is None:
        return stage.before is not None and node.target not in _EXCHANGES
    return statement(node, _through) != statement(old, _through)


def _through(node: fx.Node) -> str:
    """The name of the value before ranks exchanged it."""
    while node.target in _EXCHANGES:
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "get_attr" else node.name


def _lost(stage: Stage, node: fx.Node) -> fx.Node | None:
    """What the node took before the pass and that is there no more, but for exchanges."""
    old = _before(stage, node)
    now = {n.name for n in stage.program.graph.nodes}
    taken = [] if old is None else [n for n in old.all_input_nodes if n.op == "call_function"]
    return next((n for n in taken if n.name not in now and n.target not in _EXCHANGES), None)


def _gone(stage: Stage, found: Slice) -> fx.Node | None:
    """The node of the wiring before the pass that fed the same end and is there no more."""
    old = _before(stage, found.node)
    if old is None or stage.before is None:
        return None
    now = {n.name for n in stage.program.graph.nodes}
    todo, seen = list(old.all_input_nodes), set()
    while todo:
        node = todo.pop(0)
        if node in seen or node.op in ("call_module", "placeholder"):
            continue
        if node.name not in now and node.target not in _EXCHANGES:
            return node
        seen.add(node)
        todo += node.all_input_nodes
    return None


def _missing_reduction(stage: Stage, found: Slice) -> Fault:
    node = found.inside[-1]
    parts = [a.name for a in node.all_input_nodes if a.op == "call_module"]
    of = parts[0] if parts else node.name
    return Fault(
        stage.name, _layer(stage.program, node), "all_reduce", "", f"no reduction of {of}: ranks hold different values",
        node.name, text_of(node), text_of(_before(stage, node)), found.error,
        tuple(f"{n.name} ({operator_of(n)})" for n in found.inside if n is not node),
    )  # fmt: skip


def _wrong_read(stage: Stage, rec: Record, found: Slice) -> Fault:
    """What the module is given is a right value, but not the one that it should get."""
    node, given = found.node, found.ends[0]
    path = str(node.target) if node.op == "call_module" else ""
    layer = layer_of_path(stage.program, path) if path else _layer(stage.program, node)
    right = _value_meant(stage, rec, found)
    should = f"{node.name} is given {right}" if right else ""
    gone = None if right else _gone(stage, found)
    if gone is not None and layer_of_node(stage.before or stage.program, gone) is not None:
        cause = f"it was dropped: {node.name} is given {given.name} instead of it"
        return Fault(
            stage.name, _layer(stage.before or stage.program, gone), operator_of(gone), "", cause, gone.name,
            f"{node.name} is given {given.name}", text_of(gone), found.error,
        )  # fmt: skip
    cause = f"it reads {given.name}" + (f", and should read {right}" if right else ", which is not what it should read")
    return Fault(
        stage.name, layer, f"the read of {path or node.name}", path, cause, node.name,
        f"{node.name} is given {given.name}", should, found.error,
    )  # fmt: skip


def _value_meant(stage: Stage, rec: Record, found: Slice) -> str:
    """The value of the wiring that is what should have been read; empty where there is none."""
    values = {n: rec.values[("", n.name)] for n in stage.program.graph.nodes if ("", n.name) in rec.values}
    if found.expected is not None:
        fits = (n for n, v in values.items() if difference(v, found.expected, partial=False) <= stage.limit)
        return next((n.name for n in fits), "")
    path = str(found.node.target)
    wanted = stage.expected.returned.get(path)
    before = stage.before or stage.program
    if wanted is None or path not in before.modules:
        return ""
    rest = [rec.shards[a] for a in found.node.args[1:] if isinstance(a, fx.Node)]
    for node in values:
        if in_stream(node) or marks(node).reads is not None:
            inputs = [rec.shards[node], *rest]
            weights = stage.weights_before if stage.before else stage.weights
            returned, _ = record_module(before, before.modules[path], path, inputs, stage.ids, weights, stage.host)
            if returned is not None and difference(returned, wanted) <= stage.limit:
                return node.name
    return ""


def _lacks(stage: Stage, rec: Record, found: Slice) -> str:
    """Which module's result is missing in a sum, or is in it twice."""
    value = rec.values.get(("", found.ends[0].name))
    if found.expected is None or value is None or len(found.expected) > 1:
        return ""
    right = found.expected[0]
    if any(v.shape != right.shape for v in value):
        return ""
    off = right - value[0]
    for path, result in rec.modules.items():
        if any(r.shape != off.shape for r in result):
            continue
        whole = result[0] if len(result) == 1 else sum(result[1:], result[0])
        if not bool(whole.abs().max() > 0):
            continue
        if difference((off,), (whole,)) <= 10 * stage.limit:
            return f"the result of {path} is missing in {found.ends[0].name}"
        if difference((off,), (-whole,)) <= 10 * stage.limit:
            return f"the result of {path} is in {found.ends[0].name} once too often"
    return ""


def _layer(program: Program, node: fx.Node) -> int | None:
    return layer_of_node(program, node)
