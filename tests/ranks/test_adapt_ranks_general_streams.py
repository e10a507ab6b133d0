"""Gradients of models whose layers hand values on, or carry a stream of any form, on two ranks: the parts of those of
one device (`unit/adapt/test_adapt_general_streams.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from general_streams import GRADIENTS, HEALED, errors, gradients_on_rank, healed
from ranks import run_ranks

TYPES = [name if name == "gemma4_text" else pytest.param(name, marks=pytest.mark.slow) for name in HEALED]


@pytest.mark.parametrize("name", TYPES)
def test_two_ranks_have_the_gradients_of_one_device(name: str, tmp_path: Path) -> None:
    """Of shards, and of what both ranks hold, each has all of it: values that are handed on are summed like others."""
    case = healed(name, tmp_path / "model")
    sharded = case.sharded(2)
    assert any(p.ranges is not None for p in sharded.parameters.values())
    for rank, (loss, found) in enumerate(run_ranks(gradients_on_rank, 2, case.case(2), case.batch)):
        assert loss == pytest.approx(case.loss, rel=1e-5)
        far = {n: error for n, error in errors(found, case, sharded, rank).items() if not error < GRADIENTS}
        assert not far, f"rank {rank}"
