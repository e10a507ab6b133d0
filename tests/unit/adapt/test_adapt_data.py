"""Training data: which tokens of a file become which rows, what is a target, and what is said of a bad line."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapt_data_cases import BOS, CHATML, EOS, PAD, shared, tokenizer, written
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriter.adapt import token_rows
from rewriter.adapt.token_rows import Counts, Rows, first_fit, load_rows
from rewriter.common.errors import RewriterError

# As CHATML, but an answer that is not the last is written without its first letter, as some drop earlier reasoning.
FORGETFUL = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content[1:] }}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def segments(rows: Rows) -> list[list[tuple[list[int], list[int]]]]:
    """Of each row the ids and labels of its segments, padding apart, after checks that hold for every row."""
    found = []
    for index in range(len(rows)):
        row = rows[index]
        assert set(row) == {"input_ids", "labels", "position_ids", "segment_ids"}
        assert all(values.dtype == torch.int64 and values.shape == (rows.length,) for values in row.values())
        numbers = row["segment_ids"].tolist()
        assert numbers == sorted(numbers)
        parts = []
        for number in range(numbers[-1] + 1):
            here = row["segment_ids"] == number
            assert row["position_ids"][here].tolist() == list(range(int(here.sum())))
            parts.append((row["input_ids"][here].tolist(), row["labels"][here].tolist()))
            assert parts[-1][1][0] == -100
        if parts[-1][0] == [PAD] * len(parts[-1][0]):
            assert parts.pop()[1] == [-100] * numbers.count(numbers[-1])
        found.append(parts)
    return found


def labelled(rows: Rows) -> list[str]:
    """What is to be predicted, as text, segment by segment."""
    return [bytes(i for i in labels if 0 <= i < 256).decode() for row in segments(rows) for _, labels in row]


# Rows


def expected_example(example: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and labels of a whole example, written out by hand for the byte-level tokenizer."""
    if "text" in example:
        ids = [BOS, *example["text"].encode(), EOS]
        return ids, [-100, *ids[1:]]
    ids, labels = [], []
    for message in example["messages"]:
        turn = [*message["content"].encode(), EOS]
        head = f"<{message['role']}>".encode()
        ids += [*head, *turn, 10]
        labels += [-100] * len(head) + (turn if message["role"] == "assistant" else [-100] * len(turn)) + [-100]
    return ids, labels


def expected_rows(examples: list[dict[str, Any]], length: int, too_long: str, packing: bool) -> list[Any]:
    """The contract, word for word: first fit in file order."""
    rows: list[list[tuple[list[int], list[int]]]] = []
    for example in examples:
        ids, labels = expected_example(example)
        pieces = [(ids[:length], labels[:length])]
        if too_long == "split" and len(ids) > length:
            rest = [ids[s : s + length - 1] for s in range(1, len(ids), length - 1)]
            pieces = [([BOS, *piece], [-100, *piece]) for piece in rest]
        for piece in pieces:
            if not any(label >= 0 for label in piece[1]):
                continue
            row = next((r for r in rows if packing and sum(len(p[0]) for p in r) + len(piece[0]) <= length), None)
            if row is None:
                rows.append(row := [])
            row.append(piece)
    return rows


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=30).map(
    lambda text: {"text": text}
)
WORDS = st.text("abcé 漢\u2028", min_size=1, max_size=8).filter(str.strip)
CHATS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3).map(lambda turns: chat(*sum(turns, ())))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(TEXTS | CHATS, min_size=1, max_size=12),
    st.integers(2, 90),
    st.sampled_from(["truncate", "split"]),
    st.booleans(),
)
def test_every_token_is_in_its_row_once_and_every_target_is_one(
    examples: list[dict[str, Any]], length: int, too_long: Any, packing: bool
) -> None:
    if too_long == "split":
        examples = [e for e in examples if "text" in e] or [{"text": "ab"}]
    expected = expected_rows(examples, length, too_long, packing)
    with tempfile.TemporaryDirectory() as directory:
        path = written(Path(directory), *examples)
        if not expected:
            with pytest.raises(RewriterError, match="no target is left"):
                load_rows(path, shared(), length=length, too_long=too_long, packing=packing)
            return
        rows = load_rows(path, shared(), length=length, too_long=too_long, packing=packing)
    assert segments(rows) == expected
    sizes = [len(expected_example(e)[0]) for e in examples]
    excess = [max(0, size - length) for size in sizes]
    counts, tokens = rows.counts, sum(len(ids) for row in expected for ids, _ in row)
    assert (counts.examples, counts.rows, counts.tokens) == (len(examples), len(expected), tokens)
    assert counts.targets == sum(label >= 0 for row in expected for _, labels in row for label in labels)
    assert counts.tokens + counts.padding == counts.rows * length
    if too_long == "split":
        assert (counts.split, counts.truncated, counts.dropped) == (sum(map(bool, excess)), 0, 0)
        assert counts.targets == sum(size - 1 for size in sizes)  # none is lost where a text goes on in another segment
    else:
        assert (counts.split, counts.truncated) == (0, sum(map(bool, excess)))
        assert counts.tokens == sum(sizes) - counts.truncated_tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 4))
