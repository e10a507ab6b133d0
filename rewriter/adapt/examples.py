"""Examples of a JSON Lines file, or of a data set of the Hugging Face Hub; with the place of every fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.packages import require

SHOWN_FAULTS = 10
_SUFFIXES = {".jsonl", ".json", ".gz", ".zst", ".txt", ".csv", ".parquet"}
_GZIP = b"\x1f\x8b"
EXPECTED = 'Expected on each line: {"messages": [{"role": …, "content": …}, …]} or {"text": …}'


class BadExample(ValueError):
    """A fault of an example, as a clause that follows its place. Becomes part of one RewriterError for them all."""


class Faults:
    """The faults of a source: all are counted, the first ten are kept, so that one run tells of them all."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, place: str, reason: object) -> None:
        """Note a fault at a place, `FILE:LINE`."""
        self.count += 1
        if self.count <= SHOWN_FAULTS:
            self._shown.append(f"{place}: {reason}")

    def check(self) -> None:
        """Raise RewriterError if there were any."""
        more = [f"and {self.count - SHOWN_FAULTS} more faults"] * (self.count > SHOWN_FAULTS)
        correct = "Correct this line or take it out" if self.count == 1 else "Correct these lines or take them out"
        if self.count:
            raise RewriterError("\n".join([*self._shown, *more]) + f". {correct}. {EXPECTED}")


def read_examples(source: str | Path, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    """The examples of `source` one by one, each with its place; what cannot be read goes to `faults`.

    A source is the path of a file with one JSON object per line, or, where there is no such file, the id of a data set
    on the Hub: `owner/name` (split train) or `owner/name:split`. Raises RewriterError where neither can be opened.
    """
    path = Path(source)
    if path.is_dir():
        raise RewriterError(f"{source}: a directory, where a file was expected. Give the .jsonl file in it")
    if path.exists() and not path.is_file():
        raise RewriterError(f"{source}: a device or a pipe, and the data are read more than once. Give a file")
    if path.exists():
        return _read_lines(path, str(source), faults)
    # An id has one slash at most and no suffix of a file; anything else is a path that is not there.
    looks_like_path = path.is_absolute() or _SUFFIXES & set(path.suffixes) or str(source).startswith(".")
    if looks_like_path or str(source).count("/") > 1:
        raise RewriterError(f"{source}: no such file. Give a file with one JSON object per line. {EXPECTED}")
    return _read_hub(str(source))


def _read_lines(path: Path, name: str, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        # in bytes: lines end at \n alone, while str.splitlines also splits at separators that stand inside of strings
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.startswith(_GZIP):
                    raise RewriterError(
                        f"{name}: compressed by gzip, where text was expected. Unpack it: gunzip {name}"
                    )
                if not line.strip():
                    continue
                place = f"{name}:{number}"
                try:
                    example = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                except BadExample as fault:
                    faults.add(place, fault)
                else:
                    yield place, example
    except OSError as error:
        raise RewriterError(f"{name}: cannot be read ({error.strerror}). Give a file that you may read") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        example = json.loads(line.decode(), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise BadExample(f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}") from error
    except json.JSONDecodeError as error:
        raise BadExample(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadExample("not an example: brackets nested too deeply") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise error if isinstance(error, BadExample) else BadExample(f"not JSON that can be read: {error}") from error
    if not isinstance(example, dict):
        raise BadExample(f"not a JSON object but {kind_of(example)}")
    return example


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys. JSON allows a key twice, of which Python would keep the last without a word."""
    keys = [key for key, _ in pairs]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise BadExample(f"key {repeated!r} twice in one object")
    return dict(pairs)


def _read_hub(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name, _, split = source.partition(":")
    split = split or "train"
    require("adapt", f"{source}: no such file, and reading it as a data set of the Hub", "datasets")
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no network, no such split, a script
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RewriterError(
            f"{source}: no such file, and no data set that could be loaded from the Hub (split {split}): {reason}. "
            "Correct the path or the id, written owner/name or owner/name:split; or download it as a .jsonl file"
        ) from error
    return ((f"{name}:{split} row {index}", dict(row)) for index, row in enumerate(rows))


def kind_of(value: object) -> str:
    """The kind of a JSON value, as JSON calls it."""
    kinds: tuple[tuple[Any, str], ...] = (
        (type(None), "null"), (bool, "a boolean"), (int | float, "a number"), (str, "a string"), (list, "a list"),
    )  # fmt: skip
    return next((word for kind, word in kinds if isinstance(value, kind)), "an object")
