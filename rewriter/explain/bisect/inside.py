"""A fault inside a module: its nodes compared with those before the pass, on the same inputs."""

from __future__ import annotations

import torch
from torch import fx

from rewriter.explain.bisect.finding import Fault
from rewriter.explain.bisect.recording import Key, Record
from rewriter.explain.bisect.stage import Stage
from rewriter.explain.bisect.statements import layer_of_path, operator_of, text_of
from rewriter.explain.bisect.values import Ranks, difference, relation
from rewriter.ir import Parameter, Program, nodes_inside
from rewriter.verify.simulate import whole_parameter


def locate_inside(stage: Stage, path: str, inner: Record, earlier: Record | None, error: float) -> Fault:
    """The first node inside module `path` that differs from the one before the pass; `earlier` None: from the
    reference, as far as that shows modules inside."""
    if (parameter := _wrong_parameter(stage, path)) is not None:
        return parameter
    layer = layer_of_path(stage.program, path)
    wrong, unknown = _first_wrong(stage, inner, earlier)
    if wrong is None and inner.stopped is not None:
        return _cannot(stage, path, inner, error)
    if wrong is None:
        operators = dict.fromkeys(operator_of(n) for n in inner.nodes.values() if n.op not in ("get_attr", "output"))
        named = operator_of_module(stage.program, path) if not inner.nodes else next(iter(operators))
        cause = "what it returns differs, and its inside cannot be compared node by node"
        return Fault(stage.name, layer, named, path, cause, error=error, others=tuple(list(operators)[1:]))
    return _fault(stage, path, inner, earlier, wrong, unknown)


def _cannot(stage: Stage, path: str, inner: Record, error: float) -> Fault:
    """The node inside a module that stops its simulation."""
    assert inner.stopped is not None
    found = next(
        ((prefix, n) for prefix, n in nodes_inside(stage.program.modules[path], path)
         if n.op not in ("placeholder", "output") and (f"{prefix}.", n.name) not in inner.nodes),
        None,
    )  # fmt: skip
    layer, cause = layer_of_path(stage.program, path), f"it cannot be computed: {inner.stopped[1]}"
    if found is None:
        return Fault(stage.name, layer, operator_of_module(stage.program, path), path, cause, error=error)
    where, node = found
    return Fault(stage.name, layer, operator_of(node), where, cause, node.name, text_of(node), error=error)


def operator_of_module(program: Program, path: str) -> str:
    """A module by its name and kind: its class, or that of torch."""
    module = program.modules[path]
    kind = getattr(module, "class_name", None) or getattr(module, "kind", "")
    return f"{path.rpartition('.')[2]} ({kind})"


def _first_wrong(stage: Stage, inner: Record, earlier: Record | None) -> tuple[Key | None, list[Key]]:
    """(the first node whose value is wrong, nodes without a counterpart that were computed before it)."""
    unknown: list[Key] = []
    for key, value in inner.values.items():
        node = inner.nodes[key]
        right = earlier.values.get(key) if earlier is not None else _shown(stage, key, node)
        if right is None:
            if not _passes_on(inner, key, stage.limit):
                unknown.append(key)
        elif difference(value, right) > stage.limit:
            return key, unknown
    return None, unknown


def _shown(stage: Stage, key: Key, node: fx.Node) -> Ranks | None:
    """What the reference shows of a node: the result of a module, or what one is given."""
    prefix, _ = key
    if node.op == "call_module":
        return stage.expected.returned.get(prefix + str(node.target))
    users = [u for u in node.users if u.op == "call_module" and u.args and u.args[0] is node]
    return next((stage.expected.given.get(prefix + str(u.target)) for u in users), None)


def _passes_on(inner: Record, key: Key, limit: float) -> bool:
    """Whether a node hands on one of its inputs, or a rank's part of it."""
    prefix, value = key[0], inner.values[key]
    inputs = (inner.values.get((prefix, source.name)) for source in inner.nodes[key].all_input_nodes)
    return any(
        x is not None and (difference(value, x) <= limit or difference(x, value) <= limit) for x in inputs
    )  # fmt: skip


