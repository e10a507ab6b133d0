"""Names for emitted Python: valid, unique, and close to what they stand for."""

from __future__ import annotations

import keyword
import re


def identifier(text: str) -> str:
    """`text` as a Python identifier: `mlp.gate` becomes `mlp_gate`."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def camel(text: str) -> str:
    """`standard_to_ladder` as `StandardToLadder`."""
    return "".join(part[:1].upper() + part[1:] for part in text.split("_"))


class Names:
    """Hands out names that are not taken yet, numbering from 2."""

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)

    def fresh(self, wish: str) -> str:
        base = name = identifier(wish)
        number = 2
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name