def test_rows_that_are_no_longer_tried_change_nothing_but_how_full_rows_are(sizes: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "_OPEN_ROWS", window)
        rows = first_fit(np.array(sizes, np.int64), 20)
    used = np.bincount(rows, sizes) if sizes else np.zeros(0)
    assert (used <= 20).all()
    assert (used > 0).all()
    firsts = [int(np.flatnonzero(rows == row)[0]) for row in range(len(used))]
    assert firsts == sorted(firsts)


def test_a_row_past_the_last_is_an_index_error(tmp_path: Path) -> None:
    rows = load_rows(written(tmp_path, {"text": "a"}, {"text": "b"}), shared(), length=4)
    assert len(list(rows)) == len(rows) == 2  # by __getitem__, until it says that there is no more
    assert rows[-1]["input_ids"].tolist() == [BOS, ord("b"), EOS, PAD]


def test_tokens_are_held_as_four_bytes_and_one(tmp_path: Path) -> None:
    rows = load_rows(written(tmp_path, *[{"text": "x" * 1000}] * 100), shared(), length=2048)
    held = [value for value in vars(rows).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in held) <= 5 * rows.counts.tokens + 40 * rows.counts.examples


# Targets


def test_the_assistants_turns_are_targets_with_their_end(tmp_path: Path) -> None:
    example = {"messages": [{"role": "system", "content": "S"}, *chat("q", " a ", "r", "b")["messages"]], "id": 7}
    (((ids, labels),),) = segments(load_rows(written(tmp_path, example), shared(), length=100))
    assert bytes(i for i in ids if i < 256) == b"<system>S\n<user>q\n<assistant> a \n<user>r\n<assistant>b\n"
    assert [i for i in labels if i >= 0] == [*b" a ", EOS, *b"b", EOS]


def test_a_template_that_marks_the_assistant_is_believed(tmp_path: Path) -> None:
    rows = load_rows(written(tmp_path, chat("q", "a", "r", "b")), tokenizer(MARKED), length=100)
    assert labelled(rows) == ["ab"]
    assert rows.counts.targets == 4


def test_marks_at_white_space_are_heeded(tmp_path: Path) -> None:
    """With offsets that leave white space out, as some byte-level tokenizers give them."""

    class Trimmed:
        """The shared tokenizer, but a token that is white space has no characters."""

        def __getattr__(self, name: str) -> Any:
            return getattr(marked, name)

        def __call__(self, text: str, **options: Any) -> Any:
            encoded = marked(text, **options)
            encoded["offset_mapping"] = [
                (b, b) if text[a:b].isspace() else (a, b) for a, b in encoded["offset_mapping"]
            ]
            return encoded

    marked = tokenizer(MARKED.replace("{{ m.content }}{{ eos_token }}{% endgen", "{{ m.content }}{% endgen"))
    example = chat("q", " a b ", "r", " c d ")
    rows = load_rows(written(tmp_path, example), Trimmed(), length=100)
    assert [text.strip() for text in labelled(rows)] == [
        "a b c d"
    ]  # the space at the end of an answer is no token of its span


def test_without_a_special_token_the_line_break_is_the_end_of_a_turn(tmp_path: Path) -> None:
    plain = tokenizer(CHATML.replace("{{ eos_token }}", ""))
    assert labelled(load_rows(written(tmp_path, chat("q", "a")), plain, length=100)) == ["a\n"]


def test_tools_tool_turns_and_parts_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | length }}" + CHATML
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"},
    ]
    example = {"messages": messages, "tools": [{"type": "function"}], "text": None}
    (((ids, labels),),) = segments(load_rows(written(tmp_path, example), tokenizer(template), length=100))
    assert bytes(i for i in ids if i < 256) == b"1<user>qr\n<assistant>\n<tool>1\n<assistant>a\n"
    assert [i for i in labels if i >= 0] == [EOS, ord("a"), EOS]


