"""Code that generated Hugging Face files contain as it is written here: real modules, whose source text is taken.

Generated files load where `rewriter` is not installed, so they hold a copy. Names that differ by file stand here for a
small example (a Llama on two ranks) and are replaced.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any


def source_of(thing: Any, names: Mapping[str, str] | None = None, absent: Collection[str] = ()) -> str:
    """The source text of a function or class, with `names` replaced by others.

    Expression statements that mention a name in `absent`, and `if` statements that test one, are left out.
    """
    text = inspect.getsource(thing)
    lines: list[str | None] = [*text.splitlines()]
    for node in ast.walk(ast.parse(text)) if absent else ():
        if not isinstance(node, (ast.If, ast.Expr)):
            continue
        asked = ast.walk(node.test if isinstance(node, ast.If) else node.value)
        if any(isinstance(part, ast.Name) and part.id in absent for part in asked):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
    text = "\n".join(line for line in lines if line is not None)
    for name, other in (names or {}).items():
        text = re.sub(rf"\b{name}\b", other, text)
    return text
