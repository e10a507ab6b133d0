"""Python as text: names, literals, docstrings, and lines in the layout of `ruff format`."""

from __future__ import annotations

import keyword
import math
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from rewriter.common.errors import RewriterError

LINE_LENGTH = 120
_PLAIN = (bool, int, complex, type(None), torch.dtype, torch.memory_format, torch.layout)


def identifier(text: str) -> str:
    """`text` as a Python identifier: `mlp.gate` becomes `mlp_gate`."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"x_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def attribute(path: str, owner: str = "self") -> str:
    """The expression for the dotted `path` below a module: `self.norms[0].weight`; a variant has its own name."""
    for part in path.replace("#", "_variant_").split("."):
        if part.isdecimal():
            owner = f"{owner}[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            owner = f"{owner}.{part}"
        else:
            owner = f"getattr({owner}, {quoted(part)})"
    return owner


def assignment(path: str, value: str) -> str:
    """The statement that puts a module or parameter at the dotted `path` below `self`."""
    place = attribute(path)
    owner, _, last = path.rpartition(".")
    return f"setattr({attribute(owner)}, {quoted(last)}, {value})" if place.endswith(")") else f"{place} = {value}"


def camel(text: str) -> str:
    """`standard_to_ladder` as `StandardToLadder`."""
    return "".join(part[:1].upper() + part[1:] for part in text.split("_"))


def free_name(wish: str, is_taken: Callable[[str], bool]) -> str:
    """`wish`, numbered from 2 where it is taken."""
    name, number = wish, 2
    while is_taken(name):
        name, number = f"{wish}_{number}", number + 1
    return name


class UniqueNames:
    """Gives identifiers that are not taken yet."""

    def __init__(self, taken: Collection[str] = ()) -> None:
        self.taken = set(taken)

    def new(self, wish: str) -> str:
        name = free_name(identifier(wish), self.taken.__contains__)
        self.taken.add(name)
        return name


def literal(value: Any, leaf: Callable[[Any], str | None] = lambda _: None) -> str:
    """A constant as Python; tuples, lists, dicts and slices around what `leaf` prints, where it is not None.

    Raises RewriterError for what has no literal.
    """
    if (printed := leaf(value)) is not None:
        return printed
    if isinstance(value, tuple):
        return f"({', '.join(literal(item, leaf) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(literal(item, leaf) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(item, leaf)}" for k, item in value.items()) + "}"
    if isinstance(value, slice):
        parts = ["" if part is None else literal(part, leaf) for part in (value.start, value.stop)]
        return ":".join(parts if value.step is None else [*parts, literal(value.step, leaf)])
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if value is ...:
        return "..."
    if isinstance(value, _PLAIN):
        return repr(value)
    raise RewriterError(f"a {type(value).__name__} in a layer's wiring cannot be written as Python: {value!r}")


def quoted(text: str) -> str:
    """A string literal in the quotes that `ruff format` prefers."""
    body = repr(text)
    return f'"{body[1:-1]}"' if body.startswith("'") and '"' not in body else body


def broken(code: str) -> str:
    """Lines that are too long, broken at the arguments of their first call or the items of their list."""
    return "\n".join(part for line in code.split("\n") for part in _broken(line))


def _broken(line: str) -> list[str]:
    if len(line) <= LINE_LENGTH or not ("(" in line or line.lstrip().startswith("[")):
        return [line]
    pad = line[: len(line) - len(line.lstrip())]
    opening, items, closing = _outer_call(line.lstrip())
    return _bracketed(pad, opening, items, closing) if items else [line]


def bracketed(head: str, items: Sequence[str], tail: str, indent: int) -> str:
    """`head` + items + `tail` (such as `f(`, …, `)`) from column `indent`, broken where the line is too long."""
    pad = " " * indent
    flat = f"{pad}{head}{', '.join(items)}{tail}"
    return flat if len(flat) <= LINE_LENGTH else "\n".join(_bracketed(pad, head, items, tail))


def _bracketed(pad: str, opening: str, items: Sequence[str], closing: str) -> list[str]:
    inner = f"{pad}    {', '.join(items)}"
    if len(inner) <= LINE_LENGTH:
        return [f"{pad}{opening}", inner, f"{pad}{closing}"]
    return [
        f"{pad}{opening}",
        *(part for item in items for part in _broken(f"{pad}    {item.removesuffix(',')},")),
        f"{pad}{closing}",
    ]


def _outer_call(line: str) -> tuple[str, list[str], str]:
    """(text up to the first parenthesis, arguments, rest) of the first call in `line`, or of the list that it is."""
    start = (0 if line.startswith("[") else line.index("(")) + 1
    depth, begin, arguments = 1, start, []
    for i in range(start, len(line)):
        depth += (line[i] in "([{") - (line[i] in ")]}")
        if depth == 0 or (depth == 1 and line[i] == ","):
            arguments.append(line[begin:i].strip())
            begin = i + 1
        if depth == 0:
            items = [a for a in arguments if a]
            if len(items) == 1 < len(arguments):  # the comma that makes a tuple
                items[0] += ","
            return line[:start], items, line[i:]
    return line, [], ""


def filled(text: str, indent: int = 0) -> str:
    """A paragraph as lines of at most LINE_LENGTH."""
    return textwrap.fill(text, LINE_LENGTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def docstring(sentences: Sequence[str], indent: int) -> list[str]:
    """Lines of a docstring: one line where it fits, else the first sentence, a blank line and the others."""
    pad = " " * indent
    line = f'{pad}"""{" ".join(sentences)}"""'
    if len(line) <= LINE_LENGTH:
        return [line]
    width = LINE_LENGTH - indent - 6
    first, rest = textwrap.wrap(sentences[0], width), textwrap.wrap(" ".join(sentences[1:]), width)
    body = [*first, *(["", *rest] if rest else [])]
    return [f'{pad}"""{body[0]}', *(f"{pad}{text}" if text else "" for text in body[1:]), f'{pad}"""']