def test_separators_within_strings_do_not_end_lines(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + json.dumps({"text": "a"}).encode(), b" \r", {"text": "b\u2028\x85\x0cc"})
    assert labelled(load_rows(path, shared(), length=100)) == ["a", "b\u2028\x85\x0cc"]


def test_an_end_is_put_after_a_text_once(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "a<|eos|>"})
    assert segments(load_rows(path, shared(), length=9)) == [[([BOS, 97, EOS], [-100, 97, EOS])]]
    (row,) = load_rows(path, tokenizer(pad_token=None), length=5)
    assert row["input_ids"].tolist() == [BOS, 97, EOS, EOS, EOS]
    assert row["labels"].tolist() == [-100, 97, EOS, -100, -100]


def test_a_truncated_conversation_without_an_answer_is_dropped_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, chat("q" * 40, "a"), chat("q", "a" * 40))
    rows = load_rows(path, shared(), length=30)
    sizes = [len(expected_example(chat(*c))[0]) for c in (("q" * 40, "a"), ("q", "a" * 40))]
    assert rows.counts == Counts(
        examples=2, rows=1, tokens=30, targets=10, truncated=2, truncated_tokens=sum(sizes) - 30, dropped=1
    )


# Bad data. Each case is the second of three lines.

GOOD = {"text": "good"}
BAD: dict[str, tuple[Any, str]] = {
    "no JSON": (b'{"text": "a" "b"}', r"not JSON: Expecting ',' delimiter at column 14"),
    "no UTF-8": (b'{"text": "\xff"}', r"not UTF-8: byte 11 of the line is 0xff"),
    "half a pair": (b'{"text": "\\ud800"}', r'"text" holds half of a surrogate pair, \\ud800'),
    "too deep": (b"[" * 200_000, r"nested too deeply"),
    "a key twice": (b'{"text": "a", "text": "b"}', r"key 'text' twice in one object"),
    "a huge number": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", r"not JSON that can be read"),
    "a list": ([1], r"not a JSON object but a list"),
    "neither": ({"prompt": "a"}, r"""neither "messages" nor "text": it has 'prompt'"""),
    "both": (GOOD | chat("q", "a"), r'both "messages" and "text"'),
    "empty text": ({"text": ""}, r'"text" is empty'),
    "a number": ({"text": 3}, r'"text" is a number, where a string was expected'),
    "an object of messages": ({"messages": {}}, r'"messages" is an object, where a list was expected'),
    "no messages": ({"messages": []}, r"no messages"),
    "a string for a message": ({"messages": ["hi"]}, r"messages\[0\] is a string"),
    "no role": ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role"),
    "unknown role": ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\] has the unknown role 'bot'"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    "true": ({"messages": [{"role": "user", "content": True}]}, r"messages\[0\]\.content is a boolean"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]\.content\[0\] is 'image'",
    ),
    "assistant first": (
        {"messages": chat("q", "a")["messages"][1:]}, r"roles out of order: messages\[0\] is 'assistant' at the start",
    ),
    "twice the user": (
        {"messages": [{"role": "user", "content": "q"}] * 2},
        r"roles out of order: messages\[1\] is 'user' after 'user', where 'assistant' fits",
    ),
    "late system": (
        {"messages": [*chat("q", "a")["messages"], {"role": "system", "content": "s"}]},
        r"messages\[2\] is 'system' after 'assistant', where 'user' or 'tool' fits",
    ),
    "no answer": (chat("q", "a", "r"), r"messages\[2\], the last, is 'user'"),
    "empty answer": (chat("q", " "), r"messages\[1\]: the assistant says nothing.*empty after masking"),
    "tools": (chat("q", "a") | {"tools": "f"}, r'"tools" is a string'),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_told_with_its_reason(case: str, tmp_path: Path) -> None:
    line, reason = BAD[case]
    path = written(tmp_path, GOOD, line, GOOD)
    with pytest.raises(RewriterError, match=rf"^{path}:2: .*{reason}") as caught:
        load_rows(path, shared(), length=100)
    assert "Correct this line or take it out" in str(caught.value)


TEMPLATE_FAULTS = {
    "forgets": (FORGETFUL, r"the end of messages\[1\] cannot be found.*{% generation %}"),
    "marks nothing": ("x{% generation %}{% endgeneration %}" + CHATML, r"empty after masking: none of its \d+ tokens"),
    "refuses": ("{{ raise_exception('no such talk') }}", r"the chat template fails on these messages: no such talk"),
    "computes": ("{{ 1 / 0 }}", r"the chat template fails on these messages: division by zero"),
}


