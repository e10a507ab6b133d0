"""The catalogue: every shipped recipe has a kind, one line of text, and at most one per kind is recommended."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from rewriter.common.errors import RewriterError
from rewriter.recipes import Recipe
from rewriter.recipes.catalogue import KINDS, Kind, entries, library

ENTRIES = {entry.name: entry for entry in entries()}
BOUND = {"desync", "drop_sync"}


def test_every_shipped_recipe_is_listed_under_a_kind_with_a_title() -> None:
    assert tuple(KINDS) == get_args(Kind)
    assert set(ENTRIES) == set(library())
    assert {entry.kind for entry in ENTRIES.values()} == set(KINDS)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_listing_says_of_a_recipe_what_its_file_says(name: str) -> None:
    recipe, entry = Recipe.load(name), ENTRIES[name]
    assert (entry.kind, entry.recommended) == (recipe.kind, recipe.recommended)
    assert recipe.summary.startswith(f"{entry.short}.")
    assert len(entry.short) <= 50, "a line of 80 columns has no room for more"
    assert len(f"recommended for {entry.recommended}") <= 50


@pytest.mark.parametrize("name", ENTRIES)
def test_a_bound_recipe_is_called_so_in_its_line(name: str) -> None:
    passes = Recipe.load(name).passes
    bound = any(p.pass_name in BOUND or p.options.get("variant") == "own_partial" for p in passes)
    assert ENTRIES[name].short.endswith("; bound") == bound


def test_at_most_one_recipe_of_a_kind_is_recommended_and_stands_first() -> None:
    recommended = Counter(entry.kind for entry in ENTRIES.values() if entry.recommended)
    assert recommended == {"overlapped": 1, "prompt": 1, "sequences": 1}
    for kind in recommended:
        assert next(entry for entry in entries() if entry.kind == kind).recommended


def test_a_file_may_have_a_kind_and_another_word_is_refused_with_its_line() -> None:
    text = "name: mine\nsummary: Mine.\nkind: exact\npaper: none\npasses:\n  - pass: overlap\n"
    recipe = Recipe.parse(text)
    assert recipe.kind == "exact"
    assert "kind" not in recipe.to_dict(), "a manifest has the passes; the listing's words are of the file"
    with pytest.raises(RewriterError, match=r"line 3: kind: Input should be 'exact', 'overlapped'.* not 'exotic'"):
        Recipe.parse(text.replace("exact", "exotic"))
