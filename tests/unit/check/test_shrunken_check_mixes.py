"""Shrunken checks of recipes that mix kinds of layers: the copy has the same choices, and faults are noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zoo
from transformers import AutoConfig

from rewriter.check.random_model import amplification, random_model
from rewriter.check.reference_modes import layer_modes
from rewriter.check.shrunken_check import STEADY, check_shrunken
from rewriter.common.errors import VerificationError
from rewriter.ir import Program
from rewriter.passes import desync as desync_module
from rewriter.passes.desync import Desync
from rewriter.passes.drop_sync import DropSync
from rewriter.passes.ladder import Ladder
from rewriter.passes.parallel_block import ParallelBlock
from rewriter.passes.residual_rewrite import chosen_blocks
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes import Recipe
from rewriter.tracing import trace
from rewriter.tracing.shrink import representatives, shrink

# The choices on the copy

KEEP, DROP = "keep", "drop"
PATTERN = ((DROP, KEEP), (DROP, DROP), (KEEP, KEEP))


def test_dropped_layers_keep_their_places() -> None:
    costs = (5.0, 1.0, 5.0, 5.0, 2.0, 5.0)
    assert DropSync(2, costs).kinds_of_layers(6) == [{1, 4}]
    assert DropSync(2, costs).shrunken([0, 1, 2, 4, 5], 6) == [DropSync(layers=[1, 3])]


def test_a_pattern_is_split_run_by_run() -> None:
    rewrite = Desync([0, 1, 2, 3, 6, 7], pattern=PATTERN, resync="sum")
    kinds = rewrite.kinds_of_layers(8)
    assert kinds == [{0, 1, 2, 3, 6, 7}, {0, 3, 6}, {1, 7}, {2}]
    first, second = rewrite.shrunken([1, 2, 3, 5, 6, 7], 8)
    assert first == Desync([0, 1, 2], pattern=(PATTERN[1], PATTERN[2], PATTERN[0]), resync="sum")
    assert second == Desync([4, 5], pattern=(PATTERN[0], PATTERN[1]), resync="sum")


def test_what_selects_no_layers_is_left_as_it_is() -> None:
    assert TensorParallel().kinds_of_layers(6) == []
    assert TensorParallel().shrunken([0, 1], 6) == [TensorParallel()]


# What the reference gets


@pytest.mark.parametrize(
    ("rewrite", "kept"),
    [
        (Desync(n=2), [0, 1] * 4),
        (Desync(n=3), [0, 0, 1, 0, 0, 1, 0, 1]),
        (Desync(n=4), [0, 0, 0, 1] * 2),
        (Desync("first:3", n=4), [0, 0, 0, 1, 0, 1]),
        (Desync("1-3", n=5), [0, 0, 0, 0, 1, 1]),
        (Desync([0, 1, 3], n=2, resync="sum"), [0, 1, 0, 1, 0, 1]),
        (Desync(pattern=PATTERN), [0, 1, 0, 0, 1, 1, 0, 1]),
        (DropSync(layers=[1, 3]), [0, 1, 0, 1]),
    ],
)
def test_the_reference_gets_which_reductions_are_kept(rewrite: Any, kept: Sequence[int]) -> None:
    """Written out by hand: the last reduction of a run of layers is kept whatever the pattern says."""
    modes = layer_modes(zoo.shared("llama"), [rewrite], ())
    found = [keep for layer in sorted(modes) for keep in modes[layer].keep]
    runs_end = [i for i, layer in enumerate(sorted(modes)) if layer + 1 not in modes]
    for place in runs_end:
        found[2 * place + 1] = True
    assert found == [bool(k) for k in kept]
    assert {m.resync for m in modes.values()} == {getattr(rewrite, "resync", "sum")}


def test_the_reference_gets_the_other_modes() -> None:
    passes = [Ladder("0-1"), Ladder([2], "own_partial"), ParallelBlock([3], "mlp")]
    modes = layer_modes(zoo.shared("llama"), passes, ())
    assert [modes[layer].mode for layer in range(4)] == ["ladder", "ladder", "own_partial", "parallel"]
    assert modes[3].norm == "mlp"


# The shrunken check


@pytest.mark.parametrize("name", ["desync-4x-sum", "ladder-own-partial", "ladder-then-desync", "parallel"])
@pytest.mark.fast("ladder-then-desync")
def test_a_shipped_recipe_passes(name: str) -> None:
    config = zoo.config("llama")
    config.num_hidden_layers = 8
    check_shrunken(config, Recipe.load(name).build(), 2)


@pytest.mark.slow
def test_a_pattern_passes_on_a_deep_model() -> None:
    config = zoo.config("llama")
    config.num_hidden_layers = 14
    check_shrunken(config, [TensorParallel(), Desync("2-9", pattern=PATTERN, resync="sum"), Ladder("last:3")], 2)


FAULTS = {
    "mean for sum": lambda kept, resync: (kept, "mean"),
    "one more dropped": lambda kept, resync: ({**kept, 3: False}, resync),
    "one kept": lambda kept, resync: ({**kept, 2: True}, resync),
    "shifted by one": lambda kept, resync: ({i: kept.get(i - 1, True) for i in kept} | {max(kept): True}, resync),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.fast("mean for sum")
def test_a_fault_in_a_desynced_run_fails_the_shrunken_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = desync_module.desynchronise

    def faulty(program: Program, kept: dict[int, bool], resync: Any, *rest: Any) -> Program:
        return whole(program, *FAULTS[fault](kept, resync), *rest)

    monkeypatch.setattr(desync_module, "desynchronise", faulty)
    with pytest.raises(VerificationError, match=r"rewritten = its reference: worst at row \d, token \d+"):
        check_shrunken(zoo.config("llama"), [TensorParallel(), Desync(n=2, resync="sum")], 2)


def test_the_faults_are_seeded_where_they_can_be_seen() -> None:
    """Each fault changes what is kept: else its test would pass for another reason."""
    program = TensorParallel().apply(trace(zoo.config("llama")).with_(mesh={"tp": 2}))
    blocks = chosen_blocks(program, "desync", "all")
    kept = {b.index: b.index % 2 == 1 for b in blocks}
    for change in FAULTS.values():
        assert change(dict(kept), "sum") != (kept, "sum")


# Models that amplify rounding


@pytest.mark.slow
def test_a_chaotic_model_is_checked_with_smaller_weights() -> None:
    """Linear attention with large weights amplifies rounding a thousandfold: a right ladder would fail by chance."""
    config = AutoConfig.for_model("qwen3_next")
    small = shrink(config, representatives(config, [set(range(24, 48))]), 2)
    assert amplification(random_model(small, 1.0), small, 100) > 4 * STEADY
    assert amplification(random_model(small, 0.5), small, 100) < STEADY
    assert amplification(random_model(zoo.config("llama")), zoo.config("llama"), 100) < STEADY
    check_shrunken(config, [TensorParallel(), Ladder("upper-half")], 2)
