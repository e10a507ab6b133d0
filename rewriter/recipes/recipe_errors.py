"""What is wrong with a recipe, in the words of its file: every fault at once, each with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import ErrorDetails

from rewriter.common.errors import did_you_mean, nearest
from rewriter.common.yaml_documents import Document, Location, Problem


def report(source: str, problems: Iterable[Problem]) -> str:
    """One message for all faults of a recipe, in the order of its lines."""
    lines = [str(problem) for problem in sorted(set(problems))]
    if len(lines) == 1:
        return f"recipe {source}, {lines[0]}" if lines[0].startswith("line ") else f"recipe {source}: {lines[0]}"
    return "\n  ".join([f"recipe {source} has {len(lines)} faults:", *lines])


def explain(document: Document, detail: ErrorDetails, keys: Callable[[Location], Iterable[str]]) -> Problem:
    """A pydantic error in the words of a recipe file. `keys` gives the known keys of the mapping at a location."""
    location: Location = tuple(detail["loc"])
    line = document.line(location)
    if not location:
        return Problem(line, "a recipe is a mapping with name, summary, paper and passes.")
    place, name = location[:-1], str(location[-1])
    if detail["type"] == "extra_forbidden":
        return Problem(line, f"unknown key {_path(location)}. {did_you_mean(name, keys(place))}")
    if detail["type"] == "missing":
        written = _at(document.data, place)
        guess = nearest(name, written) if place and isinstance(written, dict) else None
        return Problem(line, f"{_path(location)} is missing." + (f" Is it meant by {guess!r}?" if guess else ""))
    if detail["type"] == "model_type":
        hint = ": write `- pass: NAME`" if place == ("passes",) else ""
        return Problem(line, f"{_path(location)} must be a mapping{hint}, not {detail['input']!r:.60}.")
    if location == ("name",) and detail["type"] == "string_pattern_mismatch":
        return Problem(line, f"name: {detail['input']!r:.80} is not made of small letters, digits and hyphens.")
    return Problem(line, f"{_path(location)}: {detail['msg']}, not {detail['input']!r:.60}.")


def _at(data: Any, location: Location) -> Any:
    for part in location:
        data = data[part]
    return data


def _path(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
