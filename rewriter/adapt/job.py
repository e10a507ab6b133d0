"""The directory of a run while it goes on: beside the place of its result, with what must be equal to continue it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.adapt import checkpoints
from rewriter.common.errors import RewriterError
from rewriter.emit.files.output_directory import sha256_of

_JOB = "job.json"
_FACTS = "facts.json"


class AdaptJob:
    """`.NAME.adapting` beside NAME. Rank 0 opens it, which no other run can meanwhile.

    Raises RewriterError where another run is at work, an interrupted one is neither to be resumed nor gone, or the
    interrupted one was another job.
    """

    def __init__(self, out: Path, described: Mapping[str, Any], resume: bool) -> None:
        self.place = place_of(out)
        description = json.loads(json.dumps(dict(described)))
        if self.place.exists() and not (self.place / _JOB).is_file():
            raise RewriterError(f"{self.place}: exists, and is not a run of `rewrite adapt`. Move it away.")
        interrupted = self.place.exists()
        if not interrupted:
            self.place.mkdir(parents=True)
            (self.place / _JOB).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        self._lock = os.open(self.place / _JOB, os.O_RDONLY)
        try:
            self._claim(interrupted, resume, description)
        except RewriterError:
            os.close(self._lock)
            raise

    def _claim(self, interrupted: bool, resume: bool, description: Mapping[str, Any]) -> None:
        try:
            # before any advice to delete what another run writes
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RewriterError(
                f"{self.place}: another run is at work there. Wait for it, or choose another --out."
            ) from error
        if not interrupted:
            return
        if not resume:
            raise RewriterError(
                f"{self.place}: an interrupted run left its checkpoints there. Continue it with --resume, or "
                "delete the directory to start over."
            )
        before = json.loads((self.place / _JOB).read_text(encoding="utf-8"))
        for name in dict.fromkeys([*before, *description]):
            if before.get(name) != description.get(name):
                raise RewriterError(
                    f"--resume: the run in {self.place} had {name} {before.get(name)!r}, this one has "
                    f"{description.get(name)!r}. Repeat it with the same options, or delete the directory to start "
                    "over."
                )

    def close(self, done: bool) -> None:
        """Let others in. A run that is done leaves nothing, nor does one that has no checkpoint to go on from."""
        if done or checkpoints.last(self.place) is None:
            shutil.rmtree(self.place)
        os.close(self._lock)


def remember(place: Path, **facts: Any) -> dict[str, Any]:
    """All facts of the run in `place` so far, these included; they outlive an interruption."""
    file = place / _FACTS
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known |= facts
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(known), encoding="utf-8")
    os.replace(partial, file)
    return known


def place_of(out: Path) -> Path:
    """Where a run works whose result goes to `out`."""
    return out.parent / f".{out.name}.adapting"  # `with_name` raises for the root


def identity(source: str) -> str:
    """What tells data from other data: the hash of a file, or the id of the Hub."""
    return f"sha256 {sha256_of(Path(source))}" if Path(source).is_file() else source
