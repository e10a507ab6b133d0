"""A selection of layers means the same layers to every pass, and never silently fewer than it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewriter.common.errors import RewriterError
from rewriter.passes.selection import check, resolve


@pytest.mark.parametrize(
    ("selection", "num_layers", "layers"),
    [
        ("all", 3, (0, 1, 2)),
        ("upper-half", 32, tuple(range(16, 32))),
        ("upper-half", 5, (2, 3, 4)),
        ("upper-half", 1, (0,)),
        ("lower-half", 5, (0, 1)),
        ("third-quarter", 32, tuple(range(16, 24))),
        ("last-quarter", 32, tuple(range(24, 32))),
        ("third-quarter", 6, (3,)),
        ("last-quarter", 6, (4, 5)),
        ("last:20", 32, tuple(range(12, 32))),
        ("last:3", 3, (0, 1, 2)),
        ("first:4", 32, (0, 1, 2, 3)),
        ("12-31", 32, tuple(range(12, 32))),
        (" 2-2 ", 4, (2,)),
        ("7", 8, (7,)),
        (7, 8, (7,)),
        ([9, 1, 5], 12, (1, 5, 9)),
        ((0,), 1, (0,)),
    ],
)
def test_layers_of_a_selection(selection: object, num_layers: int, layers: tuple[int, ...]) -> None:
    assert resolve(selection, num_layers) == layers  # type: ignore[arg-type]


@given(st.integers(3, 200))
def test_parts_of_a_model_join_without_a_gap(num_layers: int) -> None:
    parts = [layer for name in ("lower-half", "third-quarter", "last-quarter") for layer in resolve(name, num_layers)]
    assert parts == list(range(num_layers))


@pytest.mark.parametrize(("name", "num_layers"), [("lower-half", 1), ("third-quarter", 2), ("third-quarter", 1)])
def test_a_part_that_a_shallow_model_lacks_is_refused(name: str, num_layers: int) -> None:
    with pytest.raises(RewriterError, match=f"layers: {name} of {num_layers} layers is none. Name layers"):
        resolve(name, num_layers)


@pytest.mark.parametrize(
    ("selection", "parts"),
    [
        ("last:40", ["last:40", "40 layers", "32", "last:32"]),
        ("first:33", ["first:33", "first:32"]),
        ("12-32", ["12-32", "layer 32", "0 to 31"]),
        ("0-999999", ["999999", "0 to 31"]),
        ("40-50", ["layer 50", "0 to 31"]),
        ([1, 32], ["layer 32", "0 to 31"]),
        (32, ["layer 32"]),
    ],
)
def test_layers_that_the_model_does_not_have(selection: object, parts: list[str]) -> None:
    check(selection)
    with pytest.raises(RewriterError) as refusal:
        resolve(selection, 32)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("selection", "part"),
    [
        ("uper-half", "Did you mean upper-half?"),
        ("lats:4", "Did you mean last:4?"),
        ("none", "no selection"),
        ("", "no selection"),
        ("-3", "no selection"),
        ("1,2", "[1, 5, 9]"),
        ("9-3", "Did you mean 3-9?"),
        ("last:0", "last:1"),
        ([], "empty list"),
        ([1, 2, 1], "1 is listed twice"),
        ([-2], "last:2"),
        ([True], "no selection"),
        (["1"], "no selection"),
        (1.5, "no selection"),
        ({"all": 1}, "no selection"),
        (None, "no selection"),
    ],
)
def test_what_is_no_selection(selection: object, part: str) -> None:
    with pytest.raises(RewriterError, match=r"^layers: ") as refusal:
        check(selection)
    assert part in str(refusal.value)


@given(st.integers(1, 200), st.data())
def test_every_form_agrees_with_the_list_of_its_layers(num_layers: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_layers - 1))
    layers = list(range(first, num_layers))
    assert resolve(f"{first}-{num_layers - 1}", num_layers) == tuple(layers)
    assert resolve(f"last:{num_layers - first}", num_layers) == tuple(layers)
    assert resolve(data.draw(st.permutations(layers)), num_layers) == tuple(layers)
    if first:
        assert resolve(f"first:{first}", num_layers) == tuple(range(first))


@given(st.text(max_size=12), st.integers(1, 64))
def test_any_text_gives_layers_of_the_model_or_is_refused(text: str, num_layers: int) -> None:
    try:
        layers = resolve(text, num_layers)
    except RewriterError:
        return
    assert layers
    assert set(layers) <= set(range(num_layers))
