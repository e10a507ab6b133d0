"""Selections of layers: `upper-half`, `all`, `last:16`, `first:4`, `12-31`, `7` or `[1, 5, 9]`.

Parts of a model by name: the halves `lower-half` and `upper-half`, and the two quarters of the upper half,
`third-quarter` and `last-quarter`. They join without a gap for every number of layers.

A selection is written before the model is known, so it is read in two steps: `check` refuses what can never be one,
`resolve` turns it into layer numbers once the number of layers is known. Imports nothing of ours but the errors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from rewriter.common.errors import RewriterError, nearest, shortened

Selection = str | int | Sequence[int]

ALL = "all"
FORMS = "all, upper-half, last:16, first:4, 12-31, 7 or [1, 5, 9]"

# (first, past the last) in quarters of the number of layers, rounded down.
_PARTS = {
    ALL: (0, 4),
    "lower-half": (0, 2),
    "upper-half": (2, 4),
    "third-quarter": (2, 3),
    "last-quarter": (3, 4),
}
_COUNT = re.compile(r"(first|last):([0-9]{1,6})")
_RANGE = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?")


def check(selection: object) -> None:
    """Raises RewriterError where `selection` is no selection of any model: a misspelt word, an empty list, `9-3`."""
    if isinstance(selection, str):
        _check_text(selection.strip())
        return
    layers = selection if isinstance(selection, list | tuple) else [selection]
    if not layers:
        raise RewriterError("layers: an empty list selects no layer. Leave the pass out of the recipe instead.")
    numbers = [layer for layer in layers if isinstance(layer, int) and not isinstance(layer, bool)]
    if len(numbers) < len(layers):
        raise RewriterError(f"layers: {shortened(repr(selection))} is no selection of layers. Write {FORMS}.")
    for layer in numbers:
        if layer < 0:
            raise RewriterError(
                f"layers: {layer} is negative. Layers count from 0; for the last ones use last:{-layer}."
            )
    for layer, following in itertools.pairwise(sorted(numbers)):
        if layer == following:
            raise RewriterError(f"layers: {layer} is listed twice.")


def resolve(selection: Selection, num_layers: int) -> tuple[int, ...]:
    """The selected layer numbers, ascending, each in `0 … num_layers - 1`.

    `upper-half` is floor(L/2) … L-1, and ranges include both ends. Raises RewriterError for what `check` refuses and
    for layers that the model does not have; it never clips, so a recipe cannot silently do less than it says.
    """
    check(selection)
    if not isinstance(selection, str):
        layers = (selection,) if isinstance(selection, int) else tuple(sorted(selection))
        return _in_range(selection, layers, num_layers)
    text = selection.strip()
    if text in _PARTS:
        start, stop = (num_layers * quarters // 4 for quarters in _PARTS[text])
        if start == stop:
            raise RewriterError(f"layers: {text} of {num_layers} layers is none. Name layers: 0 to {num_layers - 1}.")
        return tuple(range(start, stop))
    if counted := _COUNT.fullmatch(text):
        count = int(counted[2])
        if count > num_layers:
            raise RewriterError(
                f"layers: {text} asks for {count} layers, the model has {num_layers}. "
                f"Use {counted[1]}:{num_layers} or less, or all."
            )
        return tuple(range(count)) if counted[1] == "first" else tuple(range(num_layers - count, num_layers))
    ends = [int(end) for end in text.split("-")]
    layers = tuple(range(ends[0], ends[-1] + 1)) if ends[-1] < num_layers else tuple(ends)
    return _in_range(text, layers, num_layers)


def runs_of(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Numbers that follow each other without a gap, of numbers in ascending order."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        yield [number for _, number in run]


def spans(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0–2, 5"."""
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs_of(numbers))


def _check_text(text: str) -> None:
    if text in _PARTS:
        return
    if counted := _COUNT.fullmatch(text):
        if int(counted[2]) == 0:
            raise RewriterError(f"layers: {text} selects no layer. Use {counted[1]}:1 or more.")
        return
    if _RANGE.fullmatch(text):
        first, _, last = text.partition("-")
        if last and int(first) > int(last):
            raise RewriterError(f"layers: {text} runs backwards. Did you mean {int(last)}-{int(first)}?")
        return
    guess = nearest(text.split(":")[0], (*_PARTS, "last:", "first:"))
    raise RewriterError(
        f"layers: {shortened(repr(text))} is no selection of layers. "
        + (f"Did you mean {guess + '4' if guess.endswith(':') else guess}? " if guess else "")
        + f"Write {FORMS}."
    )


def _in_range(selection: Selection, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    beyond = [layer for layer in layers if layer >= num_layers]
    if beyond:
        raise RewriterError(
            f"layers: {shortened(selection)} names layer {beyond[-1]}, the model has {num_layers} layers: 0 to "
            f"{num_layers - 1}."
        )
    return layers