def _fault(
    stage: Stage, path: str, inner: Record, earlier: Record | None, wrong: Key, unknown: list[Key]
) -> Fault:  # fmt: skip
    """`wrong`, or what was put before it and has no counterpart, or what stood there and is gone."""
    node, layer = inner.nodes[wrong], layer_of_path(stage.program, path)
    module = (wrong[0] + (str(node.target) if node.op == "call_module" else "")).rstrip(".")
    fed = _feeding(inner, wrong, set(unknown))
    old = None if earlier is None else earlier.nodes.get(wrong)
    right = earlier.values[wrong] if earlier is not None else _shown(stage, wrong, node)
    assert right is not None
    error, how = difference(inner.values[wrong], right), relation(inner.values[wrong], right, stage.limit)
    others: list[Key] = []
    if fed and (earlier is None or (old is not None and text_of(old) != text_of(node))):
        culprit, *others = fed if earlier is not None else fed[::-1]
        added, cause = inner.nodes[culprit], f"{node.name} gets other values from it"
        if earlier is not None:
            cause = f"the pass put it before {node.name}, whose value differs"
        if earlier is None and node.op == "call_module":
            others = [k for k in others if k != wrong]
        return Fault(
            stage.name, layer, operator_of(added), culprit[0].rstrip(".") or path, cause + (f"; {how}" if how else ""),
            added.name, text_of(added), "", error, tuple(operator_of(inner.nodes[k]) for k in others),
        )  # fmt: skip
    gone = _gone_before(inner, earlier, wrong) if earlier is not None else None
    if gone is not None:
        cause = f"it was dropped before {node.name}" + (f"; of {node.name}, {how}" if how else "")
        return Fault(
            stage.name, layer, operator_of(gone), module, cause, gone.name, text_of(node), text_of(gone), error
        )
    cause = f"of its value, {how}" if how else "what it computes of the same inputs differs"
    if old is not None and text_of(old) != text_of(node):
        cause = f"the pass changed it: {text_of(old)} became {text_of(node)}"
    kind = operator_of(node) if node.op != "call_module" else f"{node.target}"
    return Fault(stage.name, layer, kind, module, cause, node.name, text_of(node), text_of(old), error)


def _feeding(inner: Record, wrong: Key, unknown: set[Key]) -> list[Key]:
    """The nodes without a counterpart that lead to a node, through such nodes alone; in the order of execution."""
    prefix, found = wrong[0], set()
    todo = [inner.nodes[wrong]]
    while todo:
        for source in todo.pop().all_input_nodes:
            key = (prefix, source.name)
            if key in unknown and key not in found:
                found.add(key)
                todo.append(source)
    return [key for key in inner.nodes if key in found]


def _gone_before(inner: Record, earlier: Record, wrong: Key) -> fx.Node | None:
    """A node that fed this one before the pass and is there no more."""
    old = earlier.nodes.get(wrong)
    if old is None:
        return None
    now = {name for prefix, name in inner.nodes if prefix == wrong[0]}
    return next((n for n in old.all_input_nodes if n.op == "call_function" and n.name not in now), None)


# --- parameters ------------------------------------------------------------------------------------------------------


def _wrong_parameter(stage: Stage, path: str) -> Fault | None:
    """A parameter of the module that is made of other elements of the checkpoint than before the pass, alone among
    its like: the pass reorders none of the others so."""
    before = stage.before
    if before is None:
        return None
    changed = [name for name in stage.program.parameters if name.startswith(f"{path}.") and _differs(stage, name)]
    moved = [n for n in stage.program.parameters if n not in changed and _differs(stage, n)]
    if len(changed) != 1 or any(n.split(".")[-2:] == changed[0].split(".")[-2:] for n in moved):
        return None
    name = changed[0]
    now, then = _whole(stage, name), (before_value(stage, name),)
    how = relation((now,), then, stage.limit) if now.shape == then[0].shape else f"its shape is {list(now.shape)}"
    owner, _, leaf = name.rpartition(".")
    return Fault(
        stage.name, layer_of_path(stage.program, path), owner.rpartition(".")[2], owner,
        f"the pass changed the weight {name}" + (f": {how}" if how else ""), leaf, "", "", difference((now,), then),
    )  # fmt: skip


def _differs(stage: Stage, name: str) -> bool:
    assert stage.before is not None
    then_spec, spec = stage.before.parameters.get(name), stage.program.parameters[name]
    if then_spec is None:
        return False
    same = then_spec.expression is not None and then_spec.expression == spec.expression
    if same and (then_spec.ranges == spec.ranges or _in_order(spec)):
        return False
    now, then = _whole(stage, name), before_value(stage, name)
    return now.shape != then.shape or not torch.equal(now, then)


def _in_order(spec: Parameter) -> bool:
    """Whether ranks hold the elements of the full tensor one after the other, all of them."""
    if spec.ranges is None or spec.full_shape is None:
        return True
    places = list(dict.fromkeys(pair for ranges in spec.ranges for pair in ranges))
    ends = [0, *(b for _, b in places)]
    return [a for a, _ in places] == ends[:-1] and ends[-1] == spec.full_shape[spec.dim or 0]


def _whole(stage: Stage, name: str) -> torch.Tensor:
    """All that ranks hold of a parameter, put together."""
    spec = stage.program.parameters[name]
    full = whole_parameter(name, spec, stage.weights)
    if spec.ranges is None or spec.shared:
        return full
    dim = spec.dim or 0
    pieces = [full.narrow(dim, a, b - a) for ranges in spec.ranges for a, b in ranges]
    return torch.cat(pieces, dim)


def before_value(stage: Stage, name: str) -> torch.Tensor:
    """The full tensor of a parameter before the pass."""
    assert stage.before is not None
    return whole_parameter(name, stage.before.parameters[name], stage.weights_before)
