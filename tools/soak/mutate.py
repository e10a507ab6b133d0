"""Damage to valid inputs, drawn from a seed: to their bytes, to the values of JSON, and to the lines of YAML."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

ODD_BYTES = (b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"'")
ODD_TEXT = ("", " ", "\x00", "\ud800", "é", "../x", "/", "a" * 300, "__metadata__", "null", "-1", "{}", "💥", "𝟙")
ODD_NUMBERS = (0, 1, -1, 2, 3, 7, 64, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
ODD_FLOATS = (0.5, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """A value that nobody expects, of any type of JSON."""
    return draw.choice(
        [
            lambda: draw.choice(ODD_NUMBERS),
            lambda: draw.choice(ODD_FLOATS),
            lambda: draw.choice(ODD_TEXT),
            lambda: draw.choice([None, True, False]),
            lambda: [odd_value(draw, depth + 1) for _ in range(draw.randrange(3))] if depth < 3 else [],
            lambda: {draw.choice(ODD_TEXT): odd_value(draw, depth + 1)} if depth < 3 else {},
            lambda: _nested(draw),
        ]
    )()


def _nested(draw: random.Random) -> Any:
    value: Any = draw.choice([0, "x", None])
    for _ in range(draw.choice([2, 65, 200])):
        value = [value] if draw.random() < 0.5 else {"x": value}
    return value


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """`data` with some bytes flipped, cut out, doubled, put in or exchanged for odd ones."""
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        at, length = draw.randrange(len(out) + 1), draw.choice([1, 1, 2, 8, 64])
        what = draw.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del out[at : at + length]
        elif what == 2:
            out[at:at] = out[at : at + length]
        elif what == 3:
            out[at:at] = draw.choice(ODD_BYTES)
        elif what == 4:
            out[at : at + 1] = draw.choice(ODD_BYTES)
        else:
            del out[at:]
    return bytes(out)


def damaged_value(draw: random.Random, value: Any) -> Any:
    """A JSON value with some of what is inside of it replaced, removed, renamed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        value = _damage(draw, value)
    return value


def _damage(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.6:
            value[key] = _damage(draw, value[key])
        else:
            draw.choice(_OF_TABLES)(draw, value, key)
        return value
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        what = draw.randrange(4)
        if what == 0:
            del value[at]
        elif what == 1:
            value.insert(at, copy.deepcopy(draw.choice(value)))
        else:
            value[at] = _damage(draw, value[at])
        return value
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, -8, 8, value, -2 * value])
    if isinstance(value, str) and value and draw.random() < 0.4:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(ODD_TEXT) + value[at + draw.randrange(2) :]
    return odd_value(draw)


def _rename(draw: random.Random, table: dict[str, Any], key: str) -> None:
    table[draw.choice([*ODD_TEXT, key + "x", key[:-1], key.upper()])] = table.pop(key)


def _swap(draw: random.Random, table: dict[str, Any], key: str) -> None:
    other = draw.choice(list(table))
    table[key], table[other] = table[other], table[key]


_OF_TABLES: Sequence[Callable[[random.Random, dict[str, Any], str], Any]] = (
    lambda draw, table, key: table.pop(key),
    lambda draw, table, key: table.update({key: odd_value(draw)}),
    lambda draw, table, key: table.update({draw.choice(ODD_TEXT): copy.deepcopy(table[key])}),
    _rename,
    _swap,
)


def as_json(value: Any) -> bytes:
    """The bytes of a JSON value. Half of a surrogate pair stays, as an escape."""
    return json.dumps(value).encode()


def damaged_json(draw: random.Random, value: Any) -> bytes:
    """Mostly valid JSON of other values; sometimes its bytes are damaged too."""
    data = as_json(damaged_value(draw, value) if draw.random() < 0.85 else value)
    return damaged_bytes(draw, data) if draw.random() < 0.25 else data


ODD_YAML = (
    "!!python/object:os.system x", "&a [*a]", "*a", "<<: {a: 1}", "? [a]: b", "'", "- - - x", "1e999", ".nan", "0o7",
    "|\n  x", ">-", "%YAML 1.1", "---", "...", "{a: 1, a: 2}", "[[[[[", "\t- x", "~", "2026-01-01", "null", "-1",
    "99999999999999999999", "[]", "{}", "!x y", "\u2028", "#",
)  # fmt: skip


def damaged_yaml(draw: random.Random, text: str) -> bytes:
    """YAML with lines removed, doubled, moved or indented otherwise, and values replaced; sometimes damaged bytes."""
    lines = text.splitlines()
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(lines)) if lines else 0
        what = draw.randrange(7)
        if not lines or what == 0:
            lines.insert(at, draw.choice(ODD_YAML))
        elif what == 1:
            del lines[at]
        elif what == 2:
            lines.insert(at, draw.choice(lines))
        elif what == 3:
            lines[at] = draw.choice([" ", "  ", "\t", "- "]) + lines[at]
        elif what == 4:
            lines[at] = lines[at].lstrip()
        else:
            key, colon, _ = lines[at].partition(":")
            values = (*ODD_YAML, *map(str, ODD_NUMBERS), *map(str, ODD_FLOATS))
            lines[at] = f"{key}{colon or ':'} {draw.choice(values)}"
    data = "\n".join([*lines, ""]).encode(errors="surrogatepass")
    return damaged_bytes(draw, data) if draw.random() < 0.2 else data
