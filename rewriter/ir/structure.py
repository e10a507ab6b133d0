"""Parts of a Program: two levels of torch.fx graphs, parameters as expressions over checkpoint tensors.

*Wiring* (`graph`): one graph over the whole model. Nodes call the direct children of each decoder layer (norms,
attention, MLP, experts) and the modules around the layers; between them stand the residual adds and, after the passes
ran, the collectives. *Ops* (`Body.graph`): the inside of one child, over leaf modules, attention and ATen glue. Layers
that are alike share their bodies.

`rewriter.ir.marks` says what is known of each node. Shapes, tuples of ints and of the symbols "B"
(batch), "S" (tokens) and "N" (batch · tokens), are derived by `ir.shapes.wiring_shapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import ops
from rewriter.weights.expressions import Expression, Reference

Shape = tuple[int | str, ...]
SPLAT = "rewriter_kwargs"  # the name of a layer's `**kwargs` in its wiring


@dataclass(frozen=True)
class Leaf:
    """A module that stays itself: a torch.nn module or transformers' Conv1D.

    `options` are its constructor arguments; `parameters` and their shapes use the module's own names.
    """

    kind: str
    options: Mapping[str, Any]
    parameters: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v}' for k, v in self.options.items())})"


@dataclass(frozen=True)
class Body:
    """The inside of a module: an ops graph whose `call_module` and `get_attr` targets are relative to the module.

    `graph` takes one placeholder per tensor input, then `ctx` if it
    attends or carries a state. `parameters` are the tensors that the
    graph reads itself; `buffers` hold constants by value (rotary frequencies, embedding scales). `modules` are the
    lifted children. `outputs` is the number of tensors returned: one is returned bare, several as a tuple. `kept` are
    the indices of the tensors of the source's call that are inputs here. `dropout` is the largest probability found
    inside. `constant_inputs` are inputs that no gradient needs to reach (rotary cosines and sines). `shared` are own
    parameters of which ranks hold some elements more than once: (full size, ranges per rank). `stored` are own
    parameters that are buffers of the source module: checkpoints hold their values (a router's correction bias) and
    training leaves them alone. Each has a dtype that it keeps, or None where it follows the model's.
    `merged` are the children of a layer that a pass made this one body of.
    """

    class_name: str
    graph: fx.Graph
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, torch.Tensor]
    modules: Mapping[str, Module]
    outputs: int = 1
    kept: tuple[int, ...] = (0,)
    dropout: float = 0.0
    constant_inputs: frozenset[str] = frozenset()
    shared: Mapping[str, tuple[int, tuple[tuple[tuple[int, int], ...], ...]]] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    merged: tuple[str, ...] = ()

    @property
    def reads_context(self) -> bool:
        return any(n.op == "placeholder" and n.target == "ctx" for n in self.graph.nodes)


@dataclass(frozen=True)
class Opaque:
    """A child of a decoder layer that stays the source's own module, because its inside cannot be represented.

    The adapted checkpoint calls it as the source's layer does; `simulate` calls it in a live model (`host`), with the
    arguments that the unmodified model gives it there, but for the tensors that the wiring computes: `places` are their
    paths into (args, kwargs), in the order of the node's inputs. `reason` says what stopped the trace.
    `outputs` are the shapes of the tensors returned ("B", "S", "N" as in the wiring), `indices` where they stand in the
    returned tuple; None when a bare tensor is returned. `parameters` have names relative to the module.
    """

    class_name: str
    reason: str
    parameters: Mapping[str, tuple[int, ...]]
    places: tuple[tuple[Any, ...], ...]
    outputs: tuple[Shape, ...]
    indices: tuple[int, ...] | None

    @property
    def modules(self) -> Mapping[str, Module]:
        """Nothing of its inside is known."""
        return {}

    def __str__(self) -> str:
        return f"{self.class_name}, the source's own module: {self.reason}"


Module = Leaf | Body | Opaque


def parameters_of(module: Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(relative name, shape) of every parameter in a module, in a stable order."""
    yield from module.parameters.items()
    for path, child in module.modules.items() if isinstance(module, Body) else ():
        for name, shape in parameters_of(child):
            yield f"{path}.{name}", shape


@dataclass(frozen=True)
class PythonCall:
    """The call of a child in the source's layer, in Python, for printing a Hugging Face layer from the wiring.

    `args` and `kwargs` are trees whose leaves are constants, `ChildInput(i)` (the node's i-th argument), a
    `LayerArgument` or a `ChildItem`. `splat` says that the layer's `**kwargs` are passed on. `index` picks one element
    of a returned tuple; where the node gives several tensors, it says which elements they are. `read` are elements that
    a program has nothing of (a state, None without a cache) and the source reads: each with its place in the tuple that
    the layer returns, None where a later call alone is given it.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    splat: bool
    index: int | tuple[int, ...] | None
    read: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class ChildInput:
    index: int


@dataclass(frozen=True)
class LayerArgument:
    name: str


@dataclass(frozen=True)
class ChildItem:
    """An element of what the child at a path of the same layer returned, among those that its call says are read."""

    child: str
    index: int


@dataclass(frozen=True)
class LayerSource:
    """A class of decoder layers: the parameters of its forward, and whether it takes **kwargs.

    `module` defines it: another one than the model's where that is made of other models.
    """

    name: str
    arguments: tuple[str, ...]
    var_kwargs: bool
    module: str


@dataclass(frozen=True)
class Source:
    """Origin of a program: the model, its classes, and what of transformers its wiring was read from.

    `layer_class` and what follows from it are those of the first layer. `layer_classes` are all, the first one's
    first, and `layer_kinds` says of every layer which it is; `absent` are the arguments that each layer was traced
    without, because the model leaves them None, and `returns` the length of the tuple that it returns, None where it
    returns the hidden state alone. `fp32`: by the model's dtype ("bfloat16", "float16"), regular
    expressions for the names of parameters that transformers has in fp32 then. `unused` are the tensors of the
    checkpoint (what quantized ones stand for) that no parameter is made of. `by_length`: what a token computes depends
    on the length of its call (rotary scaling), and `renewed_after` says after how many tokens generation computes what
    it has cached anew, if ever. `joined`: behind so many of the first layers the model adds features of images, which a
    trace of text does not see. `own_cache`: the model's own class that keeps keys and values, and may forget some.
    `settings` are those of the text model that a pass has changed, `on_load` those that config.json cannot say (see
    `rewriter.ir.resizing.Sizes`), and `padded` the tensors that an output stores for them instead of the checkpoint's,
    by name, as expressions over the checkpoint's; then `vocabulary` is the number of tokens that the source has, and
    `places` says by weight and dimension which place of the source each element comes from, -1 for padding.
    """

    path: str | None
    config: Mapping[str, Any]
    model_type: str
    architecture: str
    base_class: str
    layer_class: str
    config_class: str
    module: str
    layers: str
    num_layers: int
    layer_arguments: tuple[str, ...]
    layer_var_kwargs: bool
    layer_classes: tuple[LayerSource, ...]
    layer_kinds: tuple[int, ...]
    absent: tuple[tuple[str, ...], ...]
    returns: tuple[int | None, ...]
    remote_code: bool = False
    fp32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    by_length: bool = False
    renewed_after: int | None = None
    joined: int = 0
    own_cache: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_load: Mapping[str, Any] = field(default_factory=dict)
    padded: Mapping[str, Expression] = field(default_factory=dict)
    places: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    vocabulary: int | None = None

    def alike(self, layer: int, other: int) -> bool:
        """True if two layers are of one class and were traced without the same arguments."""
        return self.layer_kinds[layer] == self.layer_kinds[other] and self.absent[layer] == self.absent[other]

    def module_of(self, class_name: str) -> str:
        """The module that defines a class of the layers; for any other class, the model's."""
        return next((cls.module for cls in self.layer_classes if cls.name == class_name), self.module)

    def of_layer(self, index: int) -> Source:
        """The same source, told from the class of layer `index`."""
        cls = self.layer_classes[self.layer_kinds[index]]
        return replace(
            self,
            layer_class=cls.name,
            layer_arguments=cls.arguments,
            layer_var_kwargs=cls.var_kwargs,
        )


@dataclass(frozen=True)
class Parameter:
    """One runtime parameter: `shape` on each rank, made by `expression` from checkpoint tensors, if there are any.

    When a pass has split it, rank r holds `ranges[r]` of the full tensor along `dim`, one after the other. `shared`
    says that elements are held more than once (replicated key/value heads), so that their gradients must be summed.
    `buffer`: checkpoints hold it and training leaves it alone, of a layer's own tensors (`wiring_tensors`).
    `parts` are the runtime names, as traced, of the parameters that a pass laid one after the other along `dim`; of one
    that is tied to a parameter with which nothing is computed, the name of that.
    """

    shape: tuple[int, ...]
    expression: Expression | None = None
    full_shape: tuple[int, ...] | None = None
    dim: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    shared: bool = False
    parts: tuple[str, ...] = ()
    buffer: bool = False

    def on_rank(self, rank: int) -> Expression:
        """The expression of this rank's part. Raises RewriterError when no checkpoint was read."""
        if self.expression is None:
            raise RewriterError("this program was traced from a config: it has no weights to read")
        return Reference(self.expression, self.dim, self.ranges).on_rank(rank)


@dataclass(frozen=True)
class PassRecord:
    """Record of one pass: a sentence per effect, kept in the manifest. `rewrite` is the pass, a frozen dataclass of its
    options. `fired` is False when it found nothing to change; `summary` then says why."""

    rewrite: Any
    summary: str
    notes: tuple[str, ...] = ()
    fired: bool = True

    @property
    def name(self) -> str:
        return str(self.rewrite.name)

    @property
    def kind(self) -> str:
        return str(self.rewrite.effect)

    @property
    def routine(self) -> bool:
        """`Pass.routine`."""
        return bool(self.rewrite.routine)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the pass; of those that many passes have (keyword-only fields), the ones that were set."""
        values = {f: getattr(self.rewrite, f.name) for f in fields(self.rewrite)}
        return {f.name: value for f, value in values.items() if not f.kw_only or value != f.default}

    def arguments(self) -> str:
        """The options as they would be written in a call; of a mapping (measured data) only its size."""
        shown = {k: f"{{{len(v)} entries}}" if isinstance(v, Mapping) else repr(v) for k, v in self.options.items()}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


@dataclass(frozen=True)
class ProgramData:
    """Data of a Program; `Program` adds editing and printing.

    `mesh` maps axis names to sizes ({"tp": 8}); empty on one device. `ties` maps an alias to the parameter it shares.
    `history` says what the passes did.
    """

    source: Source
    graph: fx.Graph
    modules: Mapping[str, Module]
    parameters: Mapping[str, Parameter]
    ties: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    history: tuple[PassRecord, ...] = ()


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """`node.args` without torch.fx's union type: what stands there is fixed by the node's target."""
    return node.args


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A deep copy of `graph` whose nodes keep their names and meta, and the map from old nodes to new ones."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
    return new, env


def walk_modules(modules: Mapping[str, Module]) -> Iterator[tuple[str, Module]]:
    """(full path, module) of every module, outer before inner."""
    for path, module in modules.items():
        yield path, module
        if isinstance(module, Body):
            for inner, child in walk_modules(module.modules):
                yield f"{path}.{inner}", child


def wiring_tensors(graph: fx.Graph, modules: Mapping[str, Module]) -> list[str]:
    """Full names of the tensors that a wiring reads and no module of it holds: the layers' own, in order."""
    read = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "get_attr")
    if not read:
        return []
    held = {f"{path}.{name}" for path, module in modules.items() for name, _ in parameters_of(module)}
    return [name for name in read if name not in held]


