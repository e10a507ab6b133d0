"""Settings that every test shares: one thread, no network, no chatter."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

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

# Results must not depend on the number of cores, and parallel test processes must not fight for them.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Register the project's markers, so that a misspelt one is an error under `--strict-markers`."""
    config.addinivalue_line("markers", "slow: takes more than about ten seconds (real processes, long generations)")
