"""The decoder layers of an emitted runtime module: one class per distinct layer, printed from the wirings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from rewriter.emit.module.classes import ClassTable, containers, leaf_needs_group, registered
from rewriter.emit.module.wiring import Entry, Segments, Wiring
from rewriter.emit.python_source import UniqueNames, assignment
from rewriter.ir import (
    Body,
    Leaf,
    Module,
    Parameter,
    Program,
    args_of,
    called_module,
    ops,
    placeholders,
    wiring_tensors,
)
from rewriter.ir.labels import reduced_shape, value_of
from rewriter.ir.marks import marks
from rewriter.ir.residual import residual_blocks
from rewriter.ir.states import state_of
from rewriter.ir.structure import is_dropout

_BASE = '    """The modules of a layer; classes below say how they are wired."""'


@dataclass(frozen=True)
class LayerCall:
    """A layer's entry in one wiring: its method, "" for `forward`."""

    method: str
    entry: Entry


@dataclass
class LayerClass:
    """A class of layers, while it is printed: `init` and `methods` are texts."""

    init: str
    methods: list[str]
    segments: Segments
    name: str = ""
    added: dict[str, str] = field(default_factory=dict)  # methods of some of its layers alone, by text

    @property
    def key(self) -> tuple[str, str]:
        return self.init, "\n\n".join([*self.methods, *self.segments.source()])


@dataclass(frozen=True)
class RuntimeLayer:
    """One layer: its class, the arguments that build it, and its call in every wiring."""

    cls: LayerClass
    arguments: str
    calls: dict[str, LayerCall]

    @property
    def construct(self) -> str:
        return f"{self.cls.name}({self.arguments})"


