"""Settings that every test shares: one thread, no network, no chatter; and which cells of a matrix every run tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before transformers is imported: it reads these once. Subprocesses (real ranks, the CLI) inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Code of emitted checkpoints is copied here when it is loaded: not into the user's cache.
if "REWRITER_TEST_MODULES" not in os.environ:
    os.environ["HF_MODULES_CACHE"] = os.environ["REWRITER_TEST_MODULES"] = tempfile.mkdtemp(prefix="rewriter-modules-")
    atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

import pytest
import torch
import traced_once

# Results must not depend on the number of cores, and parallel test processes must not fight for them.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Register the project's markers, so that a misspelt one is an error under `--strict-markers`."""
    config.addinivalue_line("markers", "slow: takes more than about ten seconds (real processes, long generations)")
    config.addinivalue_line("markers", "fast(*ids): the cells of a parametrized test that are not slow")
    config.addinivalue_line("markers", "smoke: slow, and run with every set of versions all the same (make matrix)")
    config.addinivalue_line("markers", "tracer: tests the tracer, which traces every model anew")
    if config.pluginmanager.hasplugin("hypothesispytest"):  # the environment of vLLM has none
        from hypothesis import HealthCheck, settings

        # How long an example takes depends on what else the machine does.
        settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before fixtures trace
def pytest_runtest_setup(item: pytest.Item) -> None:
    traced_once.install(item.get_closest_marker("tracer") is None)


_UNKNOWN = pytest.StashKey[list[str]]()


@pytest.fixture
def unknown_fast_cells(request: pytest.FixtureRequest) -> list[str]:
    """What `fast` names and no cell is called, of the files of this run."""
    return request.config.stash[_UNKNOWN]


@pytest.hookimpl(tryfirst=True)  # before `-m 'not slow'` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cells that `fast` leaves out, and those of a matrix over model families that only repeat what
    others test.

    A matrix over the whole zoo runs `zoo.KINDS`, which have one family of each kind. Where families are crossed with
    other parameters, the first family takes all of their values, and each further one takes one in turn.
    """
    zoo: Any = sys.modules.get("zoo")  # tests that import it have families
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            fast = item.get_closest_marker("fast")
            if fast is not None and item.callspec.id not in fast.args:
                item.add_marker(pytest.mark.slow)
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    config.stash[_UNKNOWN] = [
        f"{test}[{named}]"
        for test, cells in matrices.items()
        if (fast := cells[0].get_closest_marker("fast")) is not None
        for named in set(fast.args) - {cell.callspec.id for cell in cells}
    ]
    for cells in matrices.values() if zoo is not None else ():
        for cell in _repetitions(cells, set(zoo.FAMILIES), zoo.KINDS):
            cell.add_marker(pytest.mark.slow)


def _repetitions(cells: list[pytest.Function], zoo: set[str], kinds: tuple[str, ...]) -> Iterator[pytest.Function]:
    for axis in ("family", "name"):
        families = list(dict.fromkeys(cell.callspec.params.get(axis) for cell in cells))
        if len(families) < 4 or not set(families) <= zoo:
            continue
        chosen = [family for family in families if family in kinds or set(families) < zoo]
        seen: dict[str, int] = {}
        for cell in cells:
            family = cell.callspec.params[axis]
            number = seen[family] = seen.get(family, -1) + 1
            values = len(cells) // len(families)
            if family not in chosen or (family != chosen[0] and number != chosen.index(family) % values):
                yield cell


def pytest_collection_finish() -> None:
    """Imported modules stay to the end: the collector need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nothing is wrong with."""
    import zoo

    root = tmp_path_factory.mktemp("good") / "m"
    zoo.save("llama", root)
    return root


@pytest.fixture
def model(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a good model to be spoilt; the working directory is beside it."""
    shutil.copytree(good, tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    return tmp_path / "m"
