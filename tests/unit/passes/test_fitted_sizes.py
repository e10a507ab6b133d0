"""Numbers of heads, widths and vocabularies that several numbers of ranks divide."""

from __future__ import annotations

from itertools import product

import pytest

from rewriter.common.errors import RewriterError
from rewriter.passes.fitting.sizes import Blocks, fitted_sizes, grouped_heads, vocabulary


def fits(heads: int, groups: int, made: tuple[int, int], ranks: tuple[int, ...], shared: bool) -> bool:
    """The numbers of heads that engines want, said once more."""
    many, few = made
    if many % few or any(many % n for n in ranks):
        return False
    if any(few % n and not (shared and n % few == 0) for n in ranks):
        return False
    return groups * -(-(heads // groups) // (many // few)) <= few


@pytest.mark.parametrize("ranks", [(2,), (3,), (5,), (7,), (3, 6), (4, 6)])
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 1), (32, 8), (10, 2), (16, 16), (12, 4)])
@pytest.mark.parametrize("shared", [True, False])
def test_the_fewest_weights_of_all_that_fit(heads: int, groups: int, ranks: tuple[int, ...], shared: bool) -> None:
    made = grouped_heads(heads, groups, ranks, shared=shared)
    assert fits(heads, groups, made, ranks, shared)
    if heads == groups:
        return
    others = [
        (many, few) for many, few in product(range(1, 60), repeat=2) if fits(heads, groups, (many, few), ranks, shared)
    ]
    assert sum(made) == min(map(sum, others))


@pytest.mark.parametrize(("heads", "groups", "ranks", "made"), [
    (9, 3, 2, (12, 4)), (9, 3, 4, (12, 4)), (9, 3, 5, (15, 5)), (9, 3, 6, (12, 3)),  # SmolLM2
    (4, 1, 3, (6, 1)),  # Gemma 3 270M
])  # fmt: skip
def test_real_models(heads: int, groups: int, ranks: int, made: tuple[int, int]) -> None:
    assert grouped_heads(heads, groups, (ranks,), shared=True) == made


def test_widths_are_whole_tiles_where_those_cost_little_and_groups_where_weights_are_quantized() -> None:
    table = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 17408}
    assert fitted_sizes(table, (3,)) == {"intermediate_size": 17472}  # as users of vLLM pad it by hand
    heads = {"num_attention_heads": 10, "num_key_value_heads": 10}
    assert fitted_sizes(table | {"intermediate_size": 768}, (5,)) == heads | {"intermediate_size": 800}
    assert fitted_sizes(table, (3,), Blocks(channels=128))["intermediate_size"] == 17664 == 3 * 46 * 128
    assert "num_attention_heads" not in fitted_sizes(table, (3,), Blocks(attention=16))  # two heads of 8 in each group
    assert fitted_sizes(table, (3,), Blocks(attention=32))["num_attention_heads"] == 12
    assert not fitted_sizes(table | {"intermediate_size": 768}, (3,))


@pytest.mark.parametrize(("size", "ranks", "made"), [
    (49152, (3,), 49152), (49152, (5,), 49280), (151936, (3,), 152064), (250, (2,), 250), (99, (3,), 192),
    (128, (3, 5), 960),
])  # fmt: skip
def test_a_vocabulary_is_shared_as_it_is_and_as_engines_pad_it(size: int, ranks: tuple[int, ...], made: int) -> None:
    assert vocabulary(size, ranks) == made
    assert all(made % n == 0 and -(-made // 64) * 64 % n == 0 for n in ranks)


def test_the_size_of_a_head_is_said_where_the_width_no_longer_tells_it() -> None:
    table = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 384}
    assert fitted_sizes(table, (3,)) == {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}


def test_no_number_of_heads_is_an_error() -> None:
    with pytest.raises(RewriterError, match="no number of heads near 9 in 3 groups divides by 4999"):
        grouped_heads(9, 3, (4999,), shared=True)
