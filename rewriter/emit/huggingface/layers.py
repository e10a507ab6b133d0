"""Decoder layers printed from the wiring, for one device: what crosses between layers, and each layer's statements.

Which values cross is plain liveness over the wiring: at the entry of layer i, everything that was computed before it
and is read in it or after it. Between layers, values are packed along the last dimension, so that the source's model
passes them on.

Of a program that is bound to its ranks, all ranks are computed: a value that differs by rank is printed as
[B, S, ranks, D], any other as [B, S, D]. `all_reduce` is a sum over the ranks, `copy_to_group` nothing; a partial sum
that is only ever reduced is printed as what the source's own child returns, which is the total. In any other program
no value differs by rank, and nothing is printed but [B, S, D]. No rewrite is treated specially.

Where a wiring tells rewired tokens from exact ones, a layer in which they differ takes `rewired` (bool [B, S]) as a
keyword.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface.per_rank import (
    NotPerRank,
    PerRankChild,
    PerRankModule,
    computes_partial,
    has_experts,
    is_entry,
    per_rank_child,
    token_by_token,
    token_child,
)
from rewriter.emit.huggingface.wiring_code import LayerArguments, WiringPrinter, all_results, arguments_of, operands
from rewriter.emit.python_source import UniqueNames, broken
from rewriter.ir import Body, Leaf, Program, args_of, drop_dead_nodes, ops
from rewriter.ir.communication import local_values
from rewriter.ir.marks import IN_MAPPING, in_stream, layer_of, marks, stream_index
from rewriter.ir.op_semantics import aten, function_of, is_movement, kind_of
from rewriter.ir.phases import REWIRED
from rewriter.ir.residual import computes, is_add, is_scaling, residual_blocks
from rewriter.ir.shapes import stream_shape

_ON_ALL = (ops.copy_to_group, ops.agreed)  # the same value
_PAD = " " * 8  # of statements of a method
# same: equal on all ranks. per_rank: one per rank. total: printed as its sum over the ranks.
Form = Literal["same", "per_rank", "total"]


@dataclass(frozen=True)
class PrintedLayer:
    """The forward of one layer. `statements` are (variable, text) with the indentation of a method's body.

    `takes` are the variables of the values that it is given, `gives` those that it returns: the residual stream first.
    `widths_taken` and `widths_given` say how many vectors each has per token: 1, or one per rank. `modules` are the
    children that compute per rank, by path relative to the layer; `groups` query heads per key/value head of attention
    modules that hold more key/value heads than the source's.
    `arguments` says how it takes and hands on what is not the hidden state. `rewires` says that it computes some tokens
    otherwise than others, told by its argument `rewired`.
    `ages` says of each value given how many blocks old it is (0: the stream itself; None: not a stream value).
    `handed_on` are values that it returns beside its hidden state, by their place in the tuple that the source's layer
    returns. `streams`: the residual stream is several vectors of a token, [B, S, n, D].
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    statements: tuple[tuple[str, str], ...]
    widths_taken: tuple[int, ...] = (1,)
    widths_given: tuple[int, ...] = (1,)
    modules: Mapping[str, PerRankModule] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    arguments: LayerArguments = field(default_factory=lambda: LayerArguments(()))
    rewires: bool = False
    ages: tuple[int | None, ...] = field(default=(), compare=False)
    handed_on: Mapping[int, str] = field(default_factory=dict)
    streams: bool = False

    @property
    def packed(self) -> tuple[bool, bool]:
        """(in, out): True where more crosses than the residual stream, equal on all ranks."""
        return (
            len(self.takes) > 1 or self.widths_taken != (1,),
            len(self.gives) > 1 or self.widths_given != (1,),
        )

    def same_computation(self, other: PrintedLayer) -> bool:
        """True if both compute the same, apart from further values that they return."""
        alike = (self.statements, self.gives[0], self.handed_on) == (other.statements, other.gives[0], other.handed_on)
        return alike and not self.modules and not other.modules

    def text(self, values: int | None, bound: bool = False) -> str:
        """The body of `forward`: split what was packed, compute, pack.

        `values` is the length of the tuple that the source's layer returns, None where it returns the hidden state
        alone. What follows the hidden state there is None here (attention weights), unless later layers read it. With
        `bound`, values are packed and unpacked by functions of the generated file, which know their widths.
        """
        lines = []
        names, hidden = ", ".join(self.takes), self.takes[0]
        packed_in, packed_out = self.packed
        if packed_in:
            names = names if len(self.takes) > 1 else f"({names},)"
            call = f"unpack({hidden}, self.takes)" if bound else f"{hidden}.chunk({len(self.takes)}, dim=-1)"
            if self.streams:  # the source's code takes their vectors together
                call = f"(streams.contiguous() for streams in {call})"
            lines.append(f"{_PAD}{names} = {call}")
        if self.arguments.takes_cache:
            lines.append(f"{_PAD}cache = take_cache(kwargs)")
        lines += [text for _, text in self.statements]
        result = self.gives[0]
        if packed_out:
            packed = ", ".join(self.gives)
            result = f"pack({packed})" if bound else f"torch.cat(({packed}), dim=-1)"
        if values is not None:
            others = [self.handed_on.get(place, "None") for place in range(1, values)]
            result = f"({', '.join([result, *others])}{',' * (values == 1)})"
        elif self.statements and self.statements[-1][0] == result:
            lines[-1] = lines[-1].replace(f"{result} = ", "return ", 1)
            return "\n".join(lines)
        return "\n".join([*lines, f"{_PAD}return {result}"])


