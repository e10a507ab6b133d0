"""Tables leave out their least important columns where the terminal is narrow."""

from __future__ import annotations

import pytest
from rich.console import Console

from rewriter.common.tables import FittingTable

WORDS = "words that may be broken into lines " * 3
ROWS = [
    {"name": f"row-{n}", "first": "11.1 ms", "second": "22.2 ms", "third": "33.3 ms", "said": WORDS} for n in (1, 2)
]


def lines(table: FittingTable, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (90, "name first second third said"), (64, "name first third said"), (55, "name first said"),
        (20, "name first said"),
    ],
)  # fmt: skip
def test_columns_are_left_out_in_order(width: int, kept: str) -> None:
    columns = ("name", "first", "second", "third", "said")
    table = FittingTable(columns, ROWS, ("second", "third"), {"said": 36}, look={"numbers": ("first",)})
    found = lines(table, width)
    assert max(map(len, found)) <= width
    if width > 20:  # where it has to be even narrower, headers are cut
        assert found[0].split() == kept.split()
        assert all(value in found[1] for name, value in ROWS[0].items() if name in kept.split() and name != "said")


def test_headers_and_styles_belong_to_their_columns_and_rows() -> None:
    table = FittingTable(("a", "b"), [{"a": "1"}, {"b": "2"}], (), headers={"b": "two\nlines"}, styles=("", "dim"))
    assert [line.split() for line in lines(table, 30)] == [["two"], ["a", "lines"], ["1"], ["2"]]
