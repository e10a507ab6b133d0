"""How a printed layer takes what is not the hidden state, and hands it on: so that names may differ by version.

What a layer gives, under its own name, to every child that also gets its `**kwargs`, and to nothing else, stays in
`**kwargs` under whatever name this version of transformers uses. The cache, whose name differs most, is taken out of
`**kwargs` where that is not so, and given to each child under the name that the child has for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rewriter.emit.source_classes import passed_by_place
from rewriter.emit.verbatim.cache_names import CACHE_NAMES
from rewriter.ir import LayerArgument, PythonCall, Source


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
        """What an argument is called in the layer's body."""
        return "cache" if self.takes_cache and name == self.cache else name


def arguments_of(source: Source, calls: Iterable[PythonCall], absent: Iterable[str]) -> LayerArguments:
    """The arguments of a layer that makes these calls of its children; `absent` are always left out by the model."""
    names, by_place, calls = source.layer_arguments, passed_by_place(source), list(calls)
    free = [name for name in names[by_place:] if name not in absent and name != names[0]]
    uses = {name: [(*_uses(call, name), call.splat) for call in calls] for name in names}
    handed_on = {name for name in free if {*uses[name]} <= {(1, 1, True), (0, 0, False)}}
    travelling = frozenset(handed_on) if any(call.splat for call in calls) else frozenset()
    cache = next((name for name in names if name in CACHE_NAMES and name not in {*travelling, *absent}), None)
    if cache is not None and not any(count for count, *_ in uses[cache]):
        cache = None
    takes = cache in free
    named = tuple(name for name in names if name not in travelling and not (takes and name == cache))
    return LayerArguments(named, travelling, cache, takes)


def _uses(call: PythonCall, name: str) -> tuple[int, int]:
    """How often a call is given an argument of its layer, and how often of these as a keyword of that name."""
    count = 0

    def visit(tree: object) -> None:
        nonlocal count
        if isinstance(tree, LayerArgument):
            count += tree.name == name
        elif isinstance(tree, (tuple, list)):
            for item in tree:
                visit(item)
        elif isinstance(tree, dict):
            for item in tree.values():
                visit(item)

    visit((call.args, dict(call.kwargs)))
    return count, int(call.kwargs.get(name) == LayerArgument(name))
