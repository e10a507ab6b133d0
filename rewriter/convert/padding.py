"""Padding of the tensors that an output stores, as its manifest says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rewriter.ir import Program
from rewriter.output.manifest import PaddedTensors, Padding
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Concat, Mean
from rewriter.weights.padding import growth

Ranges = tuple[tuple[int, int], ...]
Place = tuple[int, Ranges, bool]


def padding_of(program: Program) -> Padding | None:
    """The padding of a program's stored tensors; None where a pass has padded nothing."""
    source = program.source
    if not source.padded or source.path is None:
        return None
    means = {name for name, change in source.padded.items() if isinstance(change, Concat) and _is_mean(change)}
    by_name = {name: list(_padded(dims, name not in means)) for name, dims in source.places.items()}
    return Padding(
        settings=dict(source.settings),
        on_load=dict(source.on_load),
        vocabulary=source.vocabulary,
        growth=growth(Checkpoint.open(source.path), source.padded),
        tensors=[
            PaddedTensors(tensors=names, dim=dim, ranges=list(ranges), zero=zero)
            for (dim, ranges, zero), names in _grouped(by_name).items()
        ],
    )


def _is_mean(change: Concat) -> bool:
    return any(isinstance(part, Mean) for part in change.parts)


def _padded(dims: Mapping[int, Sequence[int]], zero: bool) -> Iterator[Place]:
    """Where a weight holds padding."""
    for dim, index in dims.items():
        if ranges := _runs([place for place, of in enumerate(index) if of < 0]):
            yield dim, ranges, zero


def _runs(places: Sequence[int]) -> Ranges:
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return tuple(runs)


def _grouped(by_name: Mapping[str, Sequence[Place]]) -> dict[Place, list[str]]:
    """By place, the names of the tensors that are padded there, those of layers that are alike as one pattern."""
    patterns: dict[str, set[tuple[Place, ...]]] = {}
    for name, places in by_name.items():
        patterns.setdefault(_pattern(name), set()).add(tuple(places))
    grouped: dict[Place, list[str]] = {}
    for name, places in by_name.items():
        called = _pattern(name) if len(patterns[_pattern(name)]) == 1 else name
        for place in places:
            names = grouped.setdefault(place, [])
            if called not in names:
                names.append(called)
    return grouped


def _pattern(name: str) -> str:
    return re.sub(r"\.[0-9]+(?=\.)", ".*", name)


def padded_places(padding: Padding, names: Sequence[str]) -> dict[str, list[tuple[int, Ranges, bool]]]:
    """By name of a stored tensor, the dimensions, ranges and kinds (zeros or not) of its padding."""
    result: dict[str, list[tuple[int, Ranges, bool]]] = {}
    for entry in padding.tensors:
        listed = set(entry.tensors)
        for name in names:
            if name in listed or _pattern(name) in listed:
                result.setdefault(name, []).append((entry.dim, tuple(entry.ranges), entry.zero))
    return result
