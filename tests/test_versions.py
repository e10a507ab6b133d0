"""Emitted checkpoints in other versions of transformers, and theirs in the installed one: `benchmarks/versions.py`."""

import subprocess
import sys

import pytest
from subprocesses import ROOT

CHECKPOINTS = 6 + 4  # ladder of every family, desync of those without a norm behind the reduction


@pytest.mark.slow
def test_emitted_checkpoints_run_in_other_versions_of_transformers() -> None:
    """Installs them: without a package index this fails."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "versions.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}"
    assert ran.stdout.count(" ok ") == 10 * CHECKPOINTS, ran.stdout  # 4 in their own, 3 to others and 3 back
    assert ran.stdout.count("refused: MixtralExperts") == 2, ran.stdout