def nodes_inside(module: Module, path: str = "") -> Iterator[tuple[str, fx.Node]]:
    """(path of the body, node) of every node that a call of `module` at `path` runs, in order."""
    if not isinstance(module, Body):
        return
    for node in module.graph.nodes:
        yield path, node
        if node.op == "call_module":
            yield from nodes_inside(module.modules[str(node.target)], f"{path}.{node.target}")


def edit_bodies(modules: Mapping[str, Module], edit: Callable[[fx.Graph], Any]) -> dict[str, Module]:
    """`modules` after `edit` of a copy of every body's graph; modules that are alike share the result."""
    done: dict[int, Module] = {}

    def edited(module: Module) -> Module:
        if isinstance(module, Body) and id(module) not in done:
            graph, _ = copy_graph(module.graph)
            edit(graph)
            inner = {name: edited(child) for name, child in module.modules.items()}
            done[id(module)] = replace(module, graph=graph, modules=inner)
        return done.get(id(module), module)

    return {path: edited(module) for path, module in modules.items()}


def called_module(node: fx.Node, modules: Mapping[str, Module]) -> Module | None:
    """The module that a node calls; None for every other node."""
    return modules.get(str(node.target)) if node.op == "call_module" else None


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    return graph.find_nodes(op="placeholder")


def reachable(first: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """The nodes `first` and all that repeated steps lead to, each once."""
    seen = dict.fromkeys(first)
    todo = list(seen)
    while todo:
        new = [n for n in step(todo.pop(0)) if n not in seen]
        seen |= dict.fromkeys(new)
        todo += new
    return list(seen)


def bypass(node: fx.Node, value: fx.Node) -> None:
    """Erase `node`; its users read `value`."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def put_after(node: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A new call `target(node, *args)` after `node`, which all users of `node` read instead. It has no marks."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *args))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase every node that nothing uses. The IR is functional: no node has side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def is_dropout(module: Module | None) -> bool:
    """True if a module is torch's dropout."""
    return isinstance(module, Leaf) and module.kind == "Dropout"


def without_dropout(program: ProgramData) -> fx.Graph:
    """A copy of the wiring without dropout: a runtime module computes in eval mode, and a partial sum must meet its
    sum."""
    graph, _ = copy_graph(program.graph)
    for node in list(graph.nodes):
        if node.target is ops.dropout or is_dropout(called_module(node, program.modules)):
            bypass(node, args_of(node)[0])
    return graph
