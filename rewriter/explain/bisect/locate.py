"""Where one program first computes something else than it should: in a module that it calls, or between modules."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from rewriter.analysis.residual import by_layer, residual_blocks
from rewriter.common.errors import RewriterError
from rewriter.explain.bisect.finding import Fault
from rewriter.explain.bisect.inside import locate_inside
from rewriter.explain.bisect.recording import Record, record, record_module
from rewriter.explain.bisect.references import Expected
from rewriter.explain.bisect.stage import Stage
from rewriter.explain.bisect.statements import layer_of_node, operator_of, text_of
from rewriter.explain.bisect.values import Ranks, difference
from rewriter.explain.bisect.wiring import Slice, locate_in_wiring
from rewriter.ir import Program, args_of
from rewriter.ir.marks import marks


@dataclass(frozen=True)
class _Suspect:
    """The first wrong value: of what `node` is given, returns, or as a value of the stream."""

    node: fx.Node
    what: str  # "given", "returned", "stream", "logits"
    expected: Ranks
    error: float


@dataclass
class _Walk:
    """A record compared in the order of execution. `right` are nodes whose values were found right."""

    record: Record
    right: set[fx.Node] = field(default_factory=set)
    suspect: _Suspect | None = None


def comparable(found: Expected, rec: Record, program: Program, limit: float) -> Expected:
    """`found` without the values that a right program does not show under the same names."""

    def agrees(values: Ranks | None, other: Ranks) -> bool:
        return values is not None and difference(values, other) <= limit

    inputs = {str(n.target): n for n in program.graph.nodes if n.op == "call_module"}
    given = {
        path: value
        for path, value in found.given.items()
        if path in inputs and agrees(rec.values.get(("", _first_input(inputs[path]).name)), value)
    }
    returned = {path: value for path, value in found.returned.items() if agrees(rec.modules.get(path), value)}
    return Expected(given, returned, dict(found.streams), found.logits)


def only(found: Expected, names: Expected) -> Expected:
    """`found` without modules that `names` does not have."""
    return Expected(
        {path: value for path, value in found.given.items() if path in names.given},
        {path: value for path, value in found.returned.items() if path in names.returned},
        found.streams,
        found.logits,
    )


def logits_error(stage: Stage) -> float:
    """The relative error of the logits of all ranks; infinite where they cannot be computed."""
    rec = record(stage.program, stage.ids, stage.weights, stage.host)
    value = rec.values.get(("", result_of(stage.program).name))
    assert stage.expected.logits is not None
    if rec.stopped is not None or value is None:
        return float("inf")
    return difference(value, (stage.expected.logits,), partial=False)


def locate(stage: Stage) -> Fault:
    """The first operator that computes something else than it should, or is given something else."""
    rec = record(stage.program, stage.ids, stage.weights, stage.host)
    walk = _Walk(rec)
    for factor in (1.0, 0.1, 0.01):  # what is small at first may grow on its way to the logits
        walk = _walk(stage, rec, stage.limit * factor)
        if walk.suspect is not None:
            break
    suspect = walk.suspect
    if suspect is None:
        return _stopped(stage, rec)
    if suspect.what == "returned":
        fault = _in_module(stage, walk, suspect)
        if fault is not None:
            return fault
    return locate_in_wiring(stage, walk.record, _slice(stage, walk, suspect))


def _walk(stage: Stage, rec: Record, limit: float) -> _Walk:
    walk, expected = _Walk(rec), stage.expected
    streams = _streams(stage)
    result = result_of(stage.program)
    for node in stage.program.graph.nodes:
        if node.op == "placeholder":
            walk.right.add(node)
        if node not in rec.shards and node.op not in ("placeholder", "output"):
            break
        checks: list[tuple[str, Ranks | None, Ranks, bool]] = []
        value = rec.values.get(("", node.name))
        if node.op == "call_module":
            path, first = str(node.target), _first_input(node)
            if path in expected.given:
                checks.append(("given", rec.values.get(("", first.name)), expected.given[path], False))
            if path in expected.returned:
                checks.append(("returned", value, expected.returned[path], True))
        elif (stream := marks(node).stream) in streams:
            checks.append(("stream", value, streams[stream], False))
        if node is result and expected.logits is not None:
            checks.append(("logits", value, (expected.logits,), False))
        for what, actual, right, partial in checks:
            error = float("inf") if actual is None else difference(actual, right, partial=partial)
            if error > limit:
                walk.suspect = _Suspect(node, what, right, error)
                return walk
        if checks:
            walk.right.add(node)
            walk.right.update([_first_input(node)] if any(c[0] == "given" for c in checks) else [])
    return walk


def _streams(stage: Stage) -> dict[int | None, Ranks]:
    """The stream's values as the reference has them, by their number in the program: a parallel layer makes one value
    where the model made several."""
    known, program = stage.expected.streams, stage.program
    numbers = {marks(n).stream for n in program.graph.nodes} - {None}
    if len(known) in numbers or len(known) - 1 in numbers or not known:  # a faulty program may lack some
        return {number: known[number] for number in known}  # keys that may also be None
    try:
        now, origin = (by_layer(residual_blocks(p)) for p in (program, program.origin or program))
    except (RewriterError, KeyError):
        return {}
    found: dict[int | None, Ranks] = {0: known[0]}
    number = passed = 0
    for layer, blocks in now.items():
        for _ in blocks:
            number, passed = number + 1, passed + len(origin[layer]) // len(blocks)
            found[number] = known[passed]
    return found if passed + 1 == len(known) else {}


def _in_module(stage: Stage, walk: _Walk, suspect: _Suspect) -> Fault | None:
    """The fault inside the module that `suspect` calls; None where it does with its input what it should."""
    node, path = suspect.node, str(suspect.node.target)
    inputs = [walk.record.shards[a] for a in node.args if isinstance(a, fx.Node)]
    module = stage.program.modules[path]
    actual, inner = record_module(stage.program, module, path, inputs, stage.ids, stage.weights, stage.host)
    before = stage.before
    if before is None or path not in before.modules:
        first = _first_input(node)
        if first not in walk.right and path not in stage.expected.given:
            return None
        return locate_inside(stage, path, inner, None, suspect.error)
    returned, earlier = record_module(
        before, before.modules[path], path, inputs, stage.ids, stage.weights_before, stage.host
    )
    if actual is not None and returned is not None and difference(actual, returned) <= stage.limit:
        return None
    return locate_inside(stage, path, inner, earlier, suspect.error)


def _slice(stage: Stage, walk: _Walk, suspect: _Suspect) -> Slice:
    """The wiring between what is known to be right and the first wrong value."""
    node = suspect.node
    if suspect.what == "given":
        ends = [_first_input(node)]
    elif suspect.what == "returned":
        ends = [a for a in node.args if isinstance(a, fx.Node)]
    else:
        ends = [node]
    known = walk.right - ({node} if suspect.what in ("stream", "logits") else set())
    found: dict[fx.Node, None] = {}
    todo = list(ends)
    while todo:
        current = todo.pop(0)
        if current in found or current in known or current.op in ("call_module", "placeholder", "get_attr"):
            continue
        found[current] = None
        todo += current.all_input_nodes
    order = {n: i for i, n in enumerate(stage.program.graph.nodes)}
    inside = sorted(found, key=order.__getitem__)
    expected = suspect.expected if suspect.what != "returned" else None
    return Slice(node, ends, inside, expected, suspect.error, reads=suspect.what in ("given", "returned"))


def _stopped(stage: Stage, rec: Record) -> Fault:
    """Where the program cannot be run, and nothing before it is wrong."""
    if rec.stopped is None:
        return Fault(stage.name, None, "", "", "the logits differ, but no value of it does by itself")
    node, why = rec.stopped
    if node is None:
        return Fault(stage.name, None, "", "", why)
    path = str(node.target) if node.op == "call_module" else ""
    if path:
        fault = _in_module(stage, _Walk(rec), _Suspect(node, "returned", (), float("inf")))
        if fault is not None:
            return fault
    layer, cause = layer_of_node(stage.program, node), f"it cannot be computed: {why}"
    return Fault(stage.name, layer, operator_of(node), "", cause, node.name, text_of(node))


def _first_input(node: fx.Node) -> fx.Node:
    """The first tensor that a module is called with."""
    return next((a for a in node.args if isinstance(a, fx.Node)), node)


def result_of(program: Program) -> fx.Node:
    """The node that computes the logits."""
    output = next(n for n in program.graph.nodes if n.op == "output")
    found: fx.Node = args_of(output)[0]
    return found
