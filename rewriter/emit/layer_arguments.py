"""How a printed layer takes what is not the hidden state, and hands it on: so that names may differ by version.

What a layer gives, under its own name, to every child that also gets its `**kwargs`, and to nothing else, stays in
`**kwargs` under whatever name this version of transformers uses. Where that is not so of the cache, it is taken out of
`**kwargs` and given to each child under the name that the child has for it; nor is it so of mixers without attention,
which had other names for it than their layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        """The name of an argument in the layer's body."""
        return "cache" if self.takes_cache and name == self.cache else name


def arguments_of(source: Source, calls: Sequence[tuple[PythonCall, bool]], absent: Collection[str]) -> LayerArguments:
    """The arguments of a layer that makes these calls of its children, and whether each of them attends.

    `absent` are those that the model always leaves out.
    """
    names = source.layer_arguments
    free = [name for name in names[passed_by_place(source) :] if name not in absent and name != names[0]]
    uses = {name: [_uses(call, name) for call, _ in calls] for name in names}
    splat = [call.splat and (1, 1) for call, _ in calls]
    handed_on = [name for name in free if any(splat) and uses[name] == [use or (0, 0) for use in splat]]
    other = any(call.splat and not attends for call, attends in calls)
    travelling = frozenset(name for name in handed_on if not (other and name in CACHE_NAMES))
    cache = next((name for name in names if name in CACHE_NAMES and name not in {*travelling, *absent}), None)
    if cache is not None and not any(count for count, _ in uses[cache]):
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
