"""Decoder layers of a program that is bound to its ranks, printed for one device: every rank is a lane.

A value that differs by rank is printed as [B, S, lanes, D], any other as [B, S, D]. `all_reduce` is a sum over the
lanes, `copy_to_group` nothing; a partial sum that is only ever reduced is printed as what the source's own child
returns, which is the total. Between layers, values are packed along the last dimension, so that the source's model
passes them on.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from rewriter import ops
from rewriter.analysis.per_rank import local_values
from rewriter.analysis.residual import computes, is_scaling, residual_blocks
from rewriter.common.errors import RewriterError
from rewriter.emit.layers import Flow
from rewriter.emit.naming import Names
from rewriter.emit.per_rank_modules import (
    LaneChild,
    LaneModule,
    Stopped,
    computes_partial,
    is_entry,
    lane_child,
    token_by_token,
)
from rewriter.emit.per_rank_tokens import has_experts, token_child
from rewriter.emit.python import bracketed, call_parts
from rewriter.ir import Leaf, Program, args_of
from rewriter.ir.marks import in_stream, marks, stream_index

_INDENT = 8
_ADDS = (operator.add, operator.iadd)
# same: equal in all lanes. lane: one per lane. total: printed as its sum over the lanes.
Form = Literal["same", "lane", "total"]


@dataclass(frozen=True)
class LaneLayer:
    """The forward of one layer: `statements` (variable, text) between the values it takes and gives.

    `widths_taken` and `widths_given` say how many vectors each value has per token: 1, or one per lane. `modules` are
    the children that know lanes, by path relative to the layer; `groups` query heads per key/value head of attention
    modules that hold more key/value heads than the source's; `classes` the source's classes of these children.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    widths_taken: tuple[int, ...]
    widths_given: tuple[int, ...]
    statements: tuple[tuple[str, str], ...]
    modules: Mapping[str, LaneModule] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    classes: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether nothing but the residual stream goes in and out, equal in all lanes."""
        return self.widths_taken == self.widths_given == (1,) and not self.modules

    def text(self, values: int | None) -> str:
        """The body of `forward`; `values` is the length of the tuple that the source's layer returns, or None."""
        pad = " " * _INDENT
        lines = []
        if self.widths_taken != (1,):
            names = ", ".join(self.takes) if len(self.takes) > 1 else f"({self.takes[0]},)"
            lines.append(f"{pad}{names} = unpack({self.takes[0]}, self.takes)")
        lines += [text for _, text in self.statements]
        result = self.gives[0] if self.widths_given == (1,) else f"pack({', '.join(self.gives)})"
        if values is not None:
            result = f"({result}{', None' * (values - 1) or ','})"
        elif self.statements and self.statements[-1][0] == result:
            lines[-1] = lines[-1].replace(f"{result} = ", "return ", 1)
            return "\n".join(lines)
        return "\n".join([*lines, f"{pad}return {result}"])


def print_lane_layers(program: Program) -> list[LaneLayer]:
    """Every decoder layer of a sharded program.

    Raises RewriterError where a child cannot compute lanes on one device, and as `layers.print_layers` does.
    """
    flow, count = Flow(program), program.source.num_layers
    printer = _Printer(program, flow)
    crossing = [sorted(flow.crossing(boundary), key=_newest_first) for boundary in range(count + 1)]
    return [printer.layer(index, crossing[index], crossing[index + 1]) for index in range(count)]


def _newest_first(node: fx.Node) -> int:
    """The residual stream stands first, where recorded hidden states are read."""
    return -stream_index(node) if in_stream(node) else 1


