"""Conversations as tokens, through the tokenizer's chat template, with those that the assistant wrote marked."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate
from typing import Any

from rewriter.adapt.examples import BadExample, kind_of
from rewriter.common.errors import RewriterError

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
