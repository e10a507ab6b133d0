"""Random architectures × random mixes of layers: what the passes make equals the reference, on 1, 2 and 4 ranks."""

from __future__ import annotations

import random
from pathlib import Path

import draws
import pytest
from random_mixes import check_generation, check_mixes
from transformers import AutoConfig

from rewriter.check.per_rank_reference import LayerMode


def check(family: str, seed: int, mixes: int) -> None:
    """`mixes` random mixes of a random architecture of `family` equal the reference at each number of ranks."""
    rng = random.Random(f"{family} {seed}")
    drawn = draws.architecture(rng, family)
    check_mixes(rng, drawn, [draws.mix(rng, drawn, (2, 4, 1)[(seed + number) % 3]) for number in range(mixes)], seed)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("family", draws.ALL_FAMILIES[::2])
@pytest.mark.fast("qwen3_moe-0")
def test_random_mixes_of_random_architectures_equal_the_reference(family: str, seed: int) -> None:
    check(family, seed, mixes=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("family", draws.ALL_FAMILIES)
def test_many_random_mixes_of_random_architectures_equal_the_reference(family: str, seed: int) -> None:
    check(family, seed, mixes=6)


def test_what_follows_a_desynced_layer_starts_drained_also_after_a_block_that_reduces_nothing() -> None:
    """The MLP of 57 channels is computed in full by both ranks, after the last reduction of the desynced layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 57, "num_attention_heads": 4, "vocab_size": 256}
    config = AutoConfig.for_model("llama", num_hidden_layers=3, pad_token_id=0, **sizes)
    runs = (((0, 1), LayerMode("desync", resync="sum")), ((2,), LayerMode("ladder")))
    chosen = draws.Mix(2, runs, dict.fromkeys((0, 1), (False, False)))
    check_mixes(random.Random(0), draws.Architecture(config, 2, divides=False), [chosen])


# With a cache


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("gpt2", 4), ("gemma2", 2), ("granite", 2)])
@pytest.mark.fast("gemma2-2")
def test_adapted_checkpoints_write_with_a_cache_what_the_reference_gives(
    family: str, ranks: int, tmp_path: Path
) -> None:
    check_generation(family, 0, ranks, tmp_path)


# The per-rank residuals of experts are not computed on one device: such checkpoints are refused.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *[(family, 1) for family in draws.ALL_FAMILIES],
        *[(family, ranks) for family in draws.FAMILIES if family not in draws.EXPERTS for ranks in (2, 4)],
    ],
)
def test_many_adapted_checkpoints_write_with_a_cache_what_the_reference_gives(
    family: str, ranks: int, seed: int, tmp_path: Path
) -> None:
    check_generation(family, seed, ranks, tmp_path, tokens=24)
