"""Windows of a text: every token once, each window as texts of the model begin."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewriter.check.drift import calibration_tokens, read_in, windows
from rewriter.common.text_windows import begins_texts, text_windows
from rewriter.predict.search.measured import text_for
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace

TINY = Path(__file__).parents[3] / "examples" / "tiny-llama"
BEGIN = 256
ALONE = {"bos_token_id": BEGIN}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_every_token_is_in_one_window(text: list[int], length: int) -> None:
    tokens = [BEGIN, *text]
    lists = [window.tolist() for window in text_windows(torch.tensor(tokens), length, begins=True)]
    assert all(len(window) == length for window in lists[:-1])
    assert 0 < len(lists[-1]) <= length
    if length == 1:  # no room for more than a token
        assert [token for window in lists for token in window] == tokens
        return
    assert all(window[0] == BEGIN and BEGIN not in window[1:] and len(window) > 1 for window in lists)
    assert [token for window in lists for token in window[1:]] == text


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.integers(2, 20), st.integers(0, 1))
def test_without_a_first_token_windows_overlap_as_told(text: list[int], length: int, overlap: int) -> None:
    found = [window.tolist() for window in text_windows(torch.tensor(text), length, begins=False, overlap=overlap)]
    assert all(len(window) == length for window in found[:-1])
    assert [*found[0], *(token for window in found[1:] for token in window[overlap:])] == text
    assert all(len(window) > overlap for window in found)
    assert all(before[-overlap:] == after[:overlap] for before, after in itertools.pairwise(found) if overlap)


@pytest.mark.parametrize(
    ("tokens", "config", "expected"),
    [
        ([BEGIN, 1], ALONE, True),
        ([1, BEGIN], ALONE, False),
        ([BEGIN], {"text_config": ALONE}, True),
        ([BEGIN], {}, False),
        ([BEGIN], {"bos_token_id": None}, False),
        ([], ALONE, False),
    ],
)
def test_what_begins_texts_is_in_the_config(tokens: list[int], config: dict, expected: bool) -> None:
    assert begins_texts(torch.tensor(tokens), config) is expected


def test_drift_and_search_read_windows_that_begin_as_texts_do() -> None:
    program = trace(TINY)
    tokens = calibration_tokens(program)[0][:1000]
    pieces = windows(program, tokens)
    assert len(pieces) == 4
    rewired = apply_recipe(program, Recipe.load("prefill-ladder"), 1)[0]
    prompts = [window for window, _ in read_in(program, rewired, tokens)]
    assert len(prompts) == 3
    searched = text_for(program, "a text of bytes " * 100, (3, 2))
    read = [*pieces, *prompts, *searched.calibration, *searched.held_out]
    assert {int(window[0]) for window in read} == {BEGIN}
