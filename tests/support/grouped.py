"""Keyword arguments of the API's functions, from flat ones: what a test varies is one name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rewriter import Cluster, SaveOptions, Workload


def _grouped(given: dict[str, Any], **kinds: type) -> dict[str, Any]:
    made = {}
    for argument, kind in kinds.items():
        names = {field.name for field in fields(kind)}
        made[argument] = kind(**{name: given.pop(name) for name in list(given) if name in names})
    return {**given, **made}


def saving(**given: Any) -> dict[str, Any]:
    """Arguments of `convert` and `save`: what `SaveOptions` has is in `options`."""
    return _grouped(given, options=SaveOptions)


def predicting(**given: Any) -> dict[str, Any]:
    """Arguments of `predict`, `measure` and `validate`: what they have is in `workload` and `cluster`."""
    return _grouped(given, workload=Workload, cluster=Cluster)
