"""Constants and long lines of printed modules."""

from __future__ import annotations

import ast

import pytest

from rewriter.emit.python_source import LINE_LENGTH, broken, literal


@pytest.mark.parametrize("names", [1, 2, 9])
def test_a_long_constant_is_the_same_in_several_lines(names: int) -> None:
    """A tuple of one name, too: without its comma it would be the name."""
    value = {"bfloat16": tuple(f"model.layers.{'very_' * 12}long.{i}" for i in range(names)), "float16": ("x" * 70,)}
    text = broken(f"kept = {literal(value)}")
    assert "\n" in text
    assert max(map(len, text.split("\n"))) <= LINE_LENGTH
    assert ast.literal_eval(text.removeprefix("kept = ")) == value
