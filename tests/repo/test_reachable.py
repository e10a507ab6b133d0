"""Every module of the package is reached from what a user holds: the command, the public API, entry points, recipes or
pages.

Imports are read from the source. A name that a package's `__init__` passes on leads to the module that defines it, not
to everything else that the package exports.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import floors
import pytest
import yaml

import rewriter
from rewriter.passes import available

ROOT = Path(rewriter.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "action.yml", *sorted((ROOT / "docs").rglob("*.md"))]
# Emitted modules import from `rewriter.runtime`, which exports for them.
COMMANDS = {"rewriter.cli", "rewriter.cli.__main__", "rewriter.api"}
EXPORTS = {"rewriter", "rewriter.runtime"}
# Not followed: the table of all passes. Recipes and pages name those in use.
TABLES = {"rewriter.passes"}
# Started as a file, where the package cannot be imported.
SCRIPTS = {"load_huggingface.py": ["rewriter.check.load_huggingface"]}

modules = cache(floors.modules)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@cache
def home(base: str, name: str) -> frozenset[str]:
    """The modules that `from base import name` reads: through what packages pass on, or all that one needs itself."""
    known, found = modules(), {base}
    if f"{base}.{name}" in known:
        found.add(f"{base}.{name}")
    elif known[base].name == "__init__.py":
        for node in ast.walk(tree(base)) if base not in TABLES else ():
            if isinstance(node, ast.ImportFrom) and node.module in known:
                found.update(*(home(node.module, a.name) for a in node.names if (a.asname or a.name) == name))
            elif getattr(node, "name", "") == name:
                found.update(imported(tree(base)))
    return frozenset(found)


def imported(source: ast.AST) -> Iterator[str]:
    """The modules that a piece of source imports, or names in a string of its own (a process's `-m`, a preload)."""
    known = modules()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            yield from (module for alias in node.names for module in home(node.module, alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from {node.value} & known.keys()
            yield from SCRIPTS.get(node.value, ())


def exported(package: str) -> set[str]:
    """The modules behind `__all__` of a package."""
    names = next(
        ast.literal_eval(n.value)
        for n in tree(package).body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    )
    return {module for name in names for module in home(package, name)}


def shown(page: str) -> set[str]:
    """The modules that a page's Python blocks import and its `python -m` lines run, with the passes of its recipes."""
    found = set(re.findall(r"python3? -m (rewriter[\w.]*)", page)) & set(modules())
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        found |= set(imported(ast.parse(block)))
    return found | passes(re.findall(r"^ *- pass: (\w+)", page, re.MULTILINE))


def passes(names: list[str]) -> set[str]:
    return {available()[name].__module__ for name in names}


def entries() -> set[str]:
    """The modules behind entry points, which other programs load."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    points = [value.split(":") for group in groups.values() for value in group.values()]
    return {module for base, name in points for module in home(base, name)}


def roots() -> set[str]:
    found = entries().union(COMMANDS, *map(exported, EXPORTS), *(shown(page.read_text()) for page in PAGES))
    for recipe in sorted((ROOT / "rewriter/recipes/library").glob("*.yaml")):
        found |= passes([step["pass"] for step in yaml.safe_load(recipe.read_text())["passes"]])
    return found


def reached(start: Set[str]) -> set[str]:
    """`start` and all that it imports in turn. Of an `__init__` only names are read; a package may be run."""
    found: set[str] = set()
    waiting = set(start)
    while waiting:
        name = waiting.pop()
        found.add(name)
        parents = {name.rpartition(".")[0]} - {""}
        more = set() if modules()[name].name == "__init__.py" else set(imported(tree(name)))
        main = f"{name}.__main__"
        waiting |= (more | parents | ({main} & set(modules()))) - found
    return found


def unreached(start: Set[str]) -> set[str]:
    return set(modules()) - reached(start)


def test_every_module_has_a_user():
    assert sorted(unreached(roots())) == []


@pytest.mark.parametrize(
    ("start", "lost"),
    [({"rewriter.api"}, "rewriter.cli.app"), (COMMANDS, "rewriter.passes.overlap")],
    ids=["no command", "no recipe"],
)
def test_a_module_that_loses_its_user_is_named(start, lost):
    assert lost in unreached(start)


def test_a_page_reaches_what_it_shows():
    page = "```python\nfrom rewriter.training import zero_optimizer\n```\n`python -m rewriter.emulation`"
    assert {"rewriter.training", "rewriter.emulation"} < shown(page)
    assert not any(name.startswith("rewriter.predict") for name in reached(shown(page)))
