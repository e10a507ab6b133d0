"""Results of runs that pages are made of: a JSON file, a line for each run, in the order of what identifies it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The runs in a file, by kind. Two of a kind are the same one where they have equal values of `keys`."""

    path: Path
    keys: Sequence[str]

    def read(self) -> dict[str, list[Run]]:
        """The runs, by kind; none where there is no file."""
        found: dict[str, list[Run]] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        return found

    def add(self, kind: str, found: Run) -> None:
        """Put `found` into the file, in place of an older one of the same run."""
        record = self.read()
        record[kind] = [run for run in record.get(kind, []) if self._key(run) != self._key(found)] + [found]
        self.keep(record)

    def keep(self, record: dict[str, list[Run]]) -> None:
        """Write the file."""
        kinds = []
        for kind, found in sorted(record.items()):
            lines = [json.dumps(run, ensure_ascii=False) for run in sorted(found, key=self._order)]
            kinds.append(f"{json.dumps(kind)}: [\n" + ",\n".join(lines) + "\n]")
        self.path.write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8")

    def _key(self, run: Run) -> tuple[Any, ...]:
        return tuple(run.get(name) for name in self.keys)

    def _order(self, run: Run) -> list[tuple[bool, Any]]:
        return [(value is not None, value) for value in self._key(run)]
