"""Groups of cases that run in vLLM once for each file of tests."""

from __future__ import annotations

from functools import cache

import pytest
from cases import of_vllm


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def ran(root):
    """Runs the group of cases of which one is asked, all in one process, once."""

    @cache
    def run(group):
        return dict(zip(map(str, group), of_vllm(list(group), root), strict=True))

    return run