def test_half_a_pair_that_a_template_writes_is_told(tmp_path: Path) -> None:
    line = json.dumps(chat("q", "a") | {"tools": [{"name": "\ud800"}]}).encode()
    with pytest.raises(RewriterError, match=r":1: what the chat template makes .* half of a surrogate pair"):
        load_rows(written(tmp_path, line), tokenizer("{{ tools[0].name }}" + CHATML), length=100)


@pytest.mark.parametrize("case", TEMPLATE_FAULTS)
def test_a_template_that_cannot_be_masked_is_refused(case: str, tmp_path: Path) -> None:
    template, reason = TEMPLATE_FAULTS[case]
    path = written(tmp_path, GOOD, chat("q", "ab", "r", "cd"))
    with pytest.raises(RewriterError, match=rf"^{path}:2: {reason}"):
        load_rows(path, tokenizer(template), length=100)


def test_one_answer_is_enough_for_a_template_that_forgets(tmp_path: Path) -> None:
    assert labelled(load_rows(written(tmp_path, chat("q", "ab")), tokenizer(FORGETFUL), length=100)) == ["ab"]


def test_messages_need_a_template_and_its_special_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, chat("q", "a"))
    with pytest.raises(RewriterError, match=rf"^{path}:1: messages need a chat template.*chat_template\.jinja"):
        load_rows(path, tokenizer(None), length=100)
    with pytest.raises(RewriterError, match=rf"^{path}:1: .*split_special_tokens in tokenizer_config\.json"):
        load_rows(path, tokenizer(split_special_tokens=True), length=100)


def test_all_faults_are_counted_and_ten_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path, *[b"{"] * 13, GOOD)
    with pytest.raises(RewriterError) as caught:
        load_rows(path, shared(), length=100)
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines[:10]] == [f"{path}:{number}:" for number in range(1, 11)]
    assert lines[10].startswith("and 3 more faults. Correct these lines")
    assert len(lines) == 11


def test_too_long_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {"text": "x" * 10}, chat("q", "a" * 20))
    with pytest.raises(RewriterError, match=rf"^{path}:2: 12 tokens, more than the length of 8, .*\n{path}:3: 42 tok"):
        load_rows(path, shared(), length=8, too_long="refuse")
    with pytest.raises(RewriterError, match=rf"^{path}:3: 42 tokens.*conversations cannot be split"):
        load_rows(path, shared(), length=8, too_long="split")


def test_a_text_that_is_too_long_is_split_and_a_conversation_cut_where_nothing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "x" * 40}, chat("q", "a" * 40))
    counts = load_rows(path, shared(), length=30, too_long=None).counts
    assert (counts.split, counts.truncated) == (1, 1)


def test_a_text_without_a_target_is_a_fault(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "ab"}, {"text": "a"})
    plain = tokenizer(eos_token=None, add_bos_token=False)
    with pytest.raises(RewriterError, match=rf"^{path}:2: empty after masking: none of its 1 tokens is a target"):
        load_rows(path, plain, length=8)


# Sources


def test_a_source_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    for source, reason in [
        (tmp_path / "none.jsonl", "no such file"),
        ("data/none.jsonl", "no such file"),
        ("none.jsonl.gz", "no such file"),
        ("./owner/name", "no such file"),
        (tmp_path, "a directory, where a file was expected"),
    ]:
        with pytest.raises(RewriterError, match=rf"^{source}: {reason}"):
            load_rows(source, shared(), length=8)
    with pytest.raises(RewriterError, match="holds no examples"):
        load_rows(written(tmp_path, b"", b"  "), shared(), length=8)
    (tmp_path / "data.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
    with pytest.raises(RewriterError, match="compressed by gzip"):
        load_rows(tmp_path / "data.jsonl", shared(), length=8)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [GOOD | {"messages": None}, {"text": ""}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(RewriterError, match=r'^owner/name:test row 1: "text" is empty'):
        load_rows("owner/name:test", shared(), length=8)
    with pytest.raises(RewriterError, match=r'^owner/name:train row 1: "text" is empty'):
        load_rows("owner/name", shared(), length=8)
    assert asked == [("owner/name", "test"), ("owner/name", "train")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RewriterError, match=r"^owner/name: no such file.*pip install 'rewriter\[adapt\]'"):
        load_rows("owner/name", shared(), length=8)
