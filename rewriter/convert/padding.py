"""Padding of the tensors that an output stores, as its manifest says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rewriter.ir import Program
from rewriter.output.manifest import PaddedTensors, Padding, read_manifest
from rewriter.output.names import MANIFEST
from rewriter.passes.selection import runs_of
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Concat, Mean
from rewriter.weights.padding import growth

Ranges = tuple[tuple[int, int], ...]
Place = tuple[int, Ranges, bool]


def padding_of(program: Program) -> Padding | None:
    """The padding of a program's stored tensors, with that which its source has already; None where there is none."""
    source = program.source
    known = None if source.path is None else _of_source(Path(source.path))
    if not source.padded or source.path is None:
        return known
    checkpoint = Checkpoint.open(source.path)
    means = {name for name, change in source.padded.items() if isinstance(change, Concat) and _is_mean(change)}
    by_name = {name: list(_padded(dims, name not in means)) for name, dims in source.places.items()}
    for name, places in ({} if known is None else padded_places(known, list(checkpoint.tensors))).items():
        moved = source.places.get(name, {})
        by_name.setdefault(name, []).extend((dim, _moved(ranges, moved.get(dim)), zero) for dim, ranges, zero in places)
    return Padding(
        settings={**(known.settings if known else {}), **source.settings},
        on_load=dict(source.on_load),
        vocabulary=known.vocabulary if known else source.vocabulary,
        growth=(1 + growth(checkpoint, source.padded)) * (1 + (known.growth if known else 0)) - 1,
        tensors=[
            PaddedTensors(tensors=names, dim=dim, ranges=list(ranges), zero=zero)
            for (dim, ranges, zero), names in _grouped(by_name).items()
        ],
    )


def _of_source(directory: Path) -> Padding | None:
    """The padding of a checkpoint that is an output itself."""
    return read_manifest(directory).padding if (directory / MANIFEST).is_file() else None


def _moved(ranges: Ranges, index: Sequence[int] | None) -> Ranges:
    """Ranges of a dimension where its elements come from the places `index`."""
    if index is None:
        return ranges
    held = {place for start, stop in ranges for place in range(start, stop)}
    return _runs([place for place, of in enumerate(index) if of in held])


def _is_mean(change: Concat) -> bool:
    return any(isinstance(part, Mean) for part in change.parts)


def _padded(dims: Mapping[int, Sequence[int]], zero: bool) -> Iterator[Place]:
    """The padding of one weight, by its dimensions."""
    for dim, index in dims.items():
        if ranges := _runs([place for place, of in enumerate(index) if of < 0]):
            yield dim, ranges, zero


def _runs(places: Sequence[int]) -> Ranges:
    return tuple((run[0], run[-1] + 1) for run in runs_of(places))


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


def padded_places(padding: Padding, names: Sequence[str]) -> dict[str, list[Place]]:
    """By name of a stored tensor, the dimensions, ranges and kinds (zeros or not) of its padding."""
    result: dict[str, list[Place]] = {}
    for entry in padding.tensors:
        listed = set(entry.tensors)
        for name in names:
            if name in listed or _pattern(name) in listed:
                result.setdefault(name, []).append((entry.dim, tuple(entry.ranges), entry.zero))
    return result
