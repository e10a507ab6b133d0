"""The version of this package, and where it is installed."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
PACKAGE_PARENT = Path(__file__).resolve().parents[2]  # what PYTHONPATH needs in processes that import the package