class _Printer:
    def __init__(self, program: Program, flow: Flow) -> None:
        self.program, self.flow = program, flow
        self.ranks = program.mesh["tp"]
        self.local = local_values(program.graph, program.parameters)
        self.labels = _stream_labels(program)
        self.form: dict[fx.Node, Form] = {}
        for node in program.graph.nodes:
            self.form[node] = self._form(node)

    # --- what is printed of a value

    def _form(self, node: fx.Node) -> Form:
        if node not in self.local or node.target is ops.copy_to_group:
            return "same"
        module = self.program.modules[str(node.target)] if node.op == "call_module" else None
        if module is not None and is_entry(module):
            return "same"  # the parts of all lanes, which are the whole
        lanes = any(self.form[n] != "same" for n in node.all_input_nodes)
        partial = module is not None and computes_partial(module)
        if (partial or (lanes and _is_linear(node))) and self._only_reduced(node):
            return "total"
        return "lane" if partial or lanes else "same"

    def _only_reduced(self, node: fx.Node) -> bool:
        """Whether nothing reads a rank's part of the sum that `node` belongs to, before it is complete."""
        return bool(node.users) and all(
            user.target is ops.all_reduce or (_is_linear(user) and self._only_reduced(user)) for user in node.users
        )

    # --- one layer

    def layer(self, index: int, takes: list[fx.Node], gives: list[fx.Node]) -> LaneLayer:
        self.path = self.program.layer_path(index)
        arguments = self.program.source.of_layer(index).layer_arguments
        self.unique = Names("self", "kwargs", "torch", *arguments)
        self.names = {takes[0]: arguments[0]}
        self.modules: dict[str, LaneModule] = {}
        self.groups: dict[str, int] = {}
        self.classes: set[str] = set()
        self.statements: list[tuple[str, str]] = []
        for node in takes[1:]:
            self.names[node] = self.unique.fresh("earlier_states")
        for node in self.flow.inside(index):
            if not self._is_inlined(node):
                self._node(node)
        return LaneLayer(
            tuple(self.names[n] for n in takes),
            tuple(self.names[n] for n in gives),
            tuple(self._width(n) for n in takes),
            tuple(self._width(n) for n in gives),
            tuple(self.statements),
            self.modules,
            self.groups,
            frozenset(self.classes),
        )

    def _width(self, node: fx.Node) -> int:
        return self.ranks if self.form[node] == "lane" else 1

    def _is_inlined(self, node: fx.Node) -> bool:
        """A sum or mean over the lanes stands where its one use is, unless it is the stream itself."""
        if len(node.users) != 1 or in_stream(node):
            return False
        if node.target is ops.all_reduce:
            return marks(next(iter(node.users))).layer == marks(node).layer
        return self.form[node] == "total" and _is_scaled(node)

    def _node(self, node: fx.Node) -> None:
        source = args_of(node)[0] if node.target in (ops.copy_to_group, ops.all_reduce) else None
        if source in self.names and (node.target is ops.copy_to_group or self.form[source] == "total"):
            self.names[node] = self.names[source]
            return
        form, head, items, tail = self.form[node], "", list[str](), ""
        if node.op == "call_module":
            head, items, tail = self._call(node)
        elif source is not None:
            head = self._as(source, "total" if node.target is ops.all_reduce else "same")
        elif form != "same" and _is_linear(node):
            head = " + ".join(self._as(n, form) for n in args_of(node)) if _is_sum(node) else self._scaled(node)
        elif form == "same":
            head, items, tail = call_parts(node, self.path, self._operands(node))
        elif node.target is ops.blend:
            lanes = {n: self._as(n, form) for n in node.all_input_nodes}
            head, items, tail = call_parts(node, self.path, lanes)
        else:
            raise RewriterError(f"{node.name}: {node.target} of a value that differs by rank cannot be printed")
        name = self.names[node] = self.unique.fresh(self._wish(node))
        text = bracketed(f"{name} = {head}", items, tail, _INDENT) if tail else f"{' ' * _INDENT}{name} = {head}"
        self.statements.append((name, text))

    def _text(self, node: fx.Node) -> str:
        if node in self.names or not self._is_inlined(node):
            return self.names[node]
        return self._as(args_of(node)[0], "total") if node.target is ops.all_reduce else self._scaled(node)

    def _operands(self, node: fx.Node) -> dict[fx.Node, str]:
        return {n: self._text(n) for n in node.all_input_nodes if n in self.names or self._is_inlined(n)}

    def _as(self, node: fx.Node, wanted: Form) -> str:
        """`node` as a term of a value of the form `wanted`, lane or total."""
        found = self.form[node]
        if found == wanted:
            return self._text(node)
        atom = self._text(node) if node in self.names else f"({self._text(node)})"
        if wanted == "lane" and found == "same":
            return f"{atom}.unsqueeze(-2)"
        if wanted == "total" and found == "lane":
            return f"{atom}.sum(-2)"
        if wanted == "total":  # every rank adds what all of them share
            return f"{atom} * {self.ranks}"
        raise RewriterError(f"{node.name} is {found} in all lanes, and {wanted} is needed")

    def _scaled(self, node: fx.Node) -> str:
        """A value times a number; the sum over lanes of x / lanes is their mean."""
        source, form = args_of(node)[0], self.form[node]
        number = args_of(node)[1]
        if form == "total" and self.form[source] == "lane" and "mul" in _name(node) and number * self.ranks == 1:
            return f"{self._text(source)}.mean(-2)"
        head, items, tail = call_parts(node, self.path, {source: self._as(source, form)})
        return bracketed(head, items, tail, 0) if tail else head

    def _call(self, node: fx.Node) -> tuple[str, list[str], str]:
        path = str(node.target)
        module, inner = self.program.modules[path], path.removeprefix(self.path + ".")
        lanes = [isinstance(a, fx.Node) and self.form[a] == "lane" for a in node.args]
        own = any(p.ranges is not None for n, p in self.program.parameters.items() if n.startswith(f"{path}."))
        if not computes_partial(module) and not is_entry(module):
            if any(lanes) and not token_by_token(module):
                raise RewriterError(
                    f"{path}: every rank computes all of it, from a value that differs by rank, and it does not map "
                    "tokens one by one: its lanes cannot run on one device in the source's own code. "
                    "`rewriter.simulate` and the sharded runtime compute them; leave its layer out of the selection"
                )
            if own and not computes(module):  # a norm with weights per rank
                kind = module.kind if isinstance(module, Leaf) else module.class_name
                self.modules[inner] = LaneModule("Norm", kind)
            return call_parts(node, self.path, self._operands(node))
        found = self._child(path, lanes, self.form[node])
        self.modules |= {f"{inner}.{name}" if name else inner: found.modules[name] for name in found.modules}
        self.groups |= {f"{inner}.{name}" if name else inner: found.groups[name] for name in found.groups}
        self.classes |= found.classes
        names = self._operands(node)
        for source in node.all_input_nodes:
            if found.tokens:
                lane = self.form[source] == "lane"
                names[source] += ".flatten(1, 2)" if lane else ".repeat_interleave(LANES, 1)"
            elif self.form[source] == "lane":
                names[source] += ".flatten(-2)"
        head, items, tail = call_parts(node, self.path, names)
        if found.tokens:
            tail += ".unflatten(1, (-1, LANES))" + (".sum(-2)" if self.form[node] == "total" else "")
        return head, items, tail

    def _child(self, path: str, lanes: list[bool], form: Form) -> LaneChild:
        """What of a split child knows lanes. Raises RewriterError where the source's own code cannot compute them."""
        module = self.program.modules[path]
        try:
            if has_experts(module) and (any(lanes) or form == "lane"):
                return token_child(self.program, path)
            return lane_child(self.program, path, lanes, form == "lane")
        except Stopped as reason:
            raise RewriterError(
                f"{path}: its {self.ranks} lanes cannot run on one device in the source's own code: {reason}. "
                "`rewriter.simulate` and the sharded runtime compute them; leave its layer out of the selection"
            ) from None

    def _wish(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target).removeprefix(self.path + ".")
        users = list(node.users)
        if len(users) == 1 and users[0].target is ops.all_reduce and self.form[node] == "total":
            node = users[0]  # it is printed as nothing
        if node.target is ops.blend:
            return "blended"
        if node.target is ops.copy_to_group:  # of a sum over the lanes: of anything else it is printed as nothing
            return "summed"
        if in_stream(node):
            return self.labels.get(stream_index(node), "total")
        if marks(node).reads is not None:
            return "with_own_part"
        if _is_sum(node) or node.target is ops.all_reduce:
            return "added" if self.form[node] == "total" else "total"
        return node.name


def _is_scaled(node: fx.Node) -> bool:
    return is_scaling(node) and node.args[0] is node.all_input_nodes[0]


def _is_sum(node: fx.Node) -> bool:
    return node.target in _ADDS and len(node.all_input_nodes) == 2


def _is_linear(node: fx.Node) -> bool:
    return _is_scaled(node) or _is_sum(node)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _stream_labels(program: Program) -> dict[int, str]:
    """What each value of the stream is called: `after_mlp`."""
    blocks = residual_blocks(program.origin or program)
    parts = {b.index: "layer" if b.kind == "parallel" else b.path.rpartition(".")[2] for b in blocks}
    return {index + 1: f"after_{part}" for index, part in parts.items()}
