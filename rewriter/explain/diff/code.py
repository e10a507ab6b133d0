"""Generated files side by side."""

from __future__ import annotations

import difflib

from rewriter.explain.diff.differences import CodeDifference

_CONTEXT = 3
Side = tuple[int, str] | None
Row = tuple[str, Side, Side]


def code_difference(title: str, name_before: str, before: str, name_after: str, after: str) -> CodeDifference:
    """Two texts line by line, with some lines around each change; without rows where they are the same."""
    a, b = before.splitlines(), after.splitlines()
    rows: list[Row] = []
    added = removed = 0
    if a != b:
        matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
        for group in matcher.get_grouped_opcodes(_CONTEXT):
            if rows:
                rows.append(("gap", None, None))
            for tag, i1, i2, j1, j2 in group:
                rows += _rows(tag, a, b, i1, i2, j1, j2)
                added += (j2 - j1) * (tag in ("replace", "insert"))
                removed += (i2 - i1) * (tag in ("replace", "delete"))
    return CodeDifference(title, name_before, name_after, rows, added, removed)


def _rows(tag: str, a: list[str], b: list[str], i1: int, i2: int, j1: int, j2: int) -> list[Row]:
    found: list[Row] = []
    for offset in range(max(i2 - i1, j2 - j1)):
        left = (i1 + offset + 1, a[i1 + offset]) if i1 + offset < i2 else None
        right = (j1 + offset + 1, b[j1 + offset]) if j1 + offset < j2 else None
        kind = "same" if tag == "equal" else "changed" if left and right else "removed" if left else "added"
        found.append((kind, left, right))
    return found
