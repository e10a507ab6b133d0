"""Lines of emitted code that are too long, broken at the arguments of their first call or the items of their list."""

from __future__ import annotations


def wrapped(code: str, width: int = 120) -> str:
    """Break the calls and lists of lines that are too long, one item a line; what is still too long is broken again."""
    lines: list[str] = []
    for line in code.split("\n"):
        lines += _broken(line, width)
    return "\n".join(lines)


def _broken(line: str, width: int) -> list[str]:
    if len(line) <= width or not ("(" in line or line.lstrip().startswith("[")):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    opening, arguments, closing = _outer_call(line.lstrip())
    if not arguments:
        return [line]
    inner = [part for a in arguments for part in _broken(f"{indent}    {a},", width)]
    return [f"{indent}{opening}", *inner, f"{indent}{closing}"]


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
            return line[:start], [a for a in arguments if a], line[i:]
    return line, [], ""
