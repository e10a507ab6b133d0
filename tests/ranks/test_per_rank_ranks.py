"""Rewrites that are bound to the ranks, on real ranks: logits, every gradient and greedy tokens with a cache.

The reference is the same program over simulated ranks: one process, one autograd graph, no cache, nothing in place.
"""

from __future__ import annotations

import pytest
from per_rank_wiring_ranks import Passes, check

OWN = {"variant": "own_partial"}
CASES: dict[str, Passes] = {
    "desync 2x, mean": [("desync", {"n": 2})],
    "desync 2x, sum": [("desync", {"n": 2, "resync": "sum"})],
    "desync 4x, mean": [("desync", {"n": 4})],
    "desync 4x, sum, untied norms": [("desync", {"n": 4, "resync": "sum", "untie_norms": True})],
    "own partial": [("ladder", OWN)],
    "parallel": [("parallel_block", {}), ("merge_reductions", {}), ("fuse_projections", {})],
    "ladder, standard, desync": [("ladder", {"layers": [1]}), ("desync", {"n": 2, "resync": "sum", "layers": [3]})],
    "desync, own partial, standard": [("desync", {"n": 4, "layers": [0, 1]}), ("ladder", {"layers": [2], **OWN})],
    "parallel, own partial, desync": [
        ("parallel_block", {"layers": [0]}),
        ("merge_reductions", {}),
        ("ladder", {"layers": [1, 2], **OWN}),
        ("desync", {"layers": [3], "n": 2}),
    ],
}
# Blocks that are parallel already: one reduction per layer.
NATIVE = {
    "desync 2x, mean": [("desync", {"n": 2})],
    "desync 2x, sum, untied norms": [("desync", {"n": 2, "resync": "sum", "untie_norms": True})],
    "own partial": [("ladder", OWN)],
    "own partial, standard, desync": [("ladder", {"layers": [1], **OWN}), ("desync", {"n": 2, "layers": [2, 3]})],
}
FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox", "mixtral"]


TELLING = ("desync 4x, sum, untied norms", "parallel, own partial, desync")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mixes_on_two_ranks_equal_the_simulation(name: str) -> None:
    check(name, 2, {label: CASES[label] for label in TELLING})


def test_own_partials_are_read_before_their_sums_replace_them_without_overlap_too() -> None:
    check("llama", 2, {"own partial": CASES["own partial"]}, new_tokens=4, overlap=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_the_simulation(name: str) -> None:
    check(name, 2, NATIVE if name == "gpt_neox" else CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_equal_the_simulation(name: str) -> None:
    check(name, 4, NATIVE if name == "gpt_neox" else CASES)
