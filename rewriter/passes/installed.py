"""Passes of installed packages: entry points of the group `rewriter.passes`, imported when a recipe names one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from rewriter.common.errors import RewriterError
from rewriter.passes.base import Effect, Pass

GROUP = "rewriter.passes"


def names() -> tuple[str, ...]:
    """The names that installed packages register, sorted. Nothing is imported."""
    return tuple(sorted(_points(tuple(sys.path))))


def requirement(name: str, module: str | None = None) -> str | None:
    """The package that registers pass `name`, as pip takes it: `rewriter-damp==0.1`. None if no package does, or if the
    class in use is of a `module` of another package."""
    for point in _points(tuple(sys.path)).get(name, ()):
        if point.dist is None:
            continue
        if module is None or module.partition(".")[0] == point.module.partition(".")[0]:
            return _package(point)
    return None


def find(name: str, shipped: Mapping[str, type[Pass]]) -> type[Pass] | None:
    """The pass of that name: one of `shipped`, or of the package that registers it, which is imported; None if there is
    no such pass.

    Raises RewriterError, with the package, if two register the name or one registers a shipped one, if its module
    cannot be imported, and if it holds no pass of that name.
    """
    found = _points(tuple(sys.path)).get(name, ())
    packages = " and ".join(_package(point) for point in found)
    if found and name in shipped:
        raise RewriterError(
            f"pass {name!r}: rewriter has a pass of this name, and {packages} registers another. Rename the entry "
            "point, or uninstall the package"
        )
    if len(found) > 1:
        raise RewriterError(f"pass {name!r}: {packages} register it. Uninstall all but one")
    return _load(found[0]) if found else shipped.get(name)


def _load(point: EntryPoint) -> type[Pass]:
    """The class behind an entry point."""
    where = f"pass {point.name!r}: {point.value} of the package {_package(point)}"
    try:
        kind = point.load()
    except Exception as error:  # a package's own code raises what it likes
        reason = f"{type(error).__name__}: {error}"
        raise RewriterError(f"{where} cannot be imported ({reason}). Mend or reinstall the package") from error
    if not (isinstance(kind, type) and issubclass(kind, Pass)):
        raise RewriterError(f"{where} is {kind!r:.60}, not a subclass of rewriter.passes.base.Pass")
    name, effect = getattr(kind, "name", None), getattr(kind, "effect", None)
    if inspect.isabstract(kind) or effect not in get_args(Effect):
        raise RewriterError(
            f"{where} has no `apply`, or effect = {effect!r}. A pass has both; effect is one of {get_args(Effect)}"
        )
    if name != point.name:
        raise RewriterError(f"{where} has name = {name!r}. Give the class and its entry point the same name")
    return kind


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name}=={point.dist.version}" if point.dist is not None else "an unknown package"


@cache
def _points(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of the group by name. `path` is sys.path, by which the cache is kept."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=_package):
        found[point.name] = (*found.get(point.name, ()), point)
    return found
