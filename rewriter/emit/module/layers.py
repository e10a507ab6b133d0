"""The decoder layers of an emitted runtime module: one class per distinct layer, printed from the wiring."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.emit.module.classes import ClassTable, containers, leaf_needs_group
from rewriter.emit.module.roles import Roles
from rewriter.emit.node_code import NodePrinter
from rewriter.emit.python_source import UniqueNames, assignment, attribute, free_name
from rewriter.emit.statements import StatementPrinter, returning
from rewriter.ir import Body, Leaf, Module, Program, args_of, ops
from rewriter.ir.communication import local_values
from rewriter.ir.labels import reduced_shape, value_of
from rewriter.ir.marks import in_stream, mark, marks, running_layer, stream_index
from rewriter.ir.residual import residual_blocks
from rewriter.ir.structure import is_dropout

_BASE = '    """The modules of a layer; classes below say how they are wired."""'


def previous(distance: int) -> str:
    """The name, in the code of a layer, of the layer `distance` before it."""
    return "previous" if distance == 1 else f"previous_{distance}"


@dataclass(frozen=True)
class RuntimeLayer:
    """One layer: its class (while that has no name, the text of its methods), its constructor `init`, the arguments
    that build it, and its call. `takes` and `gives` are the values that cross, in order; `reads` says how many layers
    before it those are whose modules it calls."""

    cls: str
    init: str
    arguments: str
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    reads: tuple[int, ...]

    @property
    def construct(self) -> str:
        return f"{self.cls}({self.arguments})"


class RuntimeLayerPrinter:
    """Prints the layers of `program`, cut as in `outline`, with the classes of their children in `table`."""

    def __init__(self, program: Program, cut: Outline, table: ClassTable, names: UniqueNames) -> None:
        self.program, self.outline, self.table, self.names = program, cut, table, names
        self.order = {n: i for i, n in enumerate(program.graph.nodes)}
        placed = {n for r in cut.layers for n in r.nodes}
        inputs = {n for r in cut.layers for n in r.inputs}
        self.context = {n for n in inputs if n not in placed and marks(n).stream is None}
        self.local = local_values(program.graph, program.parameters)
        self.roles = Roles(program, self.local)
        self.slot_specs: list[str] = []
        for node in program.graph.nodes:
            body = program.modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(body, Body) and any(n in self.local for n in node.all_input_nodes):
                table.per_rank.add(id(body))

    def run(self) -> tuple[list[RuntimeLayer], str]:
        """(the layers, the source of their classes)."""
        printed = [self._layer(i, r) for i, r in enumerate(self.outline.layers)]
        classes = self._names([(layer.init, layer.cls) for layer in printed])
        layers = [replace(layer, cls=classes[layer.init, layer.cls]) for layer in printed]
        users = Counter(init for init, _ in classes)
        bases: dict[str, str] = {}  # by constructor, of those that several classes have
        parts = []
        for (init, forward), name in classes.items():
            if users[init] == 1:
                parts.append(f"class {name}(nn.Module):\n{init}\n\n{forward}")
                continue
            if init not in bases:
                bases[init] = self.names.new(f"{self.program.source.layer_class}Base")
                parts.append(f"class {bases[init]}(nn.Module):\n{_BASE}\n\n{init}")
            parts.append(f"class {name}({bases[init]}):\n{forward}")
        return layers, "\n\n\n".join(parts)

    # --- names of classes

    def _names(self, texts: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """A class name per distinct text: after how its layers are wired, and where they stand among such layers."""
        families = [""] * len(self.outline.layers)  # how each layer is wired, as the beginning of its class name
        for block in residual_blocks(self.program):
            families[block.layer] = families[block.layer] or block.mode.prefix
        modes = [
            "Resync" if self._has_own(layer.inputs) and not self._has_own(layer.outputs) else name
            for name, layer in zip(families, self.outline.layers, strict=True)
        ]
        uses: dict[tuple[str, str], list[int]] = {}
        for index, text in enumerate(texts):
            uses.setdefault(text, []).append(index)
        places = {text: _place(layers, families) for text, layers in uses.items()}
        usual: dict[
            str, tuple[str, str]
        ] = {}  # per mode: a text in the middle, else that of most layers, else of the last ones
        for text, layers in sorted(uses.items(), key=lambda use: (not places[use[0]], len(use[1]), use[1])):
            usual[modes[layers[0]]] = text
        result = {}
        for text, layers in uses.items():
            mode = modes[layers[0]]
            place = "" if usual[mode] == text else places[text]
            result[text] = self.names.new(f"{place}{mode}{self.program.source.layer_class}")
        return result

    def _has_own(self, values: Collection[fx.Node]) -> bool:
        """True where each rank has its own residual among `values`."""
        return any(in_stream(n) and n in self.local for n in values)

    # --- one layer

    def _layer(self, index: int, region: Region) -> RuntimeLayer:
        path, source = self.program.layer_path(index), self.program.source
        children = {
            p.removeprefix(f"{path}."): m
            for p, m in self.program.modules.items()
            if p.startswith(f"{path}.") and not is_dropout(m)
        }
        takes, names = self._interface(region)
        reads: set[int] = set()

        def module(target: str) -> str:
            owner, _, rest = target.removeprefix(f"{source.layers}.").partition(".")
            if owner == str(index):
                return attribute(rest)
            if not owner.isdecimal() or int(owner) > index:
                raise RewriterError(f"layer {index} would call {target}, which is no module of it or of a layer before")
            reads.add(index - int(owner))
            return attribute(rest, previous(index - int(owner)))

        lines, methods = self._schedule(region, names, module)
        before = tuple(sorted(reads))
        given = [names[n] for n in takes]
        gives = tuple(sorted(region.outputs, key=self.crossing_order))
        constructors = {name: self.table.construct(child) for name, child in children.items()}
        classes = [self.table.add(m) for m in children.values() if isinstance(m, Body)]
        needs_group = (
            any(n.target in SCHEDULED or n.target in (ops.copy_to_group, ops.agreed) for n in region.nodes)
            or any("tp" in c.arguments for c in classes)
            or any(leaf_needs_group(m) for m in children.values() if isinstance(m, Leaf))
        )
        slot = len(self.slot_specs)
        self.slot_specs += cache_slots(children)
        has_slot = len(self.slot_specs) > slot
        arguments = [*(["tp"] if needs_group else []), *(["slot"] if has_slot else [])]
        init = [f"    def __init__(self{''.join(f', {a}' for a in arguments)}):", "        super().__init__()"]
        init += ["        self.tp = tp"] if needs_group else []
        init += [f"        {line}" for line in containers(list(constructors))]
        init += [f"        {assignment(name, text)}" for name, text in constructors.items()]
        head = ", ".join(["self", *map(previous, before), *given])
        results = ", ".join(names[n] for n in gives)
        body = [f"    def forward({head}):", *(f"        {line}" for line in returning(lines, results))]
        for method in methods:
            body += ["", *(f"    {line}".rstrip() for line in method)]
        values = {"tp": "tp", "slot": f"slot={slot}"}
        built = ", ".join(values[a] for a in arguments)
        return RuntimeLayer("\n".join(body), "\n".join(init), built, takes, gives, before)

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
        self, layer: Region, names: dict[fx.Node, str], module: Callable[[str], str]
    ) -> tuple[list[str], list[list[str]]]:
        """(lines of forward: segments and collectives; methods of the segments). Names results in `names`."""
        outputs = self.names_of(layer.outputs)
        pieces = segments(layer, self.order)
        bound = [n for p in pieces for n in ([p] if isinstance(p, fx.Node) else p.outputs)]
        last_use = {n: max((self.order[u] for u in n.users), default=-1) for n in (*layer.inputs, *bound)}
        owner = {name: node for node, name in names.items()}
        lines: list[str] = []
        methods: list[list[str]] = []

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
                yield f"{', '.join(names[n] for n in piece.outputs)} = {call}"
                return
            for node in _nodes(piece):
                if node.target in (ops.all_reduce_start, ops.all_reduce):
                    mark(node, tag=self.roles.of(args_of(node)[0]))
                text = NodePrinter(names.__getitem__, module).expression(node)
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
        return lines, methods

    def _segment(
        self, piece: Region, names: dict[fx.Node, str], module: Callable[[str], str], methods: list[list[str]]
    ) -> str:
        """Print one run of computation as a method; returns its call. What communicates inside is not compiled."""
        communicates = any(self._communicates(n) for n in piece.nodes)
        name = f"{'block' if communicates else 'segment'}_{len(methods)}"
        takes = sorted(piece.inputs, key=lambda n: (n in self.context, n.target == "ctx", *self.crossing_order(n)))
        env = {n: names[n] for n in takes}
        head = list(env.values())
        kept = dict.fromkeys(piece.outputs)
        called: set[str] = set()

        def counted(target: str) -> str:
            text = module(target)
            called.add(text.partition(".")[0].partition("[")[0])
            return text

        printed = StatementPrinter(piece.nodes, env, kept, self.roles.of, counted, inline=False)
        printed.run()
        layers = sorted(called - {"self"}, key=lambda name: (len(name), name))
        results = ", ".join(printed.env[n] for n in piece.outputs)
        body = returning(printed.text, results)
        methods.append([f"def {name}({', '.join(['self', *layers, *head])}):", *(f"    {line}" for line in body)])
        return f"self.{name}({', '.join([*layers, *head])})"

    def _communicates(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        body = self.program.modules[str(node.target)]
        return isinstance(body, Body) and self.table.add(body).communicates


def _place(layers: Sequence[int], families: Sequence[str]) -> str:
    """The place of layers among those of the same wiring: "First", "Last", "Drained" after a ladder, or none."""
    if all(i == 0 or families[i] != families[i - 1] for i in layers):
        drained = all(i > 0 and "Ladder" in families[i - 1] and "Ladder" not in families[i] for i in layers)
        return "Drained" if drained else "First"
    if all(i + 1 == len(families) or families[i] != families[i + 1] for i in layers):
        return "Last"
    return ""


def _nodes(piece: Region | fx.Node) -> tuple[fx.Node, ...]:
    return piece.nodes if isinstance(piece, Region) else (piece,)


def _is_glue(node: fx.Node) -> bool:
    """True if a wiring node is plain arithmetic between modules, such as an add after a sum: it needs no method."""
    return node.op == "call_function" and node.target not in SCHEDULED


def cache_slots(children: Mapping[str, Module]) -> list[str]:
    """The cache entries of a layer's attention calls, as constructor expressions, in order."""
    slots = []
    for child in children.values():
        for node in child.graph.nodes if isinstance(child, Body) else ():
            if node.target is ops.attention:
                k, v = value_of(args_of(node)[1]), value_of(args_of(node)[2])
                heads = marks(node).local_kv_heads or reduced_shape(k)[1]
                mask = node.kwargs["mask"]
                window = f", window={mask.cached}" if mask.cached is not None else ""
                slots.append(f"SlotSpec({heads}, {reduced_shape(k)[-1]}, {reduced_shape(v)[-1]}{window})")
    return slots


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
