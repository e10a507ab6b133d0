"""The cells of parametrized tests that stay in `make test` are there."""

from __future__ import annotations


def test_each_cell_that_is_fast_exists(unknown_fast_cells: list[str]) -> None:
    """Of the files that are collected with this one: a cell that has another name now would be left out unseen."""
    assert not unknown_fast_cells
