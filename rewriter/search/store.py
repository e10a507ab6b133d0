"""What a search measured, kept in a file: a search that was interrupted, or asks for another budget, goes on from
there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError

_VERSION = 1


class Store:
    """Values by key, each on a line of `directory`/measured-JOB.jsonl, where JOB is a hash of what they depend on.

    What is put stays, also where the process ends at once; a line that was cut off is not read. Without a directory,
    values are kept in memory. Raises RewriterError where the directory cannot be made or its file not be written.
    """

    def __init__(self, directory: Path | None, job: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {}
        self.path: Path | None = None
        if directory is None:
            return
        text = json.dumps({"version": _VERSION, **job}, sort_keys=True)
        self.path = directory / f"measured-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._read(self.path)
            else:
                self._append({"job": json.loads(text)})
        except OSError as error:
            raise RewriterError(
                f"--state {directory}: {error.strerror or error}. Name a directory that can be written"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def put(self, values: Mapping[str, Any]) -> None:
        """Keep values, plain data, all or none of them."""
        if values:
            self._values |= values
            self._append(dict(values))

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                raise RewriterError(f"{path}: a line of it is no JSON. Remove the file; it is measured again") from None
            self._values |= found
        if len(whole) < len(data):  # the line that was being written
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