def print_layers(program: Program) -> list[PrintedLayer]:
    """Every decoder layer of a program, printed for one device. A program on several ranks is bound to them.

    Raises RewriterError when a layer needs a value from outside the layers other than the embedding, when more than
    one value leaves the last, and where a child cannot compute all ranks on one device.
    """
    program = _sums_apart(program)
    flow = LayerFlow(program)
    printer = _HuggingFaceLayers(program, flow)
    crossing = [flow.crossing(boundary) for boundary in range(program.source.num_layers + 1)]
    return [printer.layer(index, *pair) for index, pair in enumerate(pairwise(crossing))]


def _sums_apart(program: Program) -> Program:
    """`program`, where sums that one all-reduce takes together are taken one by one, each in its own layer."""
    graph, _ = program.edit()
    for piece in list(graph.nodes):
        pieces = args_of(piece)[0] if piece.target is operator.getitem else None
        if isinstance(pieces, fx.Node) and pieces.target is aten.chunk.default:
            total = args_of(pieces)[0]
            part = args_of(args_of(total)[0])[0][args_of(piece)[1]]
            piece.target, piece.args = ops.all_reduce, (part, args_of(total)[1])
    drop_dead_nodes(graph)
    return program.with_(graph=graph)


class LayerFlow:
    """The values that each layer computes, and until which layer they are needed."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.last_use: dict[fx.Node, int] = {}
        count = program.source.num_layers
        inside = [n for n in self.nodes if marks(n).layer is not None]
        leaving = [n for n in inside if any(marks(u).layer is None for u in n.users)]
        if len(leaving) != 1:
            names = ", ".join(n.name for n in leaving) or "none"
            raise RewriterError(
                f"one value has to leave the decoder layers of {program.source.model_type}; here: {names}"
            )
        self.last_use[leaving[0]] = count
        self.last_use |= {n: layer_of(n) for n in inside if marks(n).handed_on not in (None, IN_MAPPING)}
        for node in reversed(self.nodes):
            layer = marks(node).layer
            if layer is None or node not in self.last_use:
                continue
            for operand in operands(node):
                if operand.target == REWIRED or marks(operand).argument is not None:
                    continue  # an argument of its own
                home = marks(operand).layer
                if home is not None and home > layer:
                    raise RewriterError(f"{node.name} of layer {layer} reads {operand.name} of the later layer {home}")
                self.last_use[operand] = max(self.last_use.get(operand, -1), layer)
        entries = [n for n in self.last_use if marks(n).layer is None]
        if len(entries) != 1:
            names = ", ".join(n.name for n in entries) or "none"
            raise RewriterError(f"the decoder layers can read one value from outside, the hidden state; here: {names}")

    def crossing(self, boundary: int) -> list[fx.Node]:
        """The values that enter layer `boundary`: of the residual stream, newest first, then others, newest first."""
        homes = {n: -1 if marks(n).layer is None else layer_of(n) for n in self.last_use}
        alive = [n for n, last in self.last_use.items() if homes[n] < boundary <= last]
        newest = sorted(alive, key=self.order.__getitem__, reverse=True)
        return sorted(newest, key=lambda node: 1 if (number := _stream_number(node)) is None else -number)

    def inside(self, layer: int) -> list[fx.Node]:
        return [n for n in self.nodes if n in self.last_use and marks(n).layer == layer]


class _HuggingFaceLayers:
    """Prints the layers of one program."""

    def __init__(self, program: Program, flow: LayerFlow) -> None:
        self.program, self.flow = program, flow
        self.ranks = program.mesh.get("tp", 1)
        self.local = local_values(program.graph, program.parameters)
        self.labels = _stream_labels(program)
        self.streams = len(stream_shape(program) or ()) > 3
        self.form: dict[fx.Node, Form] = {}
        for node in program.graph.nodes:
            self.form[node] = self._form(node)
            if self.streams and self.form[node] == "per_rank" and marks(node).reads is not None:
                raise RewriterError(
                    f"layer {layer_of(node)}: its {self.ranks} ranks cannot run on one device in the source's code: "
                    "each reads a stream of several vectors with a part of its own, and modules of the source mix all "
                    "vectors of a token. `rewriter.simulate` and the sharded runtime compute them; use ladder's "
                    "variant: paper"
                )

    # --- what is printed of a value

    def _form(self, node: fx.Node) -> Form:
        if node not in self.local or node.target in _ON_ALL:
            return "same"
        if marks(node).handed_on is not None:
            return "same"  # the source's own code hands on what all ranks hold of it
        if _element(node) is not None:
            return self.form[args_of(node)[0]]
        module = self.program.modules[str(node.target)] if node.op == "call_module" else None
        if module is not None and is_entry(module):
            return "same"  # the parts of all ranks, which are all of the value
        per_rank = any(self.form[n] != "same" for n in node.all_input_nodes)
        partial = module is not None and computes_partial(module)
        if (partial or (per_rank and _is_linear(node))) and self._only_reduced(node):
            return "total"
        return "per_rank" if partial or per_rank else "same"

    def _only_reduced(self, node: fx.Node) -> bool:
        """True if nothing reads a rank's part of the sum that `node` belongs to, before it is complete."""
        read = [user for user in node.users if _element(user) is None or user in self.local]
        return bool(read) and all(
            user.target is ops.all_reduce
            or marks(user).handed_on is not None
            or ((_is_linear(user) or _element(user) is not None) and self._only_reduced(user))
            for user in read
        )

    # --- one layer

    def layer(self, index: int, takes: list[fx.Node], gives: list[fx.Node]) -> PrintedLayer:
        self.path = self.program.layer_path(index)
        source, inside = self.program.source.of_layer(index), self.flow.inside(index)
        calls = []  # of children, and whether each keeps something in the cache
        for node in inside:
            if (call := marks(node).python) is not None:
                module = self.program.modules[str(node.target)]
                calls.append((call, isinstance(module, Body) and module.reads_context))
        self.arguments = arguments_of(source, calls, source.absent[index])
        results = {n: all_results(str(n.target).removeprefix(f"{self.path}.")) for n in inside if n.op == "call_module"}
        taken = ("self", "kwargs", "cache", "torch", REWIRED, *source.layer_arguments, *results.values())
        self.unique = UniqueNames(taken)
        self.names = {takes[0]: source.layer_arguments[0]}
        self.child = PerRankChild()
        self.statements: list[tuple[str, str]] = []
        for node in takes[1:]:
            self.names[node] = self.unique.new("earlier_states")
        for operand in (n for node in inside for n in node.all_input_nodes):
            if (argument := marks(operand).argument) is not None:
                self.names[operand] = argument
        for node in inside:
            if node.op == "get_attr":
                self.names[node] = self._expression(node, {})
            elif (element := _element(node)) is not None:
                self.names[node] = f"{self.names[args_of(node)[0]]}[{element}]"
            elif not self._is_inlined(node):
                self._node(node)
        handed_on = {place: self.names[n] for n in inside if (place := marks(n).handed_on) not in (None, IN_MAPPING)}
        for node, name in results.items():
            read = call.read if (call := marks(node).python) is not None else ()
            handed_on |= {place: f"{name}[{item}]" for item, place in read if place is not None}
        newest, *others = map(_stream_number, gives)
        ages = (0, *(None if newest is None or number is None else newest - number for number in others))
        return PrintedLayer(
            tuple(self.names[n] for n in takes),
            tuple(self.names[n] for n in gives),
            tuple(self.statements),
            tuple(self._width(n) for n in takes),
            tuple(self._width(n) for n in gives),
            self.child.modules,
            self.child.groups,
            self.arguments,
            any(node.target is ops.where_rewired for node in inside),
            ages,
            handed_on,
            self.streams,
        )

    def _width(self, node: fx.Node) -> int:
        return self.ranks if self.form[node] == "per_rank" else 1

    def _is_inlined(self, node: fx.Node) -> bool:
        """True of a sum or mean over the ranks and of a cast or movement: it stands where its one use is, in its layer,
        unless it is the stream itself."""
        if len(node.users) != 1 or in_stream(node) or marks(next(iter(node.users))).layer != marks(node).layer:
            return False
        if self.form[node] == "same" and (kind_of(node) == "cast" or is_movement(node)):
            return marks(node).handed_on is None
        return node.target is ops.all_reduce or (self.form[node] == "total" and _is_scaled(node))

    def _node(self, node: fx.Node) -> None:
        source = args_of(node)[0] if node.target in (*_ON_ALL, ops.all_reduce) else None
        known = self.form[source] if source in self.names else None
        if known == "total" or (known == "same" and node.target in _ON_ALL):
            assert source is not None
            self.names[node] = self.names[source]
            return
        form = self.form[node]
        if node.op == "call_module":
            text = self._call(node)
        elif node.target is ops.where_rewired:
            values = ", ".join(self._as(n, form) for n in args_of(node)[1:])
            text = f"torch.where({REWIRED}[..., {'None, ' * (form == 'per_rank')}None], {values})"
        elif source is not None:
            text = self._as(source, "total" if node.target is ops.all_reduce else "same")
        elif form != "same" and _is_linear(node):
            text = " + ".join(self._as(n, form) for n in args_of(node)) if is_add(node) else self._scaled(node)
        elif form == "per_rank" and function_of(node) in ("mul", "div"):  # by a factor, of the model's or a token's own
            text = self._expression(node, {n: self._as(n, form) for n in node.all_input_nodes})
        elif form == "same" or (form == "per_rank" and kind_of(node) == "cast"):  # which acts on each rank's part
            text = self._expression(node, self._operands(node))
        else:
            raise RewriterError(f"{node.name}: {node.target} of a value that differs by rank cannot be printed")
        cast = args_of(node)[0] if form == "same" and kind_of(node) == "cast" else None
        if cast is not None and in_stream(cast) and len(cast.users) == 1 and marks(cast).layer == marks(node).layer:
            name = self.names[cast]  # in place of it
        else:
            name = self.unique.new(self._wish(node))
        self.names[node] = name
        self.statements.append((name, broken(f"{_PAD}{name} = {text}")))

    def _expression(self, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
        return WiringPrinter(self.path, names, self.arguments).expression(node)

    def _text(self, node: fx.Node) -> str:
        if node in self.names or not self._is_inlined(node):
            return self.names[node]
        if node.target is ops.all_reduce:
            return self._as(args_of(node)[0], "total")
        return self._scaled(node) if _is_scaled(node) else self._expression(node, self._operands(node))

    def _operands(self, node: fx.Node) -> dict[fx.Node, str]:
        return {n: self._text(n) for n in node.all_input_nodes if n in self.names or self._is_inlined(n)}

    def _as(self, node: fx.Node, wanted: Form) -> str:
        """`node` as a term of a value of the form `wanted`; ranks that agree hold what the first one does."""
        form = self.form[node]
        if form == wanted:
            return self._text(node)
        text = self._text(node)
        atom = text if text.isidentifier() else f"({text})"
        if wanted == "per_rank" and form == "same":
            while node.target in _ON_ALL:
                node = args_of(node)[0]
            if node.op == "get_attr":  # [D], or a number
                return text
            return f"{atom}.unsqueeze(-2)"
        if wanted == "same" and form == "per_rank":
            return f"{atom}[..., 0, :]"
        if wanted == "total" and form == "per_rank":
            return f"{atom}.sum(-2)"
        if wanted == "total":  # every rank adds what all of them share
            return f"{atom} * {self.ranks}"
        raise RewriterError(f"{node.name} is {form} on all ranks, and {wanted} is needed")

    def _scaled(self, node: fx.Node) -> str:
        """A value times a number; the sum over ranks of x / ranks is their mean."""
        source, form = args_of(node)[0], self.form[node]
        number = args_of(node)[1]
        if (
            form == "total"
            and self.form[source] == "per_rank"
            and function_of(node) == "mul"
            and number * self.ranks == 1
        ):
            return f"{self._text(source)}.mean(-2)"
        return self._expression(node, {source: self._as(source, form)})

    # --- children

    def _call(self, node: fx.Node) -> str:
        path = str(node.target)
        module, inner = self.program.modules[path], path.removeprefix(self.path + ".")
        if node not in self.local:
            return self._expression(node, self._operands(node))
        if not computes_partial(module) and not is_entry(module):
            self._replicated(node, inner)
            return self._expression(node, self._operands(node))
        child = self._child(node)
        self.child.add(child, inner)
        names = self._operands(node)
        for source in node.all_input_nodes:
            per_rank = self.form[source] == "per_rank"
            if child.tokens:
                names[source] += ".flatten(1, 2).contiguous()" if per_rank else ".repeat_interleave(RANKS, 1)"
            elif per_rank:
                names[source] += ".flatten(-2)"
        text = self._expression(node, names)
        if child.tokens:
            text += ".unflatten(1, (-1, RANKS))" + (".sum(-2)" if self.form[node] == "total" else "")
        return text

    def _replicated(self, node: fx.Node, inner: str) -> None:
        """A child that every rank computes in full; a norm may have weights per rank.

        Raises RewriterError where it reads values that differ by rank and looks across tokens.
        """
        path = str(node.target)
        module = self.program.modules[path]
        if any(self._per_rank_inputs(node)) and not token_by_token(module):
            raise RewriterError(
                f"{path}: every rank computes all of it, from a value that differs by rank, and it does not map "
                "tokens one by one: its ranks cannot run on one device in the source's own code. "
                "`rewriter.simulate` and the sharded runtime compute them; leave its layer out of the selection"
            )
        own = any(p.ranges is not None for n, p in self.program.parameters.items() if n.startswith(f"{path}."))
        if own and not computes(module):
            kind = module.kind if isinstance(module, Leaf) else module.class_name
            self.child.modules[inner] = PerRankModule("Norm", kind)

    def _per_rank_inputs(self, node: fx.Node) -> list[bool]:
        return [isinstance(a, fx.Node) and self.form[a] == "per_rank" for a in node.args]

    def _child(self, node: fx.Node) -> PerRankChild:
        """The modules of a split child that compute per rank. Raises RewriterError where the source's code cannot."""
        path, inputs, needs_parts = str(node.target), self._per_rank_inputs(node), self.form[node] == "per_rank"
        try:
            if has_experts(self.program.modules[path]) and (any(inputs) or needs_parts):
                return token_child(self.program, path)
            return per_rank_child(self.program, path, inputs, needs_parts)
        except NotPerRank as reason:
            raise RewriterError(
                f"{path}: its {self.ranks} ranks cannot run on one device in the source's own code: {reason}. "
                "`rewriter.simulate` and the sharded runtime compute them; leave its layer out of the selection"
            ) from None

    def _wish(self, node: fx.Node) -> str:
        """The name of the variable of a value, where that is free."""
        if node.op == "call_module":
            return str(node.target).removeprefix(self.path + ".")
        users = list(node.users)
        if len(users) == 1 and users[0].target is ops.all_reduce and self.form[node] == "total":
            node = users[0]  # it is printed as nothing
        if node.target is ops.copy_to_group:  # of a sum over the ranks: of anything else it is printed as nothing
            return "summed"
        if node.name in self.labels:
            return self.labels[node.name]
        if marks(node).reads is not None:
            return "with_own_part"
        if node.target is ops.where_rewired:
            return "read"
        if is_add(node) or node.target in (ops.all_reduce, ops.agreed):
            return "added" if self.form[node] == "total" else "total"
        return node.name


def _element(node: fx.Node) -> int | None:
    """The place of a value in the tuple that a child returns, where the layer uses several values of it."""
    call = marks(args_of(node)[0]).python if node.target is operator.getitem else None
    return call.index[args_of(node)[1]] if call is not None and isinstance(call.index, tuple) else None


def _stream_number(node: fx.Node) -> int | None:
    """The number of the stream value that a node is, or casts."""
    return marks(args_of(node)[0] if kind_of(node) == "cast" else node).stream


def _is_scaled(node: fx.Node) -> bool:
    return is_scaling(node) and node.args[0] is node.all_input_nodes[0]


def _is_linear(node: fx.Node) -> bool:
    return _is_scaled(node) or is_add(node)


def _stream_labels(program: Program) -> dict[str, str]:
    """Names of values of the residual stream, by the name of their node: `after_mlp`.

    On one device a pass keeps the source's adds, or they are no blocks any more; on ranks, the values of the stream.
    """
    labels = {}
    for block in residual_blocks(program.origin or program):
        part = "layer" if block.kind == "parallel" else block.path.rpartition(".")[2]
        labels[block.index + 1, block.add.name] = f"after_{part}"
    if not program.mesh:
        return {name: label for (_, name), label in labels.items()}
    by_index = {index: label for (index, _), label in labels.items()}
    return {n.name: by_index.get(stream_index(n), "total") for n in program.graph.nodes if in_stream(n)}
