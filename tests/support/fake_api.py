"""A fake `rewriter.api`, which records what the command line asks of it and does nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import rewriter


def installed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fake`, which is `rewriter.api` until the test ends; errors are one line."""
    monkeypatch.setitem(sys.modules, "rewriter.api", fake)
    monkeypatch.setattr(rewriter, "api", fake, raising=False)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    return fake
