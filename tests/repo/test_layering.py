"""The rooms of the package stand on floors: a room imports only from below, and no files import each other in a circle.

Every import is read from the source, those inside functions and under TYPE_CHECKING included.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from architecture_page import PAGE, rendered
from floors import COMPILER, GROUND, PACKAGE, RUNTIME, TOP, modules
from repository import TESTS


def allowed() -> dict[str, set[str]]:
    """The rooms that each room may import."""
    below: dict[str, set[str]] = {}
    known: set[str] = set()
    for floor in GROUND:
        below |= {room: set(known) for room in floor}
        known |= floor
    both = set(known)
    for tower in (COMPILER, RUNTIME):
        inside = set(known)
        for floor in tower:
            below |= {room: set(inside) for room in floor}
            inside |= floor
        both |= inside
    for floor in TOP:
        below |= {room: set(both) for room in floor}
        both |= floor
    return below


def imported(source: str, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "rewriter")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            base = node.module or ""
            if base.partition(".")[0] == "rewriter":
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    yield name if name in known else base


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(path.read_text(), known)) - {name} for name, path in known.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def upward(files: Mapping[str, set[str]]) -> list[str]:
    """Imports of a room that does not stand below."""
    below = allowed()
    return [
        f"{name} imports {other}: {room(other)} is not below {room(name)}"
        for name, others in files.items()
        for other in sorted(others)
        if room(name) != room(other) and room(other) not in below[room(name)]
    ]


def circles(files: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of files that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in files[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in files:
        if name not in index:
            visit(name)
    return found


def test_no_file_is_longer_than_500_lines():
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


def test_every_file_of_tests_has_a_name_of_its_own():
    """pytest imports the files of tests by their names alone: two of one name stop the run that collects both."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_room_has_a_floor():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms == set(allowed())


def test_rooms_import_from_below_only():
    assert upward(graph()) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(graph()) == []


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("rewriter.ir.program", "def later():\n    from rewriter.api import save"),
        ("rewriter.runtime.loading", "if TYPE_CHECKING:\n    from rewriter.emit.manifest import mesh_of"),
        ("rewriter.emit.manifest", "from rewriter.runtime import load"),
        ("rewriter.common.errors", "import rewriter"),
    ],
)
@pytest.mark.fast(
    "rewriter.runtime.loading-if TYPE_CHECKING:\\n    from rewriter.emit.manifest import mesh_of",
    "rewriter.ir.program-def later():\\n    from rewriter.api import save",
)
def test_a_seeded_upward_import_is_found(name, statement):
    files, known = graph(), modules()
    files[name] = files[name] | set(imported(statement, known))
    assert [line for line in upward(files) if line.startswith(name)]


def test_a_seeded_circle_is_found():
    files = graph()
    files["rewriter.ir.structure"] = files["rewriter.ir.structure"] | {"rewriter.ir.shapes"}
    assert circles(files)


def test_the_drawing_of_floors_is_that_of_the_rooms():
    """A failure is mended by `PYTHONPATH=.:tests/support python tools/docs/architecture_page.py`."""
    assert PAGE.read_text(encoding="utf-8") == rendered()
