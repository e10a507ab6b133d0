"""YAML to plain data, with the line of every value and every fault named, not only the first. Imports only errors.

Recipes and fabrics come from strangers, so nothing here constructs an object: the parser's events are read as strings,
numbers, booleans, lists and mappings, and tags, anchors and aliases are refused. Scalars follow YAML 1.2, where `no`
is a word and `1e-5` a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rewriter.common.errors import RewriterError

MAX_BYTES = 1024 * 1024  # an order of heads and channels has a character for each
MAX_DEPTH = 16

Location = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of a file. `line` counts from 1; 0 says that it belongs to no line (an override, a missing file)."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


@dataclass
class Document:
    """Data of a YAML text. `lines` has the line of each value by its location, such as `("passes", 0, "layers")`."""

    data: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, location: Location) -> int:
        """The line of `location`, or of the nearest thing around it."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


class _Unreadable(Exception):
    """Nothing after this point can be read."""


def read_file(path: Path, what: str = "recipe", limit: int = MAX_BYTES) -> str:
    """The text of a file. Raises RewriterError where it is no regular file, larger than `limit` bytes or not UTF-8.

    `what` is a word for messages; `rewrite WHATs` lists those that ship.
    """
    try:
        if not path.is_file():
            lacks = "is no regular file" if path.exists() else "no such file"
            raise RewriterError(f"{what} {path}: {lacks}. `rewrite {what}s` lists those that ship.")
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise RewriterError(f"{what} {path}: larger than {limit // 1024} KiB, which no {what} is.")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RewriterError(f"{what} {path}: not UTF-8 text (byte {error.start}).") from None
    except (OSError, ValueError) as error:
        raise RewriterError(f"{what} {path}: cannot be read: {error}.") from None


def read(text: str, what: str = "recipe") -> Document:
    """Reads one YAML document. Never raises for what the text holds: faults are in `problems`."""
    document = Document()
    try:
        events = iter(yaml.parse(text, Loader=_LOADER))
        next(events)  # the stream
        first = next(events)
        if isinstance(first, yaml.StreamEndEvent):
            return document
        document.data = _YamlReader(document, events, what).value(next(events), ())
        next(events)  # the document's end
        if not isinstance(following := next(events), yaml.StreamEndEvent):
            document.problems.append(Problem(_line(following), f"a second document; a {what} is one."))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        document.problems.append(Problem(mark.line + 1 if mark else 1, f"not YAML: {what}."))
    except yaml.YAMLError as error:  # characters that YAML does not allow
        document.problems.append(Problem(1, f"not YAML: {' '.join(str(error).split())}."))
    except _Unreadable as error:
        document.problems.append(Problem(*error.args))
    return document


@dataclass
class _YamlReader:
    document: Document
    events: Iterator[yaml.Event]
    what: str

    def value(self, event: yaml.Event, location: Location) -> Any:
        line = _line(event)
        self.document.lines.setdefault(location, line)
        if len(location) > MAX_DEPTH:
            raise _Unreadable(line, f"nested deeper than {MAX_DEPTH} levels.")
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"alias *{event.anchor}: write the value out; {self.what}s have no aliases.")
            return None
        if event.anchor is not None:
            self.refuse(event, f"anchor &{event.anchor}: {self.what}s have no anchors and aliases.")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.refuse(event, f"tag {tag}: {self.what}s hold plain values, they never construct objects.")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(location)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(location)
        return _scalar(event.value) if event.implicit[0] and event.tag is None else event.value

    def mapping(self, location: Location) -> dict[str, Any]:
        table: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise _Unreadable(_line(event), "a key must be a word.")
            key = event.value
            place = (*location, key)
            seen = self.document.lines.get(place)
            if key in table:
                self.refuse(event, f"key {key!r} again; it stands on line {seen} already.")
            else:
                self.document.lines[place] = _line(event)
            value = self.value(next(self.events), place)
            table.setdefault(key, value)
        return table

    def sequence(self, location: Location) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value(event, (*location, len(items))))
        return items

    def refuse(self, event: yaml.Event, message: str) -> None:
        self.document.problems.append(Problem(_line(event), message))


def _line(event: yaml.Event) -> int:
    return int(event.start_mark.line) + 1


def _scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
