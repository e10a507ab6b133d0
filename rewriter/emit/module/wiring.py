"""One wiring of a runtime module's layers, cut into layers and segments and printed as methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.emit.module.classes import ClassTable
from rewriter.emit.module.roles import Roles
from rewriter.emit.node_code import NodePrinter, is_effect
from rewriter.emit.python_source import attribute, free_name
from rewriter.emit.statements import StatementPrinter, returning
from rewriter.ir import Body, Program, args_of, nodes_inside, ops
from rewriter.ir.communication import local_values
from rewriter.ir.marks import in_stream, mark, marks, running_layer, set_marks, stream_index


def previous(distance: int) -> str:
    """The name, in the code of a layer, of the layer `distance` before it."""
    return "previous" if distance == 1 else f"previous_{distance}"


@dataclass(frozen=True)
class Entry:
    """A method of a layer that runs it by one wiring: its `arguments` after `self`, its lines, and the segments that it
    calls. `takes` and `gives` are the values that cross, in order; `reads` says how many layers before it those are
    whose modules it calls."""

    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    reads: tuple[int, ...]

    def method(self, name: str) -> str:
        """Its text, as a method `name`."""
        head = f"    def {name}({', '.join(['self', *self.arguments])}):"
        return "\n".join([head, *(f"        {line}" for line in self.lines)])


class Segments:
    """The methods of one layer's class that hold what it computes between collectives. Entries share equal ones."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.texts: list[str] = []  # without the name
        self._shared = 0  # how many there were before this entry

    def begin_entry(self) -> None:
        self._shared = len(self.names)

    def add(self, kind: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
        """The name of the method of these lines."""
        text = "\n".join([f"({', '.join(['self', *arguments])}):", *(f"        {line}".rstrip() for line in lines)])
        if text in self.texts[: self._shared]:
            return self.names[self.texts.index(text)]
        self.names.append(f"{kind}_{len(self.names)}")
        self.texts.append(text)
        return self.names[-1]

    def source(self, first: int = 0) -> list[str]:
        """The methods from number `first` on."""
        return [f"    def {n}{t}" for n, t in list(zip(self.names, self.texts, strict=True))[first:]]


def with_parameters_where_read(program: Program) -> Program:
    """Each parameter that the wiring itself reads is read right before its user, which may be behind a collective."""
    if not any(node.op == "get_attr" for node in program.graph.nodes):
        return program
    graph, _ = program.edit()
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        for user in list(node.users):
            with graph.inserting_before(user):
                own = graph.node_copy(node)
            set_marks(own, marks(user).only("layer", "runs_in", "beside"))
            user.replace_input_with(node, own)
        graph.erase_node(node)
    return program.with_(graph=graph)


class Wiring:
    """A wiring of `program`, which it prints entry by entry, with the classes of its bodies in `table`."""

    def __init__(self, program: Program, table: ClassTable) -> None:
        program = with_parameters_where_read(program)
        self.program, self.table = program, table
        self.outline = with_values_in_flight(outline(program.graph, program.source.num_layers))
        self.order = {n: i for i, n in enumerate(program.graph.nodes)}
        placed = {n for r in self.outline.layers for n in r.nodes}
        inputs = {n for r in self.outline.layers for n in r.inputs}
        self.context = {n for n in inputs if n not in placed and marks(n).stream is None}
        self.local = local_values(program.graph, program.parameters)
        self.roles = Roles(program, self.local)
        for node in program.graph.nodes:
            body = program.modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(body, Body) and any(n in self.local for n in node.all_input_nodes):
                table.per_rank.add(id(body))

    def entry(self, index: int, methods: Segments) -> Entry:
        """The entry of a layer. Its segments are added to `methods`."""
        region, layers = self.outline.layers[index], self.program.source.layers
        methods.begin_entry()
        takes, names = self._interface(region)
        reads: set[int] = set()

        def module(target: str) -> str:
            owner, _, rest = target.removeprefix(f"{layers}.").partition(".")
            if owner == str(index):
                return attribute(rest)
            if not owner.isdecimal() or int(owner) > index:
                raise RewriterError(f"layer {index} would call {target}, which is no module of it or of a layer before")
            reads.add(index - int(owner))
            return attribute(rest, previous(index - int(owner)))

        lines = self._schedule(region, names, module, methods)
        before = tuple(sorted(reads))
        gives = tuple(sorted(region.outputs, key=self.crossing_order))
        results = ", ".join(names[n] for n in gives)
        given = [self.names_of(takes)[n] for n in takes]
        return Entry((*map(previous, before), *given), tuple(returning(lines, results)), takes, gives, before)

    def needs_group(self, index: int) -> bool:
        """True if a layer itself communicates."""
        nodes = self.outline.layers[index].nodes
        return any(n.target in SCHEDULED or n.target in (ops.copy_to_group, ops.agreed) for n in nodes)

    def has_own(self, values: Collection[fx.Node]) -> bool:
        """True where each rank has its own residual among `values`."""
        return any(in_stream(n) and n in self.local for n in values)

    def _interface(self, region: Region) -> tuple[tuple[fx.Node, ...], dict[fx.Node, str]]:
        """(arguments in order: what crosses layers, then the context; names of the arguments)."""
        crossing = sorted((n for n in region.inputs if n not in self.context), key=self.crossing_order)
        context = sorted(
            (n for n in region.inputs if n in self.context), key=lambda n: (n.target == "ctx", self.order[n])
        )
        takes = (*crossing, *context)
        return takes, self.names_of(takes)

    def crossing_order(self, node: fx.Node) -> tuple[int, int]:
        """The stream first, newest first; then what is in flight, oldest first."""
        return (0, -stream_index(node)) if in_stream(node) else (1, self.order[node])

    def names_of(self, nodes: Collection[fx.Node]) -> dict[fx.Node, str]:
        """Names of values that cross layers."""
        return self.roles.crossing(sorted(nodes, key=self.crossing_order), self.context)

    def _schedule(
        self, layer: Region, names: dict[fx.Node, str], module: Callable[[str], str], methods: Segments
    ) -> list[str]:
        """Lines of an entry: segments and collectives. Names results in `names`."""
        outputs = self.names_of(layer.outputs)
        pieces = segments(layer, self.order)
        last_use = {n: max((self.order[u] for u in n.users), default=-1) for n in (*layer.inputs, *layer.nodes)}
        owner = {name: node for node, name in names.items()}
        lines: list[str] = []

        def bind(node: fx.Node, at: int) -> None:
            wanted = outputs.get(node) or self.roles.of(node)
            name = free_name(
                wanted, lambda name: name in owner and (owner[name] in outputs or last_use[owner[name]] > at)
            )
            names[node], owner[name] = name, node

        def text_of(piece: Region | fx.Node) -> Iterator[str]:
            if isinstance(piece, Region) and not (len(piece.nodes) <= 2 and all(_is_glue(n) for n in piece.nodes)):
                call = self._segment(piece, names, module, methods)
                for node in piece.outputs:
                    bind(node, self.order[piece.nodes[-1]])
                yield f"{', '.join(names[n] for n in piece.outputs)} = {call}" if piece.outputs else call
                return
            for node in _nodes(piece):
                if node.target in (ops.all_reduce_start, ops.all_reduce):
                    mark(node, tag=self.roles.of(args_of(node)[0]))
                text = NodePrinter(names.__getitem__, module, module).expression(node)
                bind(node, self.order[node])
                yield f"{names[node]} = {text}"

        forked = False
        for beside, run in itertools.groupby(pieces, key=lambda piece: marks(_nodes(piece)[0]).beside):
            together = list(run)
            if not beside:
                lines += [line for piece in together for line in text_of(piece)]
                continue
            read, _ = self._interface(region([n for p in together for n in _nodes(p)], self.order))
            lines += ["branch.join()"] * forked
            lines.append(f"with fork({', '.join(names[n] for n in read if n.target != 'ctx')}) as branch:")
            lines += [f"    {line}" for piece in together for line in text_of(piece)]
            forked = True
        lines += ["branch.join()"] * forked
        return lines

    def _segment(
        self, piece: Region, names: dict[fx.Node, str], module: Callable[[str], str], methods: Segments
    ) -> str:
        """Print one run of computation as a method; returns its call. What communicates inside is not compiled."""
        communicates = any(self._communicates(n) for n in piece.nodes)
        takes = sorted(piece.inputs, key=lambda n: (n in self.context, n.target == "ctx", *self.crossing_order(n)))
        env = {n: names[n] for n in takes}
        head = list(env.values())
        kept = dict.fromkeys(piece.outputs)
        called: set[str] = set()

        def counted(target: str) -> str:
            text = module(target)
            called.add(text.partition(".")[0].partition("[")[0])
            return text

        printed = StatementPrinter(piece.nodes, env, kept, self.roles.of, counted, counted, inline=False)
        printed.run()
        layers = sorted(called - {"self"}, key=lambda name: (len(name), name))
        results = ", ".join(printed.env[n] for n in piece.outputs)
        body = returning(printed.text, results)
        name = methods.add("block" if communicates else "segment", [*layers, *head], body)
        return f"self.{name}({', '.join([*layers, *head])})"

    def _communicates(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        body = self.program.modules[str(node.target)]
        if is_effect(node):  # a method of a class that is there
            return any(inner.target is ops.all_reduce for _, inner in nodes_inside(body))
        return isinstance(body, Body) and self.table.add(body).communicates


def _nodes(piece: Region | fx.Node) -> tuple[fx.Node, ...]:
    return piece.nodes if isinstance(piece, Region) else (piece,)


def _is_glue(node: fx.Node) -> bool:
    """True if a wiring node is plain arithmetic between modules, such as an add after a sum: it needs no method."""
    return node.op == "call_function" and node.target not in SCHEDULED


# --- the cut into layers and segments


SCHEDULED = frozenset({ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.all_gather, ops.repeat_shard})


@dataclass(frozen=True)
class Region:
    """Consecutive wiring nodes. `inputs` come from outside in order of definition, `outputs` are used outside."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Outline:
    """Nodes before the layers, of each layer, and after them."""

    before: tuple[fx.Node, ...]
    layers: tuple[Region, ...]
    after: tuple[fx.Node, ...]


def outline(graph: fx.Graph, num_layers: int) -> Outline:
    """Cut a wiring by the layer that runs each node. Raises RewriterError when layers interleave."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    of_layer: dict[int, list[fx.Node]] = {i: [] for i in range(num_layers)}
    before: list[fx.Node] = []
    after: list[fx.Node] = []
    reached = -1
    for node in nodes:
        layer = running_layer(node)
        if layer is None:
            (before if reached < 0 else after).append(node)
            continue
        if layer < reached:
            where = "after" if after else "inside"
            raise RewriterError(f"{node.name} of layer {layer} is scheduled {where} layer {reached}")
        reached = layer
        of_layer[layer].append(node)
    # what stands between layers but belongs to none (a constant, say) runs first if it needs no layer
    computed: set[fx.Node] = set()  # in a layer, or from what one computes
    for node in graph.nodes:
        if marks(node).layer is not None or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    before += [n for n in after if n not in computed]
    after = [n for n in after if n in computed]
    order = {n: i for i, n in enumerate(graph.nodes)}
    regions = tuple(region(of_layer[i], order) for i in range(num_layers))
    return Outline(tuple(before), regions, tuple(after))


def with_values_in_flight(cut: Outline) -> Outline:
    """The same outline, with values that only pass a layer by made its inputs and outputs.

    A loop over equal layers then sees the same number of values in flight before and after each.
    """
    last = {n: i for i, r in enumerate(cut.layers) for n in r.inputs}
    last |= {n: len(cut.layers) for node in cut.after for n in node.all_input_nodes}
    live = {n for n in cut.before if in_stream(n)}
    layers = []
    for index, layer in enumerate(cut.layers):
        passing = tuple(n for n in live if n not in layer.inputs and last.get(n, -1) > index)
        kept = tuple(n for n in layer.inputs if n in live and last[n] > index)
        layers.append(Region(layer.nodes, layer.inputs + passing, layer.outputs + passing + kept))
        live = set(layers[-1].outputs)
    return Outline(cut.before, tuple(layers), cut.after)


def region(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> Region:
    """The region of `nodes`, with its inputs and outputs."""
    inside = list(nodes)
    members = set(inside)
    inputs = {source for node in inside for source in node.all_input_nodes if source not in members}
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    return Region(tuple(inside), tuple(sorted(inputs, key=order.__getitem__)), tuple(outputs))


def segments(layer: Region, order: dict[fx.Node, int]) -> list[Region | fx.Node]:
    """A layer as computation (Regions, all or nothing of which runs in a branch) and collectives (nodes), in order."""
    result: list[Region | fx.Node] = []
    for (scheduled, _), run in itertools.groupby(layer.nodes, key=lambda n: (n.target in SCHEDULED, marks(n).beside)):
        nodes = list(run)
        result += nodes if scheduled else [region(nodes, order)]
    return result
