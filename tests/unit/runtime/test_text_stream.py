"""Text piece by piece: the pieces are what decoding everything at once gives, cut at whole characters and stops."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rewriter.runtime.generation.text_stream import TextStream

TEXT = "Zwölf Boxkämpfer: 你好，世界 👩‍🚀 café, naïve… e\u0301 \ufffd end"
HALF = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Any:
    """A token per byte, as GPT-2 writes them, and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_fallback() -> Any:
    """As Llama 2's: words begin with ▁, the text's first space is stripped, unknown characters are bytes."""
    words = ["▁", "e", "n", "d", "▁end", "▁the", "the", "a", "f", "c", "é", ",", "."]
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<0x00>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def streamed(tokenizer: Any, prompt: list[int], tokens: list[int], **options: Any) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, prompt, **{"limit": len(tokens), **options})
    pieces = []
    for index, token in enumerate(tokens):
        assert not stream.done
        pieces.append(stream.add(token, 1.0 + 0.5 * index))
        if stream.done:
            break
    return pieces, stream


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_are_whole_characters_and_together_the_text(make: Any) -> None:
    tokenizer = make()
    prompt, tokens = tokenizer("A prompt: é").input_ids, tokenizer(TEXT).input_ids
    pieces, stream = streamed(tokenizer, prompt, tokens)
    whole = tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
    assert whole.lstrip() == TEXT
    assert "".join(pieces) == whole == stream.result().text
    assert "".join(pieces).count(HALF) == TEXT.count(HALF)
    assert sum(map(bool, pieces)) > len(TEXT) / 2, "text comes while it is made"


@pytest.mark.parametrize("whole", [False, True], ids=["bytes", "characters"])
def test_any_tokens_give_what_decoding_them_at_once_gives(whole: bool) -> None:
    """Of bytes in any order, good and broken; where one broken byte spoils those before it, of whole characters."""
    tokenizer, draw = (byte_fallback if whole else byte_level)(), random.Random(0)
    characters = [tokenizer(c, add_special_tokens=False).input_ids for c in "aé好👩 ."]
    pool = [*(characters if whole else [[t] for ids in characters for t in ids]), [tokenizer.eos_token_id]]
    prompt = tokenizer("the end").input_ids
    for _ in range(200):
        tokens = [token for ids in draw.choices(pool, k=draw.randint(1, 24)) for token in ids]
        pieces, _ = streamed(tokenizer, prompt, tokens)
        old, new = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *tokens]))
        assert "".join(pieces) == new[len(old) :]


def test_a_space_at_the_start_belongs_to_the_text() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁end"])
    assert streamed(tokenizer, ids[:1], ids[1:])[0] == [" end"]
    assert streamed(tokenizer, ids[:1], tokenizer.convert_tokens_to_ids(["the", "▁", "e"]))[0] == ["the", " ", "e"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("ab好").input_ids[:-1]
    assert streamed(tokenizer, [tokens[0]], tokens)[0] == ["a", "b", "", HALF]


@pytest.mark.parametrize(
    ("stop", "pieces"),
    [
        (["END"], ["a", "", "", "EN", "", "ENx", "", "", ""]),
        (["END", "x"], ["a", "", "", "EN", "", "EN"]),
        (["NxE"], ["a", "E", "", "NE", "", "", ""]),
        (["ENDED", "ND"], ["a", "", "", "EN", "", "ENx", "", "", "E"]),
        (["yz"], ["a", "E", "N", "E", "N", "x", "E", "N", "D", "y"]),
    ],
)
def test_nothing_of_a_stop_string_is_given_out(stop: list[str], pieces: list[str]) -> None:
    tokenizer = byte_level()
    tokens = tokenizer("aENENxENDy").input_ids
    given, stream = streamed(tokenizer, tokenizer("p").input_ids, tokens, stop=stop)
    assert given == pieces
    assert stream.done
    assert stream.result().text == "".join(pieces)
    assert stream.result().tokens == tokens[: len(pieces)]


def test_an_end_of_sequence_ends_the_text_and_gives_out_what_waited() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    tokens = [*tokenizer("ab").input_ids, end, *tokenizer("c").input_ids]
    pieces, stream = streamed(tokenizer, tokens[:1], tokens, ends=[end], stop=["bc"])
    assert pieces == ["a", "", "b"]
    assert stream.result().tokens == tokens[:3]


def test_times_are_those_of_the_first_token_and_of_one_after_it() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("abc").input_ids
    found = streamed(tokenizer, tokens, tokens)[1].result()
    assert (found.seconds_to_first_token, found.seconds_per_token) == (1.0, 0.5)
    assert streamed(tokenizer, tokens, tokens[:1])[1].result().seconds_per_token is None
