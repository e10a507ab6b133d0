"""The small checkpoint that a search measures, for the tests of searches."""

from __future__ import annotations

from pathlib import Path

import pytest
import searched
import torch

from rewriter.ir import Program
from rewriter.ir.simulate import load_weights
from rewriter.predict.search.measured import Measurements, Store, Text
from rewriter.tracing import trace

RANKS = 3
IDS = torch.randint(131, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched.save(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def program(directory: Path) -> Program:
    return trace(directory)


@pytest.fixture
def measured(program: Program) -> Measurements:
    text = Text(IDS.tolist(), IDS.tolist(), "random tokens")
    return Measurements(program, RANKS, load_weights(program), text, Store(None, {}))
