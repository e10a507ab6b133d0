"""Fingerprints of the source's classes, and the versions of transformers that are known to have them.

`fingerprints.json` has those of every causal LM's decoder layers, without how children are made (`forward`) and with
all of their code (`whole`), by module and class: one for all versions, or by the version in which it first appeared.
`benchmarks/fingerprints.py` writes it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import transformers

from rewriter.common.errors import RewriterError
from rewriter.emit.verbatim.fingerprint import fingerprint

TABLE = Path(__file__).with_name("fingerprints.json")


@functools.cache
def table() -> Mapping[str, Any]:
    """What `fingerprints.json` holds: `versions`, oldest first, `forward` and `whole`."""
    data: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return data


def installed_fingerprint(module: str, name: str, forward_only: bool) -> str:
    """The fingerprint of a class as it is installed. Raises RewriterError where its source cannot be read."""
    try:
        return str(fingerprint(inspect.getsource(importlib.import_module(module)), name, forward_only))
    except (OSError, TypeError, KeyError) as error:
        raise RewriterError(f"the source of {module}.{name} cannot be read: {error}") from error


def versions_with(module: str, name: str, forward_only: bool, digest: str) -> set[str]:
    """The versions of transformers that are known to have a class with this fingerprint."""
    found, current, versions = set(), None, table()["versions"]
    classes = table()["forward" if forward_only else "whole"].get(module.removeprefix("transformers.models."), {})
    recorded = classes.get(name, {})
    since = {versions[0]: recorded} if isinstance(recorded, str) else recorded
    for version in versions:
        current = since.get(version, current)
        if current == digest:
            found.add(version)
    return found


def in_words(versions: Collection[str]) -> str:
    """Versions that are known or installed, runs that follow each other by their ends: `5.17.0 to 5.20.2, 5.22.0`."""
    runs: list[list[str]] = [[]]
    for version in dict.fromkeys([*table()["versions"], transformers.__version__]):
        if version in versions:
            runs[-1].append(version)
        elif runs[-1]:
            runs.append([])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs if run)
