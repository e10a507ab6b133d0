"""Code that runs in another process or from a file: kernels in Triton's interpreter, statements, benchmarks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from repository import ROOT, TESTS


def interpreted(script: str, *arguments: str, timeout: float = 600.0) -> Any:
    """The JSON that tests/support/`script` prints where Triton interprets kernels."""
    settings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(TESTS / "support" / script), *arguments]
    ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=timeout, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    """`python -c code`. Raises CalledProcessError where it fails."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def load_module(name: str, path: Path) -> ModuleType:
    """The file at `path` as module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