class RuntimeLayerPrinter:
    """Prints the layers of `wirings`, by the methods of a layer that run it so: "" for `forward`, which all layers
    have, then those that differ from it. The methods of `partial` wirings, which need only some layers of a class in a
    form of their own, do not make classes of layers differ. Classes of the layers' children are in `table`."""

    def __init__(
        self, wirings: Mapping[str, Wiring], partial: Mapping[str, Wiring], table: ClassTable, names: UniqueNames
    ) -> None:
        self.wirings, self.partial, self.table, self.names = wirings, partial, table, names
        self.main = wirings.get("rewired", wirings[""])  # whose layers give classes their names
        self.program = self.main.program
        self.slot_specs: list[str] = []
        self.tensors = wiring_tensors(self.program.graph, self.program.modules)
        self.owners = key_owners(self.program)
        self.first_slots: dict[str, int] = {}  # by path of a layer's child

    def run(self) -> tuple[list[RuntimeLayer], str]:
        """(the layers, the source of their classes)."""
        printed = [self._layer(index) for index in range(self.program.source.num_layers)]
        classes: dict[tuple[str, str], LayerClass] = {}
        for layer in printed:
            classes.setdefault(layer.cls.key, layer.cls)
        texts = [layer.cls.key for layer in printed]
        for key, name in self._names(texts).items():
            classes[key].name = name
        layers = [
            RuntimeLayer(classes[key], layer.arguments, layer.calls) for key, layer in zip(texts, printed, strict=True)
        ]
        for index, layer in enumerate(layers):
            for method, wiring in self.partial.items():
                layer.calls[method] = self._partial(layer, method, wiring.entry(index, layer.cls.segments))
        return layers, self._source([classes[key] for key in dict.fromkeys(texts)])

    def _source(self, classes: Sequence[LayerClass]) -> str:
        users = Counter(cls.init for cls in classes)
        bases: dict[str, str] = {}  # by constructor, of those that several classes have
        parts = []
        for cls in classes:
            methods = "\n\n".join([*cls.methods, *cls.added, *cls.segments.source()])
            if users[cls.init] == 1:
                parts.append(f"class {cls.name}(nn.Module):\n{cls.init}\n\n{methods}")
                continue
            if cls.init not in bases:
                bases[cls.init] = self.names.new(f"{self.program.source.layer_class}Base")
                parts.append(f"class {bases[cls.init]}(nn.Module):\n{_BASE}\n\n{cls.init}")
            parts.append(f"class {cls.name}({bases[cls.init]}):\n{methods}")
        return "\n\n\n".join(parts)

    # --- names of classes

    def _names(self, texts: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """A class name per distinct text: after how its layers are wired, and where they stand among such layers."""
        regions = self.main.outline.layers
        families = [""] * len(regions)  # how each layer is wired, as the beginning of its class name
        for block in residual_blocks(self.program):
            families[block.layer] = families[block.layer] or block.mode.prefix
        modes = [
            "Resync" if self.main.has_own(layer.inputs) and not self.main.has_own(layer.outputs) else name
            for name, layer in zip(families, regions, strict=True)
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

    # --- one layer

    def _layer(self, index: int) -> RuntimeLayer:
        path = self.program.layer_path(index)
        children = {
            p.removeprefix(f"{path}."): m
            for p, m in self.program.modules.items()
            if p.startswith(f"{path}.") and not is_dropout(m)
        }
        tensors = (name for name in self.tensors if name.startswith(f"{path}."))
        own = {name.removeprefix(f"{path}."): self.program.parameters[name] for name in tensors}
        segments = Segments()
        calls: dict[str, LayerCall] = {}
        methods: dict[str, str] = {}  # method by text without its name
        for method, wiring in self.wirings.items():
            entry = wiring.entry(index, segments)
            name = methods.setdefault(entry.method(""), method)
            calls[method] = LayerCall(name, entry)
        texts = [calls[name].entry.method(name or "forward") for name in methods.values()]
        slot, constructors = len(self.slot_specs), {}
        for name, child in children.items():
            taken = len(self.slot_specs) - slot
            place = f"slot + {taken}" if taken else "slot"
            if (owner := self.owners.get(f"{path}.{name}")) is not None:
                place = str(self.first_slots[owner])
            constructors[name] = self.table.construct(child, place)
            self.first_slots[f"{path}.{name}"] = len(self.slot_specs)
            self.slot_specs += cache_slots(child, f"{path}.{name}" in self.owners.values())
        classes = [self.table.add(m) for m in children.values() if isinstance(m, Body)]
        needs_group = (
            any(wiring.needs_group(index) for wiring in self.wirings.values())
            or any("tp" in c.arguments for c in classes)
            or any(leaf_needs_group(m) for m in children.values() if isinstance(m, Leaf))
        )
        has_slot = len(self.slot_specs) > slot
        arguments = [*(["tp"] if needs_group else []), *(["slot"] if has_slot else [])]
        init = [f"    def __init__(self{''.join(f', {a}' for a in arguments)}):", "        super().__init__()"]
        init += ["        self.tp = tp"] if needs_group else []
        init += [f"        {line}" for line in containers([*constructors, *own], list(own))]
        init += [f"        {assignment(name, text)}" for name, text in constructors.items()]
        init += [f"        {_tensor(name, parameter)}" for name, parameter in own.items()]
        values = {"tp": "tp", "slot": f"slot={slot}"}
        built = ", ".join(values[a] for a in arguments)
        return RuntimeLayer(LayerClass("\n".join(init), texts, segments), built, calls)

    def _partial(self, layer: RuntimeLayer, method: str, entry: Entry) -> LayerCall:
        """The call of a layer by an entry that its class has already, or is given; none where nothing is needed."""
        if not entry.lines:
            return LayerCall("", entry)
        for call in layer.calls.values():
            if entry.method("") == call.entry.method(""):
                return LayerCall(call.method, entry)
        added = layer.cls.added
        known = next((name for text, name in added.items() if text == entry.method(name)), None)
        name = known or (f"{method}_{len(added) + 1}" if added else method)
        added[entry.method(name)] = name
        return LayerCall(name, entry)


def _tensor(name: str, parameter: Parameter) -> str:
    """The statement that makes a tensor of a layer's own."""
    value = f"torch.empty({', '.join(map(str, parameter.shape)) or '()'})"
    return registered(name, value) if parameter.buffer else assignment(name, f"nn.Parameter({value})")


def _place(layers: Sequence[int], families: Sequence[str]) -> str:
    """The place of layers among those of the same wiring: "First", "Last", "Drained" after a ladder, or none."""
    if all(i == 0 or families[i] != families[i - 1] for i in layers):
        drained = all(i > 0 and "Ladder" in families[i - 1] and "Ladder" not in families[i] for i in layers)
        return "Drained" if drained else "First"
    if all(i + 1 == len(families) or families[i] != families[i + 1] for i in layers):
        return "Last"
    return ""


def key_owners(program: Program) -> dict[str, str]:
    """By path of a layer's child that reads keys which an earlier one stored, the path of that one."""
    owners: dict[str, str] = {}
    for node in program.graph.nodes:
        body = called_module(node, program.modules)
        for inner in body.graph.nodes if isinstance(body, Body) else ():
            if inner.target is ops.attention and inner.kwargs.get("stored"):
                given = dict(zip(placeholders(body.graph), node.args, strict=True))
                source = given[args_of(inner)[1]]
                while isinstance(source, fx.Node) and source.op != "call_module":
                    source = source.all_input_nodes[0]
                owners[str(node.target)] = str(source.target)
    return owners


def cache_slots(child: Module, shared: bool = False) -> list[str]:
    """The cache entries of what a layer's child keeps between calls, as constructor expressions, in order.

    With `shared`, later layers read them too: all tokens are kept, for those that a window hides from the last of
    several new tokens are seen by the first.
    """
    slots = []
    for node in child.graph.nodes if isinstance(child, Body) else ():
        if node.target is ops.attention and node.kwargs.get("stored"):
            continue
        if node.target is ops.attention:
            k, v = value_of(args_of(node)[1]), value_of(args_of(node)[2])
            heads = marks(node).local_kv_heads or reduced_shape(k)[1]
            placed = {"keys", "key_bias"} & node.kwargs.keys()  # their places count from the first token
            cached = None if placed else node.kwargs["mask"].cached
            window = f", window={cached}" if cached is not None and not shared else ""
            slots.append(f"SlotSpec({heads}, {reduced_shape(k)[-1]}, {reduced_shape(v)[-1]}{window})")
        elif node.target is ops.remember:
            slots.append(f"SlotSpec(1, {marks(node).local_channels or reduced_shape(value_of(node))[-1]}, 0)")
        elif node.target is ops.remember_blocks:
            slots.append(f"SlotSpec(1, {reduced_shape(value_of(node))[-1]}, 0, tokens={node.kwargs['size']})")
        elif node.target in ops.STATEFUL:
            state = state_of(node)
            slots.append(f"StateSpec({state.shape}, fp32={state.fp32})")
    return slots
