"""The small checkpoint that a search measures, for the tests of searches."""

from __future__ import annotations

from pathlib import Path

import pytest
import searched

from rewriter.ir import Program
from rewriter.predict.search.computed import Computed
from rewriter.predict.search.measurements import StreamedWeights
from rewriter.tracing import trace

RANKS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched.save(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def program(directory: Path) -> Program:
    return trace(directory)


@pytest.fixture(scope="module")
def computed(program: Program) -> Computed:
    return Computed(program, RANKS, StreamedWeights(program))
