"""The floors that the rooms of the package stand on, from below: see docs/concepts/architecture.md."""

from __future__ import annotations

from pathlib import Path

import rewriter

PACKAGE = Path(rewriter.__file__).parent

# From below. Rooms of one floor do not import each other, nor does a room of one tower one of the other.
GROUND = [{"common", "kernels"}, {"fabric", "output", "weights"}, {"ir"}]
COMPILER = [
    {"passes", "tracing"},
    {"emit", "recipes"},
    {"check"},
    {"convert"},
]
RUNTIME = [{"runtime"}, {"training", "emulation"}]
TOP = [
    {"predict", "adapt"},
    {"show"},
    {"explain"},
    {"api"},
    {"__init__"},
    {"cli"},
]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package by its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
