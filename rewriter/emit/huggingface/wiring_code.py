"""The wiring of a layer as Python: calls of children as the source makes them, arguments as versions name them.

What a layer gives, under its own name, to every child that also gets its `**kwargs`, and to nothing else, stays in
`**kwargs` under the name that this version of transformers uses. Where that is not so of the cache, it is taken out of
`**kwargs` and given to each child under the name that the child has for it; nor is it so of mixers without attention,
which had other names for it than their layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from rewriter.emit.huggingface.source_classes import passed_by_place
from rewriter.emit.huggingface.verbatim.phases import CACHE_NAMES
from rewriter.emit.node_code import NodePrinter
from rewriter.emit.python_source import attribute, identifier, literal, quoted
from rewriter.ir import SPLAT, ChildInput, ChildItem, LayerArgument, PythonCall, Source
from rewriter.ir.marks import marks


@dataclass(frozen=True)
class LayerArguments:
    """The arguments of one printed layer.

    `named` stand in its signature, the hidden state first; `travelling` are those that stay in `**kwargs`. `cache` is
    the one that children get under their own names, None where there is none; with `takes_cache` it is taken out of
    `**kwargs`, else it is named.
    """

    named: tuple[str, ...]
    travelling: frozenset[str] = frozenset()
    cache: str | None = None
    takes_cache: bool = False

    def variable(self, name: str) -> str:
        """The name of an argument in the layer's body."""
        return "cache" if self.takes_cache and name == self.cache else name


def arguments_of(source: Source, calls: Sequence[tuple[PythonCall, bool]], absent: Collection[str]) -> LayerArguments:
    """The arguments of a layer that makes these calls of its children, and whether each of them keeps
    something in the cache.

    `absent` are those that the model always leaves out.
    """
    names = source.layer_arguments
    free = [name for name in names[passed_by_place(source) :] if name not in absent and name != names[0]]
    uses = {name: [_uses(call, name) for call, _ in calls] for name in names}
    splat = [call.splat and (1, 1) for call, _ in calls]
    handed_on = [name for name in free if any(splat) and uses[name] == [use or (0, 0) for use in splat]]
    other = any(call.splat and not cached for call, cached in calls)
    travelling = frozenset(name for name in handed_on if not (other and name in CACHE_NAMES))
    cache = next((name for name in names if name in CACHE_NAMES and name not in {*travelling, *absent}), None)
    if cache is not None and not any(count for count, _ in uses[cache]):
        cache = None
    takes = cache in free
    named = tuple(name for name in names if name not in travelling and not (takes and name == cache))
    return LayerArguments(named, travelling, cache, takes)


def _uses(call: PythonCall, name: str) -> tuple[int, int]:
    """Number of arguments of its layer that a call is given, and of these the keywords of that name."""
    given = tree_leaves((call.args, dict(call.kwargs)))
    return given.count(LayerArgument(name)), int(call.kwargs.get(name) == LayerArgument(name))


class WiringPrinter(NodePrinter):
    """Prints nodes of the wiring as the source's layer at `path` would: its children are called as the source does.

    `names` are the expressions of other nodes. `arguments` says how children get those of the layer.
    """

    functional = "torch.nn.functional"

    def __init__(self, path: str, names: Mapping[fx.Node, str], arguments: LayerArguments) -> None:
        def child(target: str) -> str:
            return attribute(target.removeprefix(f"{path}.").partition("#")[0])  # variants are the source's one module

        super().__init__(names.__getitem__, child, child)
        self.path, self.layer = path, arguments

    def expression(self, node: fx.Node) -> str:
        call = marks(node).python
        if node.op != "call_module" or call is None:
            return super().expression(node)

        def leaf(value: Any) -> str | None:
            if isinstance(value, ChildInput):
                return self.name(_argument(node, value))
            if isinstance(value, ChildItem):
                return f"{all_results(value.child)}[{value.index}]"
            if isinstance(value, LayerArgument):
                splat = value.name.startswith(SPLAT)
                return "kwargs" + value.name.removeprefix(SPLAT) if splat else self.layer.variable(value.name)
            return None

        def keyword(name: str, value: Any) -> str:
            given = value.name if isinstance(value, LayerArgument) else None
            if given is not None and given == self.layer.cache:
                child = quoted(str(node.target).removeprefix(self.path + "."))
                return f"**{{self.cache_names[{child}]: {self.layer.variable(given)}}}"
            return f"{name}={literal(value, leaf)}"

        named = {k: v for k, v in call.kwargs.items() if not (call.splat and k in self.layer.travelling)}
        items = [literal(a, leaf) for a in call.args] + [keyword(k, v) for k, v in named.items()]
        items += ["**kwargs"] * call.splat
        index = f"[{call.index}]" if isinstance(call.index, int) else ""
        text = f"{self.module(str(node.target))}({', '.join(items)})"
        if call.read:
            text = f"({all_results(str(node.target).removeprefix(self.path + '.'))} := {text})"
        return text + index

    def atom(self, x: Any) -> str:
        return self.value(x)  # names are identifiers, or calls of their methods


def all_results(child: str) -> str:
    """The variable of all that a child returned, where the source reads elements that a program has nothing of."""
    return identifier(f"{child}_results")


def operands(node: fx.Node) -> list[fx.Node]:
    """The wiring nodes whose values the printed node names: a child's other tensors arrive as layer arguments."""
    call = marks(node).python
    if call is None:
        return list(node.all_input_nodes)
    named: list[fx.Node] = []

    def note(value: Any) -> str | None:
        if isinstance(value, ChildInput):
            named.append(_argument(node, value))
        return "" if isinstance(value, (ChildInput, ChildItem, LayerArgument)) else None

    literal((call.args, call.kwargs), note)
    return named


def _argument(node: fx.Node, place: ChildInput) -> fx.Node:
    argument = node.args[place.index]
    assert isinstance(argument, fx.Node)
    return argument
