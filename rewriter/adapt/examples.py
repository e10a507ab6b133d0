"""Examples of a JSON Lines file, or of a data set of the Hugging Face Hub; with the place of every fault."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
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


ROLES = ("system", "developer", "user", "assistant", "tool")
# The roles that may follow a role; None: the start.
_FOLLOWING: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


class ChatEncoder:
    """Turns messages into token ids and a flag for each: true where the assistant wrote it.

    The assistant's are what the template marks with `{% generation %}`. Where it has no such marks, they are found by
    prefixes: what the template renders up to the start of an assistant turn (with the prompt to generate it) and what
    it renders up to its end must both be prefixes of the whole, and the turn is what is between: its content and its
    end-of-turn token. A template that renders a turn in another way once others follow it (some drop the reasoning of
    earlier turns) is refused, since no place in the whole is then that turn's for sure.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise RewriterError(
                "messages need a chat template, and the tokenizer of this model has none. Put chat_template.jinja "
                'beside its tokenizer.json, or give {"text": …} with the conversation as it shall be written'
            )
        if not tokenizer.is_fast:
            raise RewriterError(
                f"messages need a tokenizer that knows the characters of each token, and {type(tokenizer).__name__} "
                'does not. Give the tokenizer.json of a fast tokenizer, or {"text": …}'
            )
        # After one of these the turn is over; a line break after it belongs to the layout.
        self.special = tuple(token for token in tokenizer.all_special_tokens if token)
        if tokenizer.split_special_tokens and any(
            token in str(tokenizer.chat_template) for token in (*self.special, "eos_token")
        ):
            raise RewriterError(
                "the chat template writes special tokens, and this tokenizer would read them as ordinary text "
                "(split_special_tokens in tokenizer_config.json). Set that to false, or give a template without them"
            )
        self.tokenizer = tokenizer

    def __call__(self, messages: Any, tools: Any = None) -> tuple[list[int], list[bool]]:
        """Token ids, and for each a flag that is true for the assistant's. Raises BadExample."""
        if not isinstance(messages, list):
            raise BadExample(f'"messages" is {kind_of(messages)}, where a list was expected')
        if not messages:
            raise BadExample('no messages: "messages" is an empty list')
        messages = [_checked(index, message) for index, message in enumerate(messages)]
        _check_order([message["role"] for message in messages])
        if tools is not None and not isinstance(tools, list):
            raise BadExample(f'"tools" is {kind_of(tools)}, where a list was expected')
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            find = self._marked if _GENERATION.search(template) else self._between_prefixes
            text, spans = find(messages, tools)
        except BadExample:
            raise
        except Exception as error:  # templates raise what they like, jinja's own errors and Python's
            raise BadExample(f"the chat template fails on these messages: {error}") from error
        checked_text(text, "what the chat template makes of these messages")  # of a tool call, say
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), _flags(encoded["offset_mapping"], spans)

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text and the spans of it, in characters, that the template marks.

        `apply_chat_template(…, return_assistant_tokens_mask=True)` leaves out all later answers or takes in all that
        follows, where a span begins or ends with white space that belongs to no token (transformers 5.23).
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0]]

    def _between_prefixes(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The same of a template without marks."""

        def render(count: int, prompt: bool = False) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
                )
            )

        whole = render(len(messages))
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = render(index, prompt=True), render(index + 1)
            for rendered, where in ((before, "start"), (after, "end")):
                if not whole.startswith(rendered):
                    raise BadExample(
                        f"the {where} of messages[{index}] cannot be found: the chat template writes what comes before "
                        "it otherwise once more messages follow. Mark the assistant's turns in the template with "
                        "{% generation %} … {% endgeneration %}, or give conversations with one answer each"
                    )
            turn = after[len(before) :]
            if turn.rstrip().endswith(self.special):
                turn = turn.rstrip()
            spans.append((len(before), len(before) + len(turn)))
        return whole, spans


def _flags(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """For each token true where it is in a span or reaches into it from before.

    By the first and last token of a span: those between may have no characters (white space, with some tokenizers).
    """
    flags = [False] * len(offsets)
    ends = list(accumulate((end for _, end in offsets), max))
    for start, end in spans:
        first = bisect_right(ends, start)
        last = next((i for i in range(first, len(offsets)) if offsets[i][0] >= end), len(offsets))
        flags[first:last] = [True] * (last - first)
    return flags


def checked_text(text: Any, what: str) -> str:
    """`text` if it is a string that can be encoded. Raises BadExample."""
    if not isinstance(text, str):
        raise BadExample(f"{what} is {kind_of(text)}, where a string was expected")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadExample(
            f"{what} holds half of a surrogate pair, \\u{ord(text[error.start]):04x}, and so no text"
        ) from error
    return text


def _checked(index: int, message: Any) -> dict[str, Any]:
    """The message with its content as one string, without keys that are null (tables of the Hub fill up with them)."""
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadExample(f'{name} is {kind_of(message)}, where {{"role": …, "content": …}} was expected')
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise BadExample(f"{name} has no role")
    if role not in ROLES:
        raise BadExample(f"{name} has the unknown role {role!r}. Roles are {', '.join(ROLES)}")
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    if "content" not in message and not calls_tools:
        raise BadExample(f"{name} has no content")
    content = message.get("content", "")
    if isinstance(content, list):
        content = "".join(_text_of_part(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    content = checked_text(content, f"{name}.content")
    if role == "assistant" and not content.strip() and not calls_tools:
        raise BadExample(f"{name}: the assistant says nothing, so nothing can be learnt from it (empty after masking)")
    return message | {"content": content}


def _text_of_part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = repr(part.get("type")) if isinstance(part, dict) else kind_of(part)
        raise BadExample(f'{name} is {kind}, where {{"type": "text", "text": …}} was expected: only text is trained on')
    return checked_text(part.get("text"), f"{name}.text")


def _check_order(roles: list[str]) -> None:
    before: str | None = None
    for index, role in enumerate(roles):
        expected = _FOLLOWING[before]
        if role not in expected:
            after = f"after {before!r}" if before else "at the start"
            fits = " or ".join(map(repr, expected))
            raise BadExample(f"roles out of order: messages[{index}] is {role!r} {after}, where {fits} fits")
        before = role
    if before != "assistant":
        raise BadExample(
            f"roles out of order: messages[{len(roles) - 1}], the last, is {before!r}; it must be the assistant's, or "
            "nothing is left after masking"
        )
