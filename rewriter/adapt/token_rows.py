"""Examples of a file or of the Hub as rows of tokens, of one length each, packed, with their targets."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from rewriter.adapt.examples import EXPECTED, BadExample, ChatEncoder, Faults, checked_text, read_examples
from rewriter.adapt.options import TooLong
from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import not_a_token
from rewriter.common.text_windows import text_windows
from rewriter.runtime.replicas import IGNORED

# An example is tried on the rows that were opened last, so that packing takes time in proportion to the examples. A
# row that is left open longer than this has room for very short examples only.
_OPEN_ROWS = 1024


@dataclass
class Counts:
    """Counts of examples and tokens. Tokens are those in rows, padding apart; the loss is taken over targets."""

    examples: int = 0  # all that were read
    rows: int = 0
    tokens: int = 0
    targets: int = 0
    padding: int = 0  # tokens
    truncated: int = 0  # examples
    truncated_tokens: int = 0  # taken from them
    dropped: int = 0  # truncated examples without a target in what was left; also counted as truncated
    split: int = 0  # examples


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens. `rows[i]` has four int64 tensors [length]:

    input_ids     the tokens
    labels        the tokens again, unshifted; -100 where not a target: prompts, padding, the first token of a segment
    position_ids  0, 1, … from the start of each segment
    segment_ids   0, 1, … for the examples of the row; its padding is one more segment

    Held as int32 and a byte for each token, for any number of rows.
    """

    def __init__(self, collected: SegmentCollector, padding_id: int, packing: bool) -> None:
        self.length, self._padding_id = collected.length, padding_id
        self._ids = np.frombuffer(collected.ids, np.int32)
        self._targets = np.frombuffer(collected.targets, np.bool_)
        self._ends = np.frombuffer(collected.ends, np.int64)
        sizes = np.diff(self._ends, prepend=0)
        self._starts = self._ends - sizes
        row_of = first_fit(sizes, self.length) if packing else np.arange(len(sizes))
        rows, tokens = int(row_of.max()) + 1, int(sizes.sum())
        self._order = np.argsort(row_of, kind="stable")  # segments row by row, in the file's order within a row
        self._row_starts = np.searchsorted(row_of[self._order], np.arange(rows + 1))
        self.counts = replace(
            collected.counts,
            rows=rows,
            tokens=tokens,
            targets=int(self._targets.sum()),
            padding=rows * self.length - tokens,
        )

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        ids = np.full(self.length, self._padding_id, np.int64)
        labels = np.full(self.length, IGNORED, np.int64)
        positions, segments = np.zeros((2, self.length), np.int64)
        at = 0
        members = self._order[self._row_starts[index] : self._row_starts[index + 1]]
        for number, member in enumerate(members):
            held = slice(self._starts[member], self._ends[member])
            size = held.stop - held.start
            here = slice(at, at + size)
            ids[here] = self._ids[held]
            labels[here] = np.where(self._targets[held], self._ids[held], IGNORED)
            positions[here], segments[here] = np.arange(size), number
            at += size
        positions[at:], segments[at:] = np.arange(self.length - at), len(members)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


