"""benchmarks/convert/kills.py, with few kills: a conversion that is killed anywhere is resumed to the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/convert/kills.py"), "--kills", "20", "--seed", "1", "--json"]
    ran = subprocess.run([*command, "--dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout)
    assert sum(count for what, count in counts.items() if what.startswith("killed")) == 20
    assert counts["came to the same files"] >= 5  # each way at least once