def first_fit(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The row of each example, int64 [examples]: the first open row that has room for it, else a new one.

    `sizes`, int64 [examples], are tokens, none more than `length`. Examples keep their order within a row, and rows
    come in the order of their first example, so the same file always makes the same rows.
    """
    rows = np.empty(len(sizes), np.int64)
    room = np.empty(len(sizes), np.int64)  # of every row made so far
    count = first_open = 0
    for index, size in enumerate(sizes.tolist()):
        fits = room[first_open:count] >= size
        offset = int(fits.argmax()) if len(fits) else 0
        row = first_open + offset
        if not len(fits) or not fits[offset]:
            row, count = count, count + 1
            room[row] = length
            first_open = max(first_open, count - _OPEN_ROWS)
        room[row] -= size
        rows[index] = row
        while first_open < count and not room[first_open]:
            first_open += 1
    return rows


def load_rows(
    source: str | Path,
    tokenizer: Any,
    *,
    length: int,
    too_long: TooLong | None = "truncate",
    packing: bool = True,
    vocabulary: int | None = None,
) -> Rows:
    """The examples of `source` as rows of `length` tokens.

    `source` is a file with one JSON object per line, or the id of a data set on the Hub, `owner/name` or
    `owner/name:split`. An example has "messages" (and "tools", if its template takes them) or "text"; other keys are
    not read. Of messages, what the assistant wrote is a target, with its end-of-turn token; of a text every token but
    the first, and an end-of-sequence token is put after it where the tokenizer has one.

    An example of more than `length` tokens is cut there ("truncate"), goes on in another segment ("split", texts only),
    or is a fault ("refuse"). Such a segment begins with the token that begins texts, where the tokenizer has one, else
    with the last token of the one before, so that no target is lost.
    One without a target in what truncation left is dropped and counted. With `packing`, several examples share a row
    and an example is never in two; without, each has its own row.

    Raises RewriterError with the place and reason of all faults of the source, ten in full. An example with tokens
    beyond the `vocabulary` of the model is one.
    """
    reader = SegmentCollector(tokenizer, length, too_long, vocabulary)
    faults = Faults()
    for place, example in read_examples(source, faults):
        try:
            reader.add(example)
        except BadExample as fault:
            faults.add(place, fault)
        except RewriterError as error:
            raise RewriterError(f"{place}: {error}") from error
    faults.check()
    if not reader.counts.examples:
        raise RewriterError(f"{source}: holds no examples. {EXPECTED}")
    if not reader.ends:
        raise RewriterError(
            f"{source}: no target is left in any of its {reader.counts.examples} examples when they are truncated to "
            f"{length} tokens. Give a greater length"
        )
    padding = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    padding_id = next(t for t in padding if t is not None and not_a_token([t], vocabulary) is None)
    return Rows(reader, padding_id, packing)


class SegmentCollector:
    """Collects the segments of examples, one after the other: `ids` and `targets` [tokens], 5 bytes for each token, and
    `ends` [segments], where each ends."""

    def __init__(self, tokenizer: Any, length: int, too_long: TooLong | None, vocabulary: int | None) -> None:
        self.tokenizer, self.length, self.too_long, self.vocabulary = tokenizer, length, too_long, vocabulary
        self.chat: ChatEncoder | None = None
        self.ids, self.targets, self.ends = array("i"), bytearray(), array("q")
        self.counts = Counts()

    def add(self, example: dict[str, Any]) -> None:
        """Encode an example and keep its segments. Raises BadExample."""
        messages, text = example.get("messages"), example.get("text")
        if messages is None and text is None:
            keys = ", ".join(map(repr, list(example)[:8])) or "no keys"
            raise BadExample(f'neither "messages" nor "text": it has {keys}')
        if messages is not None and text is not None:
            raise BadExample('both "messages" and "text", where one was expected')
        self.counts.examples += 1
        if text is not None:
            ids, targets = self._encode_text(checked_text(text, '"text"'))
        else:
            if self.chat is None:
                self.chat = ChatEncoder(self.tokenizer)
            ids, targets = self.chat(messages, example.get("tools"))
        if (wrong := not_a_token(ids, self.vocabulary, self.tokenizer)) is not None:
            raise BadExample(wrong)
        if not any(targets[1:]):
            raise BadExample(
                f"empty after masking: none of its {len(ids)} tokens is a target"
                + ("" if messages is None else ", the chat template marks nothing as the assistant's")
            )
        for segment_ids, segment_targets in self._fitted(ids, targets, splits=text is not None):
            self.ids.extend(segment_ids)
            self.targets.append(False)  # nothing before it predicts the first token
            self.targets.extend(segment_targets[1:])
            self.ends.append(len(self.ids))

    def _encode_text(self, text: str) -> tuple[list[int], list[bool]]:
        if not text:
            raise BadExample('"text" is empty')
        ids = list(self.tokenizer(text)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return ids, [True] * len(ids)

    def _fitted(self, ids: list[int], targets: list[bool], splits: bool) -> Iterator[tuple[list[int], list[bool]]]:
        """The segments that an example makes, each of `length` tokens at most."""
        excess = len(ids) - self.length
        too_long = self.too_long or ("split" if splits else "truncate")
        if excess <= 0:
            yield ids, targets
        elif too_long == "truncate":
            dropped = not any(targets[1 : self.length])
            self.counts.truncated += 1
            self.counts.truncated_tokens += len(ids) if dropped else excess
            self.counts.dropped += dropped
            if not dropped:
                yield ids[: self.length], targets[: self.length]
        elif too_long == "split" and splits:
            self.counts.split += 1
            # each token but the first is predicted: from the token before it, or from the one that begins every window
            begins = ids[0] == self.tokenizer.bos_token_id
            each = (text_windows(torch.tensor(part), self.length, begins=begins, overlap=1) for part in (ids, targets))
            for window_ids, window_targets in zip(*each, strict=True):
                yield window_ids.tolist(), window_targets.tolist()
        else:
            why = "conversations cannot be split" if too_long == "split" else "too long examples are refused"
            raise BadExample(
                f"{len(ids)} tokens, more than the length of {self.length}, and {why}. Give a greater length, or "
                "truncate"
            )
